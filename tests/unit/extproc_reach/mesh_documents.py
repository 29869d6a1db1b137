"""Documents as the Kubernetes API has them, and a cluster of them that keeps the promises of a `Snapshot`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from extproc.reach.mesh_policy import MeshPolicy, MeshState
from extproc.reach.status import PolicyStatus
from kvmesh.documents.documents import Document, DocumentKey, Snapshot, document_key

START = datetime(2026, 3, 1, tzinfo=UTC)
GATEWAY_API, POOL_API = "gateway.networking.k8s.io/v1", "inference.networking.k8s.io/v1"


@dataclass(slots=True)
class Mesh:
    """A cluster and the picker's view of it; every `update` is a second later."""

    policy: MeshPolicy = field(default_factory=MeshPolicy)
    documents: dict[DocumentKey, Document] = field(default_factory=dict)
    now: datetime = START
    _before: Mapping[str, tuple[Document, ...]] = field(default_factory=dict)

    def put(self, *documents: Document) -> None:
        for document in documents:
            self.documents[document_key(document)] = document

    def remove(self, *documents: Document) -> None:
        for document in documents:
            del self.documents[document_key(document)]

    def update(self, *documents: Document) -> MeshState:
        self.put(*documents)
        self.now += timedelta(seconds=1)
        return self.policy.update(self.snapshot(), now=self.now)

    def snapshot(self) -> Snapshot:
        by_kind: dict[str, tuple[Document, ...]] = {}
        for key in sorted(self.documents):
            by_kind[key.kind] = (*by_kind.get(key.kind, ()), self.documents[key])
        for kind, documents in by_kind.items():
            before = self._before.get(kind, ())
            if len(before) == len(documents) and all(was is now for was, now in zip(before, documents, strict=True)):
                by_kind[kind] = before
        self._before = by_kind
        return Snapshot(documents=by_kind, synced=True)

    def write(self, status: PolicyStatus) -> None:
        """Write a status as the elected leader does."""
        key = DocumentKey("kvmesh.io", "InferencePolicy", status.namespace, status.name)
        self.documents[key] = {**self.documents[key], "status": {"ancestors": [status.entry()]}}


def told(state: MeshState, source: str) -> dict[str, tuple[str, str]]:
    """Return a policy's conditions as type -> (reason, message), with the status before a reason."""
    return {
        each.type: (each.reason if each.type == "Warning" else f"{each.status} {each.reason}", each.message)
        for each in state.statuses[source].conditions
    }


ACCEPTED = ("True Accepted", "the policy is valid, and what it names is there")
IN_FORCE = {"Accepted": ACCEPTED, "Programmed": ("True Programmed", "the policy is in force")}
NOT_ACCEPTED = "the policy is not in force as it is written: see Accepted"


def inference_policy(
    name: str, spec: Mapping[str, Any], *, day: int = 1, generation: int = 1, uid: str = "", **targets: str
) -> dict[str, Any]:
    """`name` is "namespace/name"; targets: InferencePool="own-name" …"""
    refs = [{"group": _GROUPS[kind], "kind": kind, "name": target} for kind, target in targets.items()]
    metadata = _metadata(name, day) | {"generation": generation, "uid": uid or f"uid-of-{name}"}
    document = {"apiVersion": "kvmesh.io/v1alpha1", "kind": "InferencePolicy", "metadata": metadata}
    return document | {"spec": {**({"targetRefs": refs} if refs else {}), **spec}}


_GROUPS = {"InferencePool": "inference.networking.k8s.io", "Service": "", "Gateway": "gateway.networking.k8s.io"}
_GROUPS["HTTPRoute"] = _GROUPS["Gateway"]


def inference_pool(name: str, *, day: int = 1, hosts: str = "", picker: object = None) -> Document:
    metadata = _metadata(name, day) | ({"annotations": {"kvmesh.io/hosts": hosts}} if hosts else {})
    spec: dict[str, Any] = {"selector": {"matchLabels": {"app": name.split("/")[1]}}, "targetPorts": [{"number": 8000}]}
    if picker is not None:
        spec["endpointPickerRef"] = picker
    return {"apiVersion": POOL_API, "kind": "InferencePool", "metadata": metadata, "spec": spec}


def service(name: str, *, is_pool: bool = True) -> Document:
    metadata = _metadata(name, 1) | {"labels": {"kvmesh.io/pool": "true"} if is_pool else {}}
    spec = {"selector": {"app": name.split("/")[1]}, "ports": [{"name": "http", "port": 80, "targetPort": 8000}]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def pod(name: str, *, app: str, ip: str, ready: bool = True) -> Document:
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(name, 1) | {"labels": {"app": app}},
        "spec": {"containers": [{"name": "vllm", "ports": [{"containerPort": 8000}]}]},
        "status": {"phase": "Running", "podIP": ip, "conditions": conditions},
    }


def gateway(name: str) -> Document:
    return {"apiVersion": GATEWAY_API, "kind": "Gateway", "metadata": _metadata(name, 1), "spec": {}}


def route(name: str, *, to: str, via: str = "", kind: str = "InferencePool", resolved: bool | None = None) -> Document:
    """`to` and `via` (a gateway) are "namespace/name"; `resolved`: what the gateway's controller says of references."""
    namespace, _, own = to.partition("/")
    spec: dict[str, Any] = {"rules": [{"backendRefs": [_ref(kind, namespace, own)]}]}
    if via:
        spec["parentRefs"] = [_ref("Gateway", *via.split("/"))]
    document = {"apiVersion": GATEWAY_API, "kind": "HTTPRoute", "metadata": _metadata(name, 1), "spec": spec}
    if resolved is None:
        return document
    condition = {"type": "ResolvedRefs", "status": str(resolved), "observedGeneration": 1}
    return document | {"status": {"parents": [{"conditions": [condition]}]}}


def objective(name: str, *, pool: str, priority: int, group: str = "llm-d.ai", day: int = 1) -> dict[str, Any]:
    return {
        "apiVersion": f"{group}/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": _metadata(name, day) | {"uid": f"{group}/{name}"},
        "spec": {"priority": priority, "poolRef": {"name": pool}},
    }


def model_rewrite(name: str, *, pool: str, rules: list[Any]) -> Document:
    return {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": _metadata(name, 1),
        "spec": {"poolRef": {"name": pool}, "rules": rules},
    }


def _ref(kind: str, namespace: str, name: str) -> dict[str, str]:
    return {"group": _GROUPS[kind], "kind": kind, "namespace": namespace, "name": name}


def _metadata(name: str, day: int) -> dict[str, Any]:
    namespace, _, own = name.partition("/")
    return {
        "namespace": namespace,
        "name": own,
        "creationTimestamp": f"2026-01-{day:02}T00:00:00Z",
        "generation": 1,
        "uid": f"uid-of-{name}",
    }
