"""The objects of native InferencePools: Istio itself asks the picker that a pool names (endpointPickerRef). Pure.

A pool and its picker's Service are in one namespace, as the Gateway API inference extension has it. Istio says nothing
of the pool when it asks, so each pool has a Service of its own onto the same pickers, and the name that is dialled
tells them apart.
"""

from typing import Any

from extproc.install.objects import EXPORT_TO, Document, component_labels, component_object, fitting_name, kube_object
from extproc.install.plan import (
    CLUSTER_DOMAIN,
    EXTERNAL_METRICS_PORT,
    GRPC_PORT,
    PICKER,
    PICKER_ADMIN_PORT,
    InstallPlan,
    PoolTarget,
)


def picker_service_name(pool: PoolTarget) -> str:
    """Return what a pool's endpointPickerRef has to name."""
    return fitting_name(f"{PICKER}-", pool.name)


def picker_hosts(plan: InstallPlan) -> list[str]:
    """Return the names in DNS under which pools ask."""
    return [f"{picker_service_name(pool)}.{plan.namespace}.svc.{CLUSTER_DOMAIN}" for pool in plan.pools]


def picker_services(plan: InstallPlan) -> list[Document]:
    """Return a Service for each pool."""
    spec = {
        "selector": component_labels(PICKER),
        "ports": [{"name": "grpc-ext-proc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"}],
    }
    known_to_all = {EXPORT_TO: "*"}  # gateways are in other namespaces, and the mesh's default may hide it from them
    return [
        kube_object("Service", picker_service_name(pool), plan.namespace, annotations=known_to_all, spec=spec)
        for pool in plan.pools
    ]


def plain_inbound(plan: InstallPlan) -> Document:
    """Return what lets the picker's own sidecar take Istio's requests: as bytes, with mTLS.

    Istio asks with an `:authority` that has the character |, which Envoy refuses where it looks at HTTP. Named ingress
    ports replace all others, so that of the admin pages is named, too.
    """
    ports = [(GRPC_PORT, "TCP", "tcp-ext-proc"), (PICKER_ADMIN_PORT, "HTTP", "http-admin")]
    if plan.external_metrics:
        ports.append((EXTERNAL_METRICS_PORT, "TCP", "tcp-external-metrics"))
    ingress: list[dict[str, Any]] = [
        {"port": {"number": number, "protocol": protocol, "name": name}, "defaultEndpoint": f"127.0.0.1:{number}"}
        for number, protocol, name in ports
    ]
    spec = {"workloadSelector": {"labels": component_labels(PICKER)}, "ingress": ingress}
    return component_object("Sidecar", PICKER, plan.namespace, spec=spec)
