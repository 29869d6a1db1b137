"""Access to our pods and settings for connections: NetworkPolicies and Istio objects. Pure.

NetworkPolicies are a second line of defence besides mTLS: they also hold for pods outside the mesh.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from operate.install.native_pools import picker_hosts, plain_inbound
from operate.install.objects import (
    EXPORT_TO,
    Document,
    component_labels,
    component_object,
    fitting_name,
    kube_object,
    pods_of,
)
from operate.install.plan import (
    CLUSTER_DOMAIN,
    GRPC_PORT,
    INDEXER,
    INDEXER_ADMIN_PORT,
    PICKER,
    PICKER_ADMIN_PORT,
    PICKER_IDLE_TIMEOUT,
    REDIS,
    REDIS_PORT,
    InstallPlan,
    MeshMembership,
    Mode,
    PoolTarget,
    RedisKind,
)

NAMESPACE_NAME = "kubernetes.io/metadata.name"
HBONE = 15008  # port of ambient's tunnels, whatever the destination port
MERGED_METRICS = 15020
ISTIOD = 15012  # istiod's port for configuration and certificates
AUTHORITY_PORTS = (443, 6443)  # certificate authorities: of managed control planes, and istio-csr
API_SERVER_PORTS = (443, 6443, 8443, 16443)  # of managed clusters, kubeadm, minikube and MicroK8s; a hub has 443
# To any address: a node-local DNS cache is no pod. 5353: OpenShift's DNS pods; a policy sees a Service's target port.
TO_DNS = {"ports": [{"protocol": each, "port": port} for port in (53, 5353) for each in ("UDP", "TCP")]}
ONE_SERVER = ("redis://", "rediss://")
DEFAULT_PORTS = {"redis": REDIS_PORT, "rediss": REDIS_PORT, "http": 80, "https": 443}
# source addresses that ambient gives to the kubelet's probes to bypass its proxy; to policies they are not the node
AMBIENT_PROBES = ("169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
# vLLM's default event ports (kv_events_config: endpoint, replay_endpoint)
EVENTS_PORT = 5557
REPLAY_PORT = 5558


def network_objects(plan: InstallPlan) -> list[Document]:
    """Return the components' NetworkPolicies."""
    picks = _from(plan, [_peer(each.namespace, each.selector) for each in plan.callers], GRPC_PORT)
    to_picker = [picks, *_to_admin(plan, PICKER_ADMIN_PORT)]
    policies = [
        _network_policy(plan, PICKER, to_picker, egress=_to_pods_and_servers(plan, plan.redis_url, plan.hub_endpoint)),
        _network_policy(
            plan, INDEXER, _to_admin(plan, INDEXER_ADMIN_PORT), egress=_to_pods_and_servers(plan, plan.redis_url)
        ),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = [_peer(plan.namespace, component_labels(name)) for name in (PICKER, INDEXER)]
        control_plane = [_to_ports(ISTIOD, *AUTHORITY_PORTS)] if plan.membership is MeshMembership.SIDECAR else []
        from_users = [_from(plan, users, REDIS_PORT)]
        policies.append(_network_policy(plan, REDIS, from_users, egress=[TO_DNS, *control_plane]))
    return policies


def _to_ports(*ports: int) -> dict[str, Any]:
    return {"ports": [{"protocol": "TCP", "port": port} for port in dict.fromkeys(ports)]}


def _to_pods_and_servers(plan: InstallPlan, *servers: str | None) -> list[dict[str, Any]]:
    """Allow pods at any port, and by port alone what may be at any address: API server, istiod, `servers` (URLs).

    In the scope of the mesh policies may name pools of any namespace later. Policies of the user's own allow more.
    """
    if plan.redis_url and not plan.redis_url.startswith(ONE_SERVER):
        return [{}]  # Sentinels and nodes announce other addresses and ports
    pods = [_peer(each) for each in plan.watched_namespaces] or [{"namespaceSelector": {}}]
    istiod = [ISTIOD] if plan.membership is MeshMembership.SIDECAR else []
    ports = [*API_SERVER_PORTS, *istiod, *(_port_of(url) for url in servers if url)]
    return [{"to": pods}, TO_DNS, _to_ports(*ports)]


def _port_of(url: str) -> int:
    parts = urlsplit(url)
    return parts.port or DEFAULT_PORTS[parts.scheme]


def _peer(namespace: str, selector: Mapping[str, str] | None = None) -> dict[str, Any]:
    peer: dict[str, Any] = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: namespace}}}
    if selector:
        peer["podSelector"] = {"matchLabels": dict(selector)}
    return peer


def _from(plan: InstallPlan, peers: list[dict[str, Any]], port: int) -> dict[str, Any]:
    ports = [port, HBONE] if plan.membership is MeshMembership.AMBIENT else [port]
    # an empty list would admit everyone: select pods of our namespace that do not exist
    none = [{"podSelector": {"matchLabels": {"kvmesh.io/no-such-pod": "true"}}}]
    return {"from": peers or none, "ports": [{"protocol": "TCP", "port": each} for each in ports]}


def _to_admin(plan: InstallPlan, port: int) -> list[dict[str, Any]]:
    """Admit our namespace, Prometheus, and ambient's kubelet probes, which do not come from the node's address."""
    rules = [_from(plan, [_peer(plan.namespace)], port)]
    if plan.monitoring:
        metrics = _from(plan, [_peer(plan.monitoring_namespace)], port)
        if plan.membership is MeshMembership.SIDECAR:
            metrics["ports"].append({"protocol": "TCP", "port": MERGED_METRICS})
        rules.append(metrics)
    if plan.membership is MeshMembership.AMBIENT:
        probes = [{"ipBlock": {"cidr": cidr}} for cidr in AMBIENT_PROBES]
        rules.append({"from": probes, "ports": [{"protocol": "TCP", "port": port}]})
    return rules


def _network_policy(
    plan: InstallPlan, component: str, ingress: list[dict[str, Any]], *, egress: list[dict[str, Any]]
) -> Document:
    types = ["Ingress", "Egress"]
    spec = {"podSelector": pods_of(component), "policyTypes": types, "ingress": ingress, "egress": egress}
    return component_object("NetworkPolicy", component, plan.namespace, spec=spec)


def mesh_objects(plan: InstallPlan) -> list[Document]:
    """Return DestinationRules and, if kvmesh is in the mesh, strict mTLS and authorization policies."""
    rules = [_picker_rule(plan, PICKER, plan.picker_host), *_pool_rules(plan)]
    twins = [each for pool in plan.pools for each in _pods_by_address(plan, pool)]
    if plan.membership is MeshMembership.NONE:
        return [*rules, *twins]
    is_asked_by_istio = plan.mode is Mode.INFERENCE_POOL and plan.membership is MeshMembership.SIDECAR
    inbound = [plain_inbound(plan)] if is_asked_by_istio else []
    return [*rules, *twins, *_strict_mtls(plan), *_authorization_policies(plan), *inbound]


def _pool_rules(plan: InstallPlan) -> list[Document]:
    if plan.mode is Mode.INFERENCE_POOL:
        return [_picker_rule(plan, host.partition(".")[0], host) for host in picker_hosts(plan)]
    return [_pool_rule(plan, pool) for pool in plan.pools if not pool.has_rule]


def _picker_rule(plan: InstallPlan, name: str, host: str) -> Document:
    """Return the DestinationRule for the picker. No `tls`, so that Istio uses mTLS if both sides support it."""
    policy = {
        # with outlier detection Istio prefers pickers in the gateway's zone: one might get all requests, and the
        # autoscaler, which uses the mean of all pickers, would not react
        "loadBalancer": {"simple": "LEAST_REQUEST", "localityLbSetting": {"enabled": False}},
        "connectionPool": {
            # no byte flows while requests are queued: only keepalives notice a lost machine
            "tcp": {"connectTimeout": "1s", "tcpKeepalive": {"time": "30s", "interval": "10s", "probes": 2}},
            "http": {"http2MaxRequests": 1000000, "maxRequestsPerConnection": 0, "idleTimeout": PICKER_IDLE_TIMEOUT},
        },
        # ejects unreachable pickers; a picker's own 5xx answers are about requests and do not count
        "outlierDetection": {
            "consecutive5xxErrors": 0,
            "consecutiveGatewayErrors": 5,
            "interval": "2s",
            "baseEjectionTime": "10s",
            "maxEjectionPercent": 50,
        },
    }
    spec = {"host": host, "exportTo": ["*"], "trafficPolicy": policy}  # like the Service, whatever the default
    return kube_object("DestinationRule", name, plan.namespace, component=PICKER, spec=spec)


def _pool_rule(plan: InstallPlan, pool: PoolTarget) -> Document:
    """Locality is off: Envoy rejects clusters with both locality weights and override_host."""
    policy: dict[str, Any] = {
        "loadBalancer": {"simple": "LEAST_REQUEST", "localityLbSetting": {"enabled": False}},
        "connectionPool": {
            "tcp": {"connectTimeout": "1s", "maxConnections": 1000000},
            "http": {
                # the picker limits a pod's load
                "http1MaxPendingRequests": 1000000,
                "http2MaxRequests": 1000000,
                # below vLLM's 5 s: a request must not hit a connection that vLLM is closing
                "idleTimeout": "4s",
            },
        },
    }
    # only for proxies that ask the picker; other clients' connections are unaffected
    askers = sorted({each.namespace for each in plan.callers})
    spec = {"host": pool.host, "exportTo": askers, "trafficPolicy": policy}
    return kube_object("DestinationRule", f"kvmesh-{pool.name}", pool.namespace, spec=spec)


def _pods_by_address(plan: InstallPlan, pool: PoolTarget) -> list[Document]:
    """Return the objects that let picker and indexer reach single pods with mTLS; needs the pods' labels.

    A sidecar sends plain text, which STRICT refuses, to addresses that no Service covers. A headless Service covers
    them; its ports are plain TCP, because requests go to an address, not a host.
    """
    if pool.selector is None or not pool.in_mesh or plan.membership is not MeshMembership.SIDECAR:
        return []
    name = fitting_name("kvmesh-", pool.name, "-pods")
    ports = {"tcp-api": pool.api_port, "tcp-kv-events": EVENTS_PORT, "tcp-kv-replay": REPLAY_PORT}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # events start before readiness
        "selector": dict(pool.selector),
        "ports": [
            {"name": port, "port": number, "targetPort": number, "appProtocol": "tcp"} for port, number in ports.items()
        ],
    }
    rule = {
        "host": f"{name}.{pool.namespace}.svc.{CLUSTER_DOMAIN}",
        "exportTo": [plan.namespace],
        "trafficPolicy": {"tls": {"mode": "ISTIO_MUTUAL"}},
    }
    only_ours = {EXPORT_TO: plan.namespace}
    return [
        kube_object("Service", name, pool.namespace, annotations=only_ours, spec=service),
        kube_object("DestinationRule", name, pool.namespace, spec=rule),
    ]


def _strict_mtls(plan: InstallPlan) -> list[Document]:
    """Return STRICT mTLS per component; with monitoring, admin ports also accept a Prometheus outside the mesh."""
    admin_ports = {PICKER: PICKER_ADMIN_PORT, INDEXER: INDEXER_ADMIN_PORT}
    policies = []
    for component in (PICKER, INDEXER, REDIS) if plan.redis is RedisKind.BUNDLED else (PICKER, INDEXER):
        spec: dict[str, Any] = {"selector": pods_of(component), "mtls": {"mode": "STRICT"}}
        if plan.monitoring and component in admin_ports:
            spec["portLevelMtls"] = {str(admin_ports[component]): {"mode": "PERMISSIVE"}}
        policies.append(component_object("PeerAuthentication", component, plan.namespace, spec=spec))
    return policies


def _authorization_policies(plan: InstallPlan) -> list[Document]:
    """Return an ALLOW policy per component, which refuses every caller it does not name."""
    picks = {"from": [{"source": _callers(plan)}], "to": [{"operation": _to_port(plan, GRPC_PORT, paths=[PROCESS])}]}
    policies = [
        _allow(plan, PICKER, [picks, *_admin(plan, PICKER_ADMIN_PORT)]),
        _allow(plan, INDEXER, _admin(plan, INDEXER_ADMIN_PORT)),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = _principals(plan, *((plan.namespace, name) for name in (PICKER, INDEXER)))
        to = [{"operation": {"ports": [str(REDIS_PORT)]}}]
        policies.append(_allow(plan, REDIS, [{"from": [{"source": users}], "to": to}]))
    return policies


def _admin(plan: InstallPlan, port: int) -> list[dict[str, Any]]:
    """Allow the admin pages to our namespace and, with monitoring, /metrics to everyone who reaches the port."""
    ours = [{"source": _principals(plan, (plan.namespace, "*"))}]
    rules: list[dict[str, Any]] = [{"from": ours, "to": [{"operation": {"ports": [str(port)]}}]}]
    if plan.monitoring:
        rules.append({"to": [{"operation": _to_port(plan, port, paths=["/metrics"])}]})
    return rules


def _to_port(plan: InstallPlan, port: int, *, paths: list[str]) -> dict[str, Any]:
    """Return an operation with port and, if the proxy sees HTTP, paths; else a rule with paths would match nothing.

    Ambient's ztunnel does not see paths, nor does the picker's sidecar on a TCP port.
    """
    is_tcp = plan.mode is Mode.INFERENCE_POOL and port == GRPC_PORT
    operation: dict[str, Any] = {"ports": [str(port)]}
    return operation if is_tcp or plan.membership is MeshMembership.AMBIENT else operation | {"paths": paths}


def _callers(plan: InstallPlan) -> dict[str, Any]:
    callers = [(each.namespace, each.service_account) for each in plan.gateways]
    if plan.mode is Mode.SIDECAR:
        callers = [(namespace, "*") for namespace in sorted({clients.namespace for clients in plan.clients})]
    return _principals(plan, *(callers or [(plan.namespace, PICKER)]))  # an empty list would admit everyone


def _principals(plan: InstallPlan, *accounts: tuple[str, str]) -> dict[str, Any]:
    """Return the source with these service accounts, as (namespace, name or `*`).

    A source by namespace would also match that namespace of every federated trust domain.
    """
    return {"principals": [f"{plan.trust_domain}/ns/{namespace}/sa/{name}" for namespace, name in accounts]}


def _allow(plan: InstallPlan, component: str, rules: list[dict[str, Any]]) -> Document:
    spec = {"selector": pods_of(component), "action": "ALLOW", "rules": rules}
    return component_object("AuthorizationPolicy", component, plan.namespace, spec=spec)
