"""Brings a cluster to the rendered state, and removes an installation.

Objects are found by their labels, so an upgrade also removes objects that the new version no longer has.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from operate.install.availability import is_going, wait_until_available, wait_until_gone
from operate.install.cluster import Cluster, ForbiddenError, InstallError
from operate.install.objects import (
    CRD,
    DEPLOYMENT,
    ENVOY_FILTER,
    INSTALLATION,
    KINDS,
    MANAGED_BY,
    NAMESPACE,
    OWNED,
    OWNER,
    POLICY,
    ROLE,
    SECRET,
    SPACES,
    STATUS_LEASE,
    Document,
    Kind,
    describe,
    kind_of,
)

log = logging.getLogger(__name__)
Key = tuple[str, str, str]  # kind, namespace, name
SERVERS_OWN = ("resourceVersion", "generation", "managedFields")  # metadata maintained by the API server


def install(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    installation: str,
    wait_seconds: float,
    once: Sequence[Document] = (),
    namespaced: bool = False,
    force: bool = False,
    say: Callable[[str], None] = log.info,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Apply `documents`, and remove other objects of an earlier installation with this name.

    Objects of `once` are created if missing and never changed, because their content differs from run to run.
    With `namespaced`, earlier objects are searched only in the installation's namespaces, without rights elsewhere.
    Objects that reroute requests come last, once the workloads are available: a gateway without a picker answers 503.
    Raise InstallError, before any change, if the cluster lacks a kind, refuses an object, or has a foreign object of
    the same name.
    """
    _check_kinds(cluster, [*once, *documents])
    earlier = _recorded_spaces(cluster, installation)
    documents = [_with_spaces(each, documents, earlier) for each in documents]
    _wait_for_namespaces(cluster, documents, say=say, now=now, sleep=sleep)
    existing = {_key(each): _existing(cluster, each) for each in [*documents, *once]}
    _check_owners(documents, existing, installation)
    wait_until_gone(
        cluster, [each for each in documents if is_going(existing[_key(each)])], say=say, now=now, sleep=sleep
    )
    documents = _with_missing(documents, [each for each in once if existing[_key(each)] is None])
    foreign = [each for each in documents if _is_foreign_namespace(each, existing)]
    for document in foreign:
        say(f"left as it is: {describe(document)} (not made by kvmesh install)")
    wanted_here = [each for each in documents if each not in foreign]
    _rehearse(cluster, wanted_here, existing, force=force)

    def apply(document: Document) -> None:
        after = cluster.apply(document, force=force)
        say(f"{_outcome(existing[_key(document)], after)} {describe(document)}")

    for document in (each for each in wanted_here if not _steers(each)):
        apply(document)
    wait_until_available(cluster, documents, wait_seconds=wait_seconds, say=say, now=now, sleep=sleep)
    for document in filter(_steers, wanted_here):
        apply(document)
    spaces = sorted({*_spaces(documents), *earlier}) if namespaced else None
    wanted = {_key(document) for document in documents}
    for kind in reversed(KINDS):
        if kind in {NAMESPACE, CRD, SECRET} or kind.name == "PersistentVolumeClaim":
            continue  # these hold users' data
        for document in _ours(cluster, kind, installation, spaces):
            if _key(document) not in wanted:
                _delete(cluster, kind, document, say=say)


def uninstall(
    cluster: Cluster,
    *,
    installation: str,
    settle_seconds: float,
    keep_crds: bool = False,
    say: Callable[[str], None] = log.info,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Remove everything that `install` made; return the number of objects.

    Objects that reroute requests go first, then gateways get `settle_seconds` to receive the change. CRDs, and all
    policies with them, are removed with the cluster's last installation.
    """
    removed = 0
    spaces = _spaces_to_search(cluster, installation)
    for kind in reversed(KINDS):
        if kind == CRD:
            continue
        ours = _ours(cluster, kind, installation, spaces)
        # our namespace last: its Role records the others
        for document in sorted(ours, key=lambda each: each["metadata"].get("namespace") == installation):
            _delete(cluster, kind, document, say=say)
        removed += len(ours)
        if kind == ENVOY_FILTER and ours:
            sleep(settle_seconds)
    if not keep_crds and is_last(cluster, installation):
        for document in cluster.labelled(CRD, OWNED):
            _delete(cluster, CRD, document, say=say)
            removed += 1
    return removed


def is_last(cluster: Cluster, installation: str) -> bool:
    """Tell whether there is no other installation; False if we lack the rights to see."""
    try:
        deployments = cluster.labelled(DEPLOYMENT, OWNED)
    except ForbiddenError:
        return False
    return {each["metadata"]["labels"].get(INSTALLATION, "") for each in deployments} <= {installation, ""}


def policies(cluster: Cluster) -> list[str]:
    """Return the InferencePolicies that would be deleted with their CRD, as `namespace/name`."""
    found = cluster.labelled(POLICY, {}) if cluster.serves(POLICY) else []
    return [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found]


def _check_kinds(cluster: Cluster, documents: Sequence[Document]) -> None:
    missing = [kind for kind in sorted({each["kind"] for each in documents}) if not cluster.serves(kind_of(kind))]
    if missing:
        raise InstallError(
            f"the cluster has no {', '.join(missing)}: install Istio first (ServiceMonitor: the Prometheus operator, "
            "or leave --monitoring out). Nothing was changed"
        )


def _existing(cluster: Cluster, document: Document) -> Document | None:
    meta = document["metadata"]
    return cluster.get(kind_of(document["kind"]), meta["name"], meta.get("namespace"))


def _wait_for_namespaces(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    say: Callable[[str], None],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Wait until our own terminating namespace is gone. Raise InstallError if a namespace of others is terminating."""
    ours = [each for each in documents if each["kind"] == NAMESPACE.name]
    for name in sorted({*_spaces(documents)} - {each["metadata"]["name"] for each in ours}):
        try:
            going = is_going(cluster.get(NAMESPACE, name, None))
        except ForbiddenError:
            continue  # no right to read namespaces
        if going:
            raise InstallError(f"namespace {name} is being removed: make it anew first. Nothing was changed")
    wait_until_gone(cluster, ours, say=say, now=now, sleep=sleep)


def _check_owners(documents: Sequence[Document], existing: Mapping[Key, Document | None], installation: str) -> None:
    """Raise InstallError for objects of other owners or installations: a gateway or pool has one installation."""
    for document in documents:
        found = existing[_key(document)]
        if found is None or document["kind"] in {NAMESPACE.name, CRD.name}:
            continue  # namespaces are not changed; the CRD is ours by its name
        labels = found["metadata"].get("labels") or {}
        owner = labels.get(INSTALLATION, installation)
        if owner != installation:
            raise InstallError(
                f"{describe(document)} belongs to the installation in namespace {owner}: a gateway and a pool can have "
                "one installation only. Nothing was changed"
            )
        if labels.get(MANAGED_BY) != OWNER:
            raise InstallError(
                f"{describe(document)} is there and was not made by kvmesh install: its label {MANAGED_BY} is "
                f"{labels.get(MANAGED_BY, 'missing')!r}. Remove it, or set the labels {MANAGED_BY}={OWNER} and "
                f"{INSTALLATION}={installation} if kvmesh may have it. Nothing was changed"
            )


def _with_missing(documents: Sequence[Document], missing: Sequence[Document]) -> list[Document]:
    """Insert the missing documents after the cluster-wide ones, which include their namespace."""
    roots = [each for each in documents if "namespace" not in each["metadata"]]
    return [*roots, *missing, *(each for each in documents if "namespace" in each["metadata"])]


def _rehearse(
    cluster: Cluster, documents: Sequence[Document], existing: Mapping[Key, Document | None], *, force: bool
) -> None:
    """Dry-run what can be: the API server refuses bindings to missing roles unless the user has all rights."""
    to_come = {
        each["metadata"]["name"]
        for each in documents
        if each["kind"] == NAMESPACE.name and (existing[_key(each)] is None or is_going(existing[_key(each)]))
    }
    for document in documents:
        namespace = document["metadata"].get("namespace")
        if namespace in to_come or ("roleRef" in document and _lacks_role(document, existing)):
            continue
        try:
            cluster.apply(document, force=force, rehearse=True)
        except InstallError as error:
            raise InstallError(f"{error}. Nothing was changed") from error


def _lacks_role(binding: Document, existing: Mapping[Key, Document | None]) -> bool:
    role = binding["roleRef"]
    return existing.get((role["kind"], binding["metadata"].get("namespace", ""), role["name"])) is None


def _outcome(before: Document | None, after: Document) -> str:
    if before is None or is_going(before):
        return "created"
    return "unchanged" if _content(before) == _content(after) else "changed"


def _content(document: Document) -> Document:
    meta = {key: value for key, value in document["metadata"].items() if key not in SERVERS_OWN}
    return {key: value for key, value in document.items() if key not in {"status", "kind", "apiVersion"}} | {
        "metadata": meta
    }


def _spaces(documents: Sequence[Document]) -> list[str]:
    return sorted({each["metadata"]["namespace"] for each in documents if "namespace" in each["metadata"]})


def _with_spaces(document: Document, documents: Sequence[Document], earlier: Sequence[str]) -> Document:
    """Record in our Role the namespaces with our objects, for users who may not list all namespaces."""
    if (document["kind"], document["metadata"]["name"]) != (ROLE.name, STATUS_LEASE):
        return document
    meta = document["metadata"]
    names = ",".join(sorted({*_spaces(documents), *earlier}))
    return {**document, "metadata": {**meta, "annotations": {**meta.get("annotations", {}), SPACES: names}}}


def _recorded_spaces(cluster: Cluster, installation: str) -> list[str]:
    role = cluster.get(ROLE, STATUS_LEASE, installation)
    annotations = (role or {}).get("metadata", {}).get("annotations") or {}
    return [name for name in annotations.get(SPACES, "").split(",") if name]


def _spaces_to_search(cluster: Cluster, installation: str) -> list[str] | None:
    """Return the namespaces that may have our objects, or None (all) if we may list the whole cluster."""
    try:
        cluster.labelled(ROLE, OWNED | {INSTALLATION: installation})
    except ForbiddenError:
        return sorted({installation, *_recorded_spaces(cluster, installation)})
    return None


def _steers(document: Document) -> bool:
    return bool(document["kind"] == ENVOY_FILTER.name)


def _is_foreign_namespace(document: Document, existing: Mapping[Key, Document | None]) -> bool:
    found = existing.get(_key(document)) if document["kind"] == NAMESPACE.name else None
    return found is not None and not is_going(found) and INSTALLATION not in (found["metadata"].get("labels") or {})


def _ours(cluster: Cluster, kind: Kind, installation: str, spaces: Sequence[str] | None) -> Sequence[Document]:
    if kind.optional and not cluster.serves(kind):
        return []
    labels = OWNED | {INSTALLATION: installation}
    if spaces is None:
        found = cluster.labelled(kind, labels)
    elif kind.namespaced:
        found = [each for space in spaces for each in cluster.labelled(kind, labels, space)]
    else:
        try:
            found = cluster.labelled(kind, labels)
        except ForbiddenError:
            return []  # without the right to list them, we have made none
    return [each for each in found if not is_going(each)]


def _delete(cluster: Cluster, kind: Kind, document: Document, *, say: Callable[[str], None]) -> None:
    cluster.delete(kind, document["metadata"]["name"], document["metadata"].get("namespace"))
    say(f"removed {describe({**document, 'kind': kind.name})}")


def _key(document: Document) -> Key:
    meta = document["metadata"]
    return document["kind"], meta.get("namespace", ""), meta["name"]
