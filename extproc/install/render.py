"""An install plan -> the objects that Kubernetes is to hold, in the order in which to apply them. Pure."""

from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from extproc.errors import ConfigError
from extproc.install.check_plan import check_plan
from extproc.install.envoy_filters import envoy_filters
from extproc.install.indexer_objects import indexer_objects
from extproc.install.labels import INSTALLATION, NAME, OWNED
from extproc.install.mesh_objects import mesh_objects
from extproc.install.monitoring_objects import monitoring_objects
from extproc.install.network_objects import network_objects
from extproc.install.picker_objects import picker_objects
from extproc.install.plan import InstallPlan, MeshMembership
from extproc.install.rbac_objects import rbac_objects
from extproc.install.redis_objects import redis_objects

Document = dict[str, Any]


def render(plan: InstallPlan, *, crds: Sequence[Document] = ()) -> list[Document]:
    """Return every object of the installation, `crds` among them; raise ConfigError for a contradictory plan.

    Filters come last: a gateway is told to ask the picker when everything else is there.
    """
    check_plan(plan)
    documents = [
        *([_namespace(plan)] if plan.create_namespace else []),
        *rbac_objects(plan),
        *redis_objects(plan),
        *indexer_objects(plan),
        *picker_objects(plan),
        *network_objects(plan),
        *mesh_objects(plan),
        *monitoring_objects(plan),
        *envoy_filters(plan),
    ]
    _check_unique(documents)
    return [*(_labelled(crd, OWNED) for crd in crds), *(_labelled(each, OWNED | _mark(plan)) for each in documents)]


def _check_unique(documents: Iterable[Document]) -> None:
    """Raise ConfigError for two objects of one name: `kvmesh-a-pods` is a pool's a-pods, and the pods of pool a."""
    seen: set[tuple[str, str, str]] = set()
    for document in documents:
        meta = document["metadata"]
        key = (document["kind"], meta.get("namespace", ""), meta["name"])
        if key in seen:
            raise ConfigError(f"--pool: two of them need a {key[0]} {key[1]}/{key[2]}; rename the Service of one")
        seen.add(key)


def to_yaml(documents: Iterable[Document]) -> str:
    """Write documents as one YAML stream, keys in the order in which they were made."""
    return yaml.dump_all(documents, Dumper=_Plain, sort_keys=False, explicit_start=True, width=120)


class _Plain(yaml.SafeDumper):
    """Writes what stands in several places out in each: no anchors, which people trip over."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class's signature
        """Say yes."""
        return True


def _namespace(plan: InstallPlan) -> Document:
    labels = {NAME: plan.namespace, **OWNED, "pod-security.kubernetes.io/enforce": _pod_standard(plan)}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": plan.namespace, "labels": labels}}


def _pod_standard(plan: InstallPlan) -> str:
    """Return the pod standard: without the CNI plugin, sidecars bring an init container that may set routes."""
    return "privileged" if plan.membership is MeshMembership.SIDECAR else "restricted"


def _mark(plan: InstallPlan) -> dict[str, str]:
    """Return what tells this installation from others; CRDs are all of theirs."""
    return {INSTALLATION: plan.namespace}


def _labelled(document: Document, labels: dict[str, str]) -> Document:
    meta = document["metadata"]
    return {**document, "metadata": {**meta, "labels": {**meta.get("labels", {}), **labels}}}
