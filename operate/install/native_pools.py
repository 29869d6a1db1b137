"""The objects for native InferencePools, where Istio itself asks the pool's picker (endpointPickerRef). Pure.

The Gateway API inference extension requires pool and picker Service in the same namespace. Istio does not tell the
picker which pool a request is for, so each pool has its own Service for the same pickers, and the picker tells them
apart by the dialled host name.
"""

from typing import Any

from operate.install.objects import EXPORT_TO, Document, component_labels, component_object, fitting_name, kube_object
from operate.install.plan import CLUSTER_DOMAIN, GRPC_PORT, PICKER, PICKER_ADMIN_PORT, InstallPlan, PoolTarget


def picker_service_name(pool: PoolTarget) -> str:
    """Return the name for the pool's endpointPickerRef."""
    return fitting_name(f"{PICKER}-", pool.name)


def picker_hosts(plan: InstallPlan) -> list[str]:
    """Return the DNS names under which pools ask the picker."""
    return [f"{picker_service_name(pool)}.{plan.namespace}.svc.{CLUSTER_DOMAIN}" for pool in plan.pools]


def picker_services(plan: InstallPlan) -> list[Document]:
    """Return the picker's Service for each pool."""
    spec = {
        "selector": component_labels(PICKER),
        "ports": [{"name": "grpc-ext-proc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"}],
    }
    known_to_all = {EXPORT_TO: "*"}  # gateways are in other namespaces; the mesh's default may hide it
    return [
        kube_object("Service", picker_service_name(pool), plan.namespace, annotations=known_to_all, spec=spec)
        for pool in plan.pools
    ]


def plain_inbound(plan: InstallPlan) -> Document:
    """Return the Sidecar with which the picker's proxy accepts Istio's requests as plain TCP over mTLS.

    Istio's `:authority` contains the character |, which Envoy rejects if it parses HTTP. Listed ingress ports replace
    all others, so the admin port is listed, too.
    """
    ports = [(GRPC_PORT, "TCP", "tcp-ext-proc"), (PICKER_ADMIN_PORT, "HTTP", "http-admin")]
    ingress: list[dict[str, Any]] = [
        {"port": {"number": number, "protocol": protocol, "name": name}, "defaultEndpoint": f"127.0.0.1:{number}"}
        for number, protocol, name in ports
    ]
    spec = {"workloadSelector": {"labels": component_labels(PICKER)}, "ingress": ingress}
    return component_object("Sidecar", PICKER, plan.namespace, spec=spec)
