"""The cluster's Istio, gateways, routes and pools, read before an installation.

A part that may not be read is None, with the reason in `unread`: the user may have rights in one namespace only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from operate.install.cluster import Cluster, InstallError
from operate.install.objects import DESTINATION_RULE, NAMESPACE, POD, Document, Kind, kind_of
from operate.install.plan import InstallPlan

_GATEWAY_API, _ISTIO = "gateway.networking.k8s.io", "networking.istio.io"
GATEWAY = Kind(name="Gateway", group=_GATEWAY_API, version="v1", plural="gateways", optional=True)
HTTP_ROUTE = Kind(name="HTTPRoute", group=_GATEWAY_API, version="v1", plural="httproutes", optional=True)
VIRTUAL_SERVICE = Kind(name="VirtualService", group=_ISTIO, version="v1", plural="virtualservices", optional=True)
SIDECAR = kind_of("Sidecar")
ISTIOD_LABELS = {"app": "istiod"}
MESH_CONFIG = "istio"  # the ConfigMap, key mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshFacts:
    """The facts; None for parts that could not be read."""

    has_istio: bool = True
    istiods: Sequence[Document] | None = ()  # pods
    gateways: Sequence[Document] | None = ()  # of the Gateway API
    http_routes: Sequence[Document] | None = ()
    virtual_services: Sequence[Document] | None = ()
    rules: Sequence[Document] | None = ()  # DestinationRules
    sidecars: Sequence[Document] | None = ()
    mesh_config: Mapping[str, Any] | None = field(default_factory=dict)
    namespace: Document | None = None  # kvmesh's own, if it exists
    services: Mapping[str, Document | None] = field(default_factory=dict)  # of the pools, by identity
    callers: Mapping[str, Sequence[Document]] = field(default_factory=dict)  # pods that will ask the picker, by target
    pods: Mapping[str, Sequence[Document]] = field(default_factory=dict)  # of the pools, by identity
    unread: Sequence[str] = ()  # reasons for missing parts


def read_mesh(cluster: Cluster, plan: InstallPlan) -> MeshFacts:
    """Read everything that `preflight.judge` needs."""
    unread: list[str] = []

    def listed(
        kind: Kind, labels: Mapping[str, str] | None = None, namespace: str | None = None
    ) -> Sequence[Document] | None:
        try:
            if kind.optional and not cluster.serves(kind):
                return ()
            return cluster.labelled(kind, labels or {}, namespace)
        except InstallError as error:
            unread.append(str(error))
            return None

    def one(kind: Kind, name: str, namespace: str | None) -> Document | None:
        try:
            return cluster.get(kind, name, namespace)
        except InstallError as error:
            unread.append(str(error))
            return None

    services = {pool.identity: one(kind_of("Service"), pool.name, pool.namespace) for pool in plan.pools}
    pods = {}
    for pool in plan.pools:
        service = services[pool.identity]
        selector = pool.selector or ((service or {}).get("spec") or {}).get("selector")
        pods[pool.identity] = (listed(POD, selector, pool.namespace) if selector else None) or ()
    callers = {
        describe_caller(target): found
        for target in plan.callers
        if (found := listed(POD, target.selector, target.namespace)) is not None
    }
    config = one(kind_of("ConfigMap"), MESH_CONFIG, "istio-system")
    return MeshFacts(
        has_istio=_serves(cluster, DESTINATION_RULE),
        istiods=listed(POD, ISTIOD_LABELS),
        gateways=listed(GATEWAY),
        http_routes=listed(HTTP_ROUTE),
        virtual_services=listed(VIRTUAL_SERVICE),
        rules=listed(DESTINATION_RULE),
        sidecars=listed(SIDECAR),
        mesh_config=_mesh_config(config),
        namespace=one(NAMESPACE, plan.namespace, None),
        services=services,
        callers=callers,
        pods=pods,
        unread=tuple(dict.fromkeys(unread)),
    )


def _serves(cluster: Cluster, kind: Kind) -> bool:
    try:
        return cluster.serves(kind)
    except InstallError:
        return True  # assume it exists but may not be read


def describe_caller(target: Any) -> str:
    """Return the name of a gateway or a group of clients."""
    labels = ",".join(f"{name}={value}" for name, value in sorted(target.selector.items()))
    return f"{target.namespace}/{getattr(target, 'name', labels)}"


def _mesh_config(document: Document | None) -> Mapping[str, Any] | None:
    if document is None:
        return None
    try:
        loaded = yaml.safe_load((document.get("data") or {}).get("mesh") or "{}")
    except yaml.YAMLError:
        return None
    return loaded if isinstance(loaded, dict) else None
