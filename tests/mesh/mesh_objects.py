"""The objects of a mesh around an installation: Services with their endpoints, gateways, routes.

Addresses are loopback's, another for each pod. Pods may have a port each, so each has an EndpointSlice of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from operate.local.envoy_config import SocketAddress

Object = dict[str, Any]
CREATED = "2026-01-01T00:00:00Z"
GATEWAY_CLASS: Object = {
    "apiVersion": "gateway.networking.k8s.io/v1",
    "kind": "GatewayClass",
    "metadata": {"name": "istio"},
    "spec": {"controllerName": "istio.io/gateway-controller"},
}


def kubernetes_object(api_version: str, kind: str, namespace: str, name: str, **content: Any) -> Object:
    """Return an object; `labels` and `annotations` go into its metadata, all else beside it."""
    metadata = {"namespace": namespace, "name": name, "creationTimestamp": CREATED}
    metadata |= {key: content.pop(key) for key in ("labels", "annotations") if key in content}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **content}


def namespace(name: str, **labels: str) -> Object:
    """Return a namespace."""
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def service(namespace: str, name: str, *, port: int, port_name: str = "http", number: int, target: int = 0) -> Object:
    """Return a Service whose cluster address ends in `number`."""
    ports = [{"name": port_name, "port": port, "targetPort": target or port, "protocol": "TCP"}]
    spec = {"clusterIP": f"10.96.0.{number}", "ports": ports, "selector": {"app": name}}
    return kubernetes_object("v1", "Service", namespace, name, spec=spec)


def slices(namespace: str, of: str, addresses: Sequence[str], *, port_name: str = "http") -> list[Object]:
    """Return an EndpointSlice for each ip:port of a Service."""
    return [
        kubernetes_object(
            "discovery.k8s.io/v1",
            "EndpointSlice",
            namespace,
            f"{of}-{number}",
            labels={"kubernetes.io/service-name": of},
            addressType="IPv4",
            ports=[{"name": port_name, "port": at.port, "protocol": "TCP"}],
            endpoints=[{"addresses": [at.host], "conditions": {"ready": True, "serving": True, "terminating": False}}],
        )
        for number, at in enumerate(map(SocketAddress.parse, addresses))
    ]


def gateway(namespace: str, name: str, listeners: Mapping[int, int], *, tls_secret: str = "", ip: str) -> list[Object]:
    """Return a Gateway, and its Service and endpoints as Istio makes them; `listeners` are port: the proxy's own.

    With `tls_secret` the listener of port 443 ends TLS with it.
    """
    from_all = {"namespaces": {"from": "All"}}
    ends_tls = {"protocol": "HTTPS", "tls": {"mode": "Terminate", "certificateRefs": [{"name": tls_secret}]}}
    made = kubernetes_object(
        "gateway.networking.k8s.io/v1",
        "Gateway",
        namespace,
        name,
        spec={
            "gatewayClassName": "istio",
            "listeners": [
                {"name": f"port-{port}", "port": port, "protocol": "HTTP", "allowedRoutes": from_all}
                | (ends_tls if port == 443 else {})
                for port in listeners
            ],
        },
    )
    own = f"{name}-istio"
    ports = [
        {"name": f"port-{port}", "port": port, "targetPort": target, "protocol": "TCP"}
        for port, target in listeners.items()
    ]
    spec = {"clusterIP": "10.96.0.250", "ports": ports, "selector": gateway_labels(name)}
    endpoint = kubernetes_object(
        "discovery.k8s.io/v1",
        "EndpointSlice",
        namespace,
        own,
        labels={"kubernetes.io/service-name": own},
        addressType="IPv4",
        ports=[{"name": each["name"], "port": each["targetPort"], "protocol": "TCP"} for each in ports],
        endpoints=[{"addresses": [ip], "conditions": {"ready": True, "serving": True, "terminating": False}}],
    )
    return [GATEWAY_CLASS, made, kubernetes_object("v1", "Service", namespace, own, spec=spec), endpoint]


def gateway_by_hand(namespace: str, name: str) -> list[Object]:
    """Return a Gateway of port 80 for which istiod deploys nothing, its Service and the pod of its proxy."""
    made, service, _ = gateway(namespace, name, {80: 80}, ip="")[1:]
    host = f"{service['metadata']['name']}.{namespace}.svc.cluster.local"
    made["spec"]["addresses"] = [{"type": "Hostname", "value": host}]
    del service["spec"]["clusterIP"]  # the API server gives it one
    container = {"name": "istio-proxy", "image": "docker.io/istio/proxyv2:1.31.0", "ports": [{"containerPort": 80}]}
    spec = {"containers": [container]}
    pod = kubernetes_object("v1", "Pod", namespace, f"{name}-1", labels=gateway_labels(name), spec=spec)
    return [made, service, pod]


def gateway_labels(name: str) -> dict[str, str]:
    """Return the labels of a gateway's pods."""
    return {"gateway.networking.k8s.io/gateway-name": name}


def http_route(
    namespace: str,
    name: str,
    *,
    gateway: tuple[str, str],
    port: int | None = None,
    hosts: Sequence[str],
    rules: Sequence[Mapping[str, Any]],
) -> Object:
    """Return an HTTPRoute of a gateway (namespace, name), or of its listener of that port."""
    parent = {"namespace": gateway[0], "name": gateway[1]} | ({} if port is None else {"port": port})
    spec = {"parentRefs": [parent], "hostnames": list(hosts), "rules": list(rules)}
    return kubernetes_object("gateway.networking.k8s.io/v1", "HTTPRoute", namespace, name, spec=spec)


def rule(prefix: str, to: str, port: int, **more: Any) -> Object:
    """Return a rule of an HTTPRoute: all below a path goes to a Service of the route's namespace."""
    match = {"path": {"type": "PathPrefix", "value": prefix}}
    return {"matches": [match], "backendRefs": [{"name": to, "port": port}], **more}
