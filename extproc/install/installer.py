"""Brings a cluster to what was rendered, and takes it all away again.

Objects are found again by their labels, so that an upgrade removes what the last version made and this one does not.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from extproc.errors import KvmeshError
from extproc.install.objects import (
    CRD,
    DEPLOYMENT,
    DESTINATION_RULE,
    ENVOY_FILTER,
    INSTALLATION,
    KINDS,
    NAMESPACE,
    OWNED,
    POLICY,
    SECRET,
    Document,
    Kind,
    kind_of,
)
from extproc.install.plan import INDEXER, PICKER

POLL_SECONDS = 2.0
log = logging.getLogger(__name__)


class InstallError(KvmeshError):
    """The cluster refuses, or lacks something; the message says what to do."""


class Cluster(Protocol):
    """The Kubernetes API, as far as it is needed. Every call has a deadline; refusals are InstallError."""

    def serves(self, kind: Kind) -> bool:
        """Tell whether the cluster has this kind."""

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> None:
        """Apply by server-side apply; `force` takes over fields that others manage, `rehearse` changes nothing."""

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""

    def labelled(self, kind: Kind, labels: Mapping[str, str]) -> Sequence[Document]:
        """Return all objects with these labels, in all namespaces."""

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        """Delete an object and what it owns; one that is gone is no error."""


def install(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    installation: str,
    wait_seconds: float,
    once: Sequence[Document] = (),
    force: bool = False,
    say: Callable[[str], None] = log.info,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Apply `documents`, and remove what an earlier installation of that name had beside them.

    An object of `once` is created where it is missing and never changed, as its content differs from run to run.

    Objects that change the way of requests come last, and only when the picker is available: a gateway that asks a
    picker in vain answers 503. Raise InstallError, before anything is changed, where the cluster lacks a kind or
    refuses an object.
    """
    _check_kinds(cluster, [*once, *documents])
    _check_owners(cluster, documents, installation)
    documents = _with_missing(cluster, documents, once)
    foreign = [each for each in documents if _is_foreign_namespace(cluster, each)]
    for document in foreign:
        say(f"left as it is: {describe(document)} (not made by kvmesh install)")
    wanted_here = [each for each in documents if each not in foreign]
    _rehearse(cluster, wanted_here, force=force)
    for document in (each for each in wanted_here if not _steers(each)):
        cluster.apply(document, force=force)
        say(f"applied {describe(document)}")
    _wait_until_available(cluster, documents, wait_seconds=wait_seconds, say=say, now=now, sleep=sleep)
    # filters first: a cluster that is to follow the picker alone (PASSTHROUGH) leads nowhere without them
    for document in sorted(filter(_steers, wanted_here), key=lambda each: each["kind"] != ENVOY_FILTER.name):
        cluster.apply(document, force=force)
        say(f"applied {describe(document)}")
    wanted = {_key(document) for document in documents}
    for kind in reversed(KINDS):
        if kind in {NAMESPACE, CRD, SECRET} or kind.name == "PersistentVolumeClaim":
            continue  # these hold what belongs to people
        for document in _ours(cluster, kind, installation):
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
    for document in filter(_steers, _ours(cluster, DESTINATION_RULE, installation)):
        _delete(cluster, DESTINATION_RULE, document, say=say)  # before the filters: see `install`
        removed += 1
    for kind in reversed(KINDS):
        if kind == CRD:
            continue
        ours = _ours(cluster, kind, installation)
        for document in ours:
            _delete(cluster, kind, document, say=say)
        removed += len(ours)
        if kind == ENVOY_FILTER and ours:
            sleep(settle_seconds)
    if not keep_crds and not others(cluster, installation):
        for document in cluster.labelled(CRD, OWNED):
            _delete(cluster, CRD, document, say=say)
            removed += 1
    return removed


def others(cluster: Cluster, installation: str) -> list[str]:
    """Return the names of the other installations in the cluster."""
    deployments = cluster.labelled(DEPLOYMENT, OWNED)
    names = {each["metadata"]["labels"].get(INSTALLATION, "") for each in deployments}
    return sorted(names - {installation, ""})


def policies(cluster: Cluster) -> list[str]:
    """Return the InferencePolicies that would go with their CRD, as `namespace/name`."""
    found = cluster.labelled(POLICY, {}) if cluster.serves(POLICY) else []
    return [f"{each['metadata']['namespace']}/{each['metadata']['name']}" for each in found]


def describe(document: Document) -> str:
    """Name an object for people."""
    meta = document["metadata"]
    where = f"{meta['namespace']}/" if "namespace" in meta else ""
    return f"{document['kind']} {where}{meta['name']}"


def _check_kinds(cluster: Cluster, documents: Sequence[Document]) -> None:
    missing = [kind for kind in sorted({each["kind"] for each in documents}) if not cluster.serves(kind_of(kind))]
    if missing:
        raise InstallError(
            f"the cluster has no {', '.join(missing)}: install Istio first (ServiceMonitor: the Prometheus operator, "
            "or leave --monitoring out). Nothing was changed"
        )


def _check_owners(cluster: Cluster, documents: Sequence[Document], installation: str) -> None:
    """Refuse to take over what another installation made: a gateway and a pool belong to one."""
    for document in documents:
        meta = document["metadata"]
        existing = cluster.get(kind_of(document["kind"]), meta["name"], meta.get("namespace"))
        owner = ((existing or {}).get("metadata", {}).get("labels") or {}).get(INSTALLATION, installation)
        if owner != installation:
            raise InstallError(
                f"{describe(document)} belongs to the installation in namespace {owner}: a gateway and a pool can have "
                "one installation only. Nothing was changed"
            )


def _with_missing(cluster: Cluster, documents: Sequence[Document], once: Sequence[Document]) -> list[Document]:
    """Return the documents with those of `once` that are not there yet, after the namespace that they are in."""
    missing = [
        each
        for each in once
        if cluster.get(kind_of(each["kind"]), each["metadata"]["name"], each["metadata"]["namespace"]) is None
    ]
    if not missing:
        return list(documents)
    roots = [each for each in documents if "namespace" not in each["metadata"]]
    return [*roots, *missing, *(each for each in documents if "namespace" in each["metadata"])]


def _rehearse(cluster: Cluster, documents: Sequence[Document], *, force: bool) -> None:
    """Have the API server judge every object first, but for those in a namespace that is yet to be made."""
    ours = {each["metadata"]["name"] for each in documents if each["kind"] == NAMESPACE.name}
    to_come = {name for name in ours if cluster.get(NAMESPACE, name, None) is None}
    for document in documents:
        if document["metadata"].get("namespace") in to_come:
            continue
        try:
            cluster.apply(document, force=force, rehearse=True)
        except InstallError as error:
            raise InstallError(f"{error}. Nothing was changed") from error


def _steers(document: Document) -> bool:
    """Tell whether it changes the way of requests: a filter, or a rule by which addresses are dialled as picked."""
    if document["kind"] == DESTINATION_RULE.name:
        policy = document.get("spec", {}).get("trafficPolicy", {})
        return bool(policy.get("loadBalancer", {}).get("simple") == "PASSTHROUGH")
    return bool(document["kind"] == ENVOY_FILTER.name)


def _is_foreign_namespace(cluster: Cluster, document: Document) -> bool:
    if document["kind"] != NAMESPACE.name:
        return False
    existing = cluster.get(NAMESPACE, document["metadata"]["name"], None)
    return existing is not None and INSTALLATION not in (existing["metadata"].get("labels") or {})


def _wait_until_available(
    cluster: Cluster,
    documents: Sequence[Document],
    *,
    wait_seconds: float,
    say: Callable[[str], None],
    now: Callable[[], float],
    sleep: Callable[[float], None],
) -> None:
    """Return when picker and indexer run as they were just applied. Raise InstallError when they do not in time."""
    waiting = [
        (each["metadata"]["name"], each["metadata"]["namespace"])
        for each in documents
        if each["kind"] == DEPLOYMENT.name and each["metadata"]["name"] in {PICKER, INDEXER}
    ]
    deadline = now() + wait_seconds
    while waiting and wait_seconds > 0:
        waiting = [pair for pair in waiting if not _is_available(cluster.get(DEPLOYMENT, *pair))]
        if not waiting:
            break
        if now() >= deadline:
            names = ", ".join(f"{namespace}/{name}" for name, namespace in waiting)
            raise InstallError(
                f"not ready after {wait_seconds:g} s: {names}. No gateway was told to ask the picker; mend what keeps "
                "it from running (kubectl describe deployment) and run this again"
            )
        say(f"waiting for {', '.join(name for name, _ in waiting)}")
        sleep(POLL_SECONDS)


def _is_available(deployment: Document | None) -> bool:
    if deployment is None:
        return False
    status = deployment.get("status") or {}
    if status.get("observedGeneration", 0) < deployment["metadata"].get("generation", 0):
        return False
    updated = status.get("updatedReplicas", 0)
    return bool(updated) and updated == status.get("availableReplicas", 0) == status.get("replicas", 0)


def _ours(cluster: Cluster, kind: Kind, installation: str) -> Sequence[Document]:
    if kind.optional and not cluster.serves(kind):
        return []
    return cluster.labelled(kind, OWNED | {INSTALLATION: installation})


def _delete(cluster: Cluster, kind: Kind, document: Document, *, say: Callable[[str], None]) -> None:
    cluster.delete(kind, document["metadata"]["name"], document["metadata"].get("namespace"))
    say(f"removed {describe({**document, 'kind': kind.name})}")


def _key(document: Document) -> tuple[str, str, str]:
    meta = document["metadata"]
    return document["kind"], meta.get("namespace", ""), meta["name"]
