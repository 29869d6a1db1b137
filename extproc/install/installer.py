"""Brings a cluster to what was rendered, and takes it all away again.

Objects are found again by their labels, so that an upgrade removes what the last version made and this one does not.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from extproc.install.availability import is_going, wait_until_available, wait_until_gone
from extproc.install.cluster import Cluster, ForbiddenError, InstallError
from extproc.install.objects import (
    API_SERVICE,
    CRD,
    DEPLOYMENT,
    DESTINATION_RULE,
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
SERVERS_OWN = ("resourceVersion", "generation", "managedFields")  # metadata that a server changes by itself


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
    """Apply `documents`, and remove what an earlier installation of that name had beside them.

    An object of `once` is created where it is missing and never changed, as its content differs from run to run.
    `namespaced` looks for earlier objects in the namespaces of these ones alone, and needs no right in others.

    Objects that change the way of requests come last, and only when the workloads are available: a gateway that asks a
    picker in vain answers 503. Raise InstallError, before anything is changed, where the cluster lacks a kind, refuses
    an object, or has one of that name that is not ours.
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
    # filters first: a cluster that is to follow the picker alone (PASSTHROUGH) leads nowhere without them
    for document in sorted(filter(_steers, wanted_here), key=lambda each: each["kind"] != ENVOY_FILTER.name):
        apply(document)
    spaces = sorted({*_spaces(documents), *earlier}) if namespaced else None
    wanted = {_key(document) for document in documents}
    for kind in reversed(KINDS):
        if kind in {NAMESPACE, CRD, SECRET} or kind.name == "PersistentVolumeClaim":
            continue  # these hold what belongs to people
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
    """Remove everything that `install` made; return how many objects that were.

    Objects that change the way of requests go first; gateways then get `settle_seconds` to hear of it before the rest
    goes. CRDs, and all policies with them, go with the last installation of the cluster.
    """
    removed = 0
    spaces = _spaces_to_search(cluster, installation)
    for document in filter(_steers, _ours(cluster, DESTINATION_RULE, installation, spaces)):
        _delete(cluster, DESTINATION_RULE, document, say=say)  # before the filters: see `install`
        removed += 1
    for kind in reversed(KINDS):
        if kind == CRD:
            continue
        ours = _ours(cluster, kind, installation, spaces)
        # the Role in which we find our namespaces is in our own: last of its kind
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
    """Tell whether no other installation is there; not so where we may not see."""
    try:
        return not others(cluster, installation)
    except ForbiddenError:
        return False


def others(cluster: Cluster, installation: str) -> list[str]:
    """Return the names of the other installations in the cluster."""
    deployments = cluster.labelled(DEPLOYMENT, OWNED)
    names = {each["metadata"]["labels"].get(INSTALLATION, "") for each in deployments}
    return sorted(names - {installation, ""})


def policies(cluster: Cluster) -> list[str]:
    """Return the InferencePolicies that would go with their CRD, as `namespace/name`."""
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
    """Let a namespace that we make anew be gone first; refuse where one that others make is being removed."""
    ours = [each for each in documents if each["kind"] == NAMESPACE.name]
    for name in sorted({*_spaces(documents)} - {each["metadata"]["name"] for each in ours}):
        try:
            going = is_going(cluster.get(NAMESPACE, name, None))
        except ForbiddenError:
            continue  # whoever may only write into it
        if going:
            raise InstallError(f"namespace {name} is being removed: make it anew first. Nothing was changed")
    wait_until_gone(cluster, ours, say=say, now=now, sleep=sleep)


def _check_owners(documents: Sequence[Document], existing: Mapping[Key, Document | None], installation: str) -> None:
    """Refuse to take over what other people or another installation made: a gateway and a pool belong to one."""
    # the server of an API first: its words say more than those of what goes with it
    for document in sorted(documents, key=lambda each: each["kind"] != API_SERVICE.name):
        found = existing[_key(document)]
        if found is None or document["kind"] in {NAMESPACE.name, CRD.name}:
            continue  # namespaces stay as they are; the definition is ours by its name
        labels = found["metadata"].get("labels") or {}
        owner = labels.get(INSTALLATION, installation)
        if owner != installation:
            raise InstallError(
                f"{describe(document)} belongs to the installation in namespace {owner}: {_only_one(document)}. "
                "Nothing was changed"
            )
        if labels.get(MANAGED_BY) != OWNER and document["kind"] == API_SERVICE.name:
            raise InstallError(f"{describe(document)} {_other_server(found)}. Nothing was changed")
        if labels.get(MANAGED_BY) != OWNER:
            raise InstallError(
                f"{describe(document)} is there and was not made by kvmesh install: its label {MANAGED_BY} is "
                f"{labels.get(MANAGED_BY, 'missing')!r}. Remove it, or set the labels {MANAGED_BY}={OWNER} and "
                f"{INSTALLATION}={installation} if kvmesh may have it. Nothing was changed"
            )


def _only_one(document: Document) -> str:
    if document["kind"] == API_SERVICE.name:
        return "a cluster has one server of this API, which answers for the pools of all namespaces that it reads"
    return "a gateway and a pool can have one installation only"


def _other_server(found: Document) -> str:
    """Say who serves an API that we want to serve, and what to do."""
    service = (found.get("spec") or {}).get("service") or {}
    where = (
        f"leads to Service {service.get('namespace')}/{service.get('name')}" if service else "is the API server's own"
    )
    return (
        f"is there and {where}: a cluster has one server of this API, and KEDA and the Prometheus adapter are such "
        "servers. Leave --external-metrics out and let that one read kvmesh (docs/guides/autoscaling.md), or remove it"
    )


def _with_missing(documents: Sequence[Document], missing: Sequence[Document]) -> list[Document]:
    """Return the documents with those that are missing, after the namespace that they are in."""
    roots = [each for each in documents if "namespace" not in each["metadata"]]
    return [*roots, *missing, *(each for each in documents if "namespace" in each["metadata"])]


def _rehearse(
    cluster: Cluster, documents: Sequence[Document], existing: Mapping[Key, Document | None], *, force: bool
) -> None:
    """Have the API server judge every object first, but for those in a namespace or of a role that is yet to be made.

    Bindings to roles that are not there are refused to whoever does not have all rights.
    """
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
    """Return the namespaces that the documents are in."""
    return sorted({each["metadata"]["namespace"] for each in documents if "namespace" in each["metadata"]})


def _with_spaces(document: Document, documents: Sequence[Document], earlier: Sequence[str]) -> Document:
    """Note in our Role which namespaces have objects of ours: who may not list all finds them by that."""
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
    """Return the namespaces that may have objects of ours; None: all, for whoever may list them all."""
    try:
        cluster.labelled(ROLE, OWNED | {INSTALLATION: installation})
    except ForbiddenError:
        return sorted({installation, *_recorded_spaces(cluster, installation)})
    return None


def _steers(document: Document) -> bool:
    """Tell whether it changes the way of requests, of clients or of the API server.

    A filter, a rule by which addresses are dialled as picked, or what has the API server ask the pickers.
    """
    if document["kind"] == DESTINATION_RULE.name:
        policy = document.get("spec", {}).get("trafficPolicy", {})
        return bool(policy.get("loadBalancer", {}).get("simple") == "PASSTHROUGH")
    return bool(document["kind"] in {ENVOY_FILTER.name, API_SERVICE.name})


def _is_foreign_namespace(document: Document, existing: Mapping[Key, Document | None]) -> bool:
    found = existing.get(_key(document)) if document["kind"] == NAMESPACE.name else None
    return found is not None and not is_going(found) and INSTALLATION not in (found["metadata"].get("labels") or {})


def _ours(cluster: Cluster, kind: Kind, installation: str, spaces: Sequence[str] | None) -> Sequence[Document]:
    """Return our objects of a kind that nobody has removed yet, in these namespaces or in all."""
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
            return []  # who may not list them has made none
    return [each for each in found if not is_going(each)]


def _delete(cluster: Cluster, kind: Kind, document: Document, *, say: Callable[[str], None]) -> None:
    cluster.delete(kind, document["metadata"]["name"], document["metadata"].get("namespace"))
    say(f"removed {describe({**document, 'kind': kind.name})}")


def _key(document: Document) -> Key:
    meta = document["metadata"]
    return document["kind"], meta.get("namespace", ""), meta["name"]
