"""The kinds of documents that we read, and the parts of each that are kept. Pure.

Most documents of a cluster are pods: only a tenth of each is kept, and changes of the other parts cannot wake us.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.documents.documents import Document
from kvmesh.documents.pools import POOL_LABEL

_METADATA = (
    *("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "generation"),
    *("labels", "annotations"),
)
_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"  # the whole document once more
OWN_GROUP = "kvmesh.io"
INFERENCE_GROUP = "inference.networking.k8s.io"
_EXTENSION, _LLM_D, _GATEWAY = "inference.networking.x-k8s.io", "llm-d.ai", "gateway.networking.k8s.io"
_ALPHA, _ALPHA2 = "v1alpha1", "v1alpha2"
# policies of other systems, which have no name: `extproc.translation` reads them
_FOREIGN_KIND = "EndpointPickerConfig"
_FOREIGN_KEYS = frozenset({"split_policy", "qos", "roles", "disaggregated_router"})
# Nothing may start without these: unread documents would look like departed pods, or lifted policies.
ESSENTIAL = frozenset({"Pod", "Service", "InferencePool", "InferencePolicy"})


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentKind:
    """One kind, as the API names it."""

    group: str  # "" for core
    version: str
    kind: str
    plural: str
    labels: Mapping[str, str] | None = None  # only documents with these labels are read
    keep: Callable[[Document], dict[str, Any]]  # the document without metadata -> the part to keep

    @property
    def api_version(self) -> str:
        """Return `group/version`, as in documents."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def resource(self) -> str:
        """Return `plural.group`, as kubectl and RBAC name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


def trimmed(document: Document, kind: DocumentKind) -> Document:
    """Return the part of a document to keep; equal for two versions that differ only in other parts."""
    metadata = document.get("metadata")
    kept = {name: metadata[name] for name in _METADATA if name in metadata} if isinstance(metadata, Mapping) else {}
    annotations = kept.get("annotations")
    if isinstance(annotations, Mapping) and _APPLIED in annotations:
        kept["annotations"] = {name: text for name, text in annotations.items() if name != _APPLIED}
    return {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": kept, **kind.keep(document)}


def _spec(document: Document) -> dict[str, Any]:
    return {"spec": document.get("spec")}


def _spec_and_status(document: Document) -> dict[str, Any]:
    return {"spec": document.get("spec"), "status": document.get("status")}


def _route(document: Document) -> dict[str, Any]:
    """Keep the gateway's status for each parent: references into other namespaces count only if it resolved them."""
    status = document.get("status")
    parents = status.get("parents") if isinstance(status, Mapping) else None
    return {"spec": document.get("spec"), "status": {"parents": parents or []}}


def _pod(document: Document) -> dict[str, Any]:
    spec, status = document.get("spec"), document.get("status")
    kept = {}
    if isinstance(spec, Mapping):
        kept["spec"] = {
            name: [_container(each) for each in spec[name]] if isinstance(spec[name], list) else spec[name]
            for name in ("containers", "initContainers")
            if name in spec
        }
    if isinstance(status, Mapping):
        kept["status"] = {name: status[name] for name in ("phase", "podIP") if name in status}
        if "conditions" in status:
            kept["status"]["conditions"] = _readiness(status["conditions"])
    return kept


def _container(container: Any) -> Any:
    if not isinstance(container, Mapping):
        return container
    return {name: container[name] for name in ("name", "ports", "restartPolicy") if name in container}


def _readiness(conditions: Any) -> Any:
    """Keep the condition Ready, and whether there were any conditions; the times of probes are not read."""
    if not isinstance(conditions, list) or not conditions:
        return conditions
    ready = [each for each in conditions if not isinstance(each, Mapping) or each.get("type") == "Ready"]
    if not ready:
        return [{"type": "Ready", "status": "Unknown"}]  # the kubelet has not judged it yet
    return [
        {"type": each.get("type"), "status": each.get("status")} if isinstance(each, Mapping) else each
        for each in ready
    ]


POOL_KINDS: tuple[DocumentKind, ...] = (
    DocumentKind(group="", version="v1", kind="Pod", plural="pods", keep=_pod),
    DocumentKind(group="", version="v1", kind="Service", plural="services", labels={POOL_LABEL: "true"}, keep=_spec),
    DocumentKind(group=INFERENCE_GROUP, version="v1", kind="InferencePool", plural="inferencepools", keep=_spec),
)
MESH_KINDS: tuple[DocumentKind, ...] = (
    *POOL_KINDS,
    DocumentKind(
        group=_EXTENSION, version=_ALPHA, kind="InferencePoolImport", plural="inferencepoolimports", keep=_spec
    ),
    DocumentKind(
        group=OWN_GROUP, version=_ALPHA, kind="InferencePolicy", plural="inferencepolicies", keep=_spec_and_status
    ),
    *(
        DocumentKind(group=group, version=_ALPHA2, kind=kind, plural=f"{kind.lower()}s", keep=_spec)
        for kind in ("InferenceObjective", "InferenceModelRewrite")
        for group in (_LLM_D, _EXTENSION)
    ),
    DocumentKind(group=_GATEWAY, version="v1", kind="HTTPRoute", plural="httproutes", keep=_route),
    DocumentKind(group=_GATEWAY, version="v1", kind="Gateway", plural="gateways", keep=_spec),
)
# in published files, not served by an API server
_FILED = DocumentKind(group=_LLM_D, version="v1", kind="InferenceObjective", plural="inferenceobjectives", keep=_spec)


def is_foreign_policy(value: Any) -> bool:
    """Whether a value is a policy of another system."""
    if not isinstance(value, Mapping) or "kind" in value:
        return isinstance(value, Mapping) and value["kind"] == _FOREIGN_KIND
    return not _FOREIGN_KEYS.isdisjoint(value)


def kind_of(document: Document) -> DocumentKind | None:
    """Return the kind of a document; None if we do not read it, as with other versions of our kinds."""
    wanted = (document.get("apiVersion"), document.get("kind"))
    return next((each for each in (*MESH_KINDS, _FILED) if (each.api_version, each.kind) == wanted), None)
