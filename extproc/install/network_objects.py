"""Who may connect to our pods, and how connections are made: NetworkPolicies, and what Istio has to know. Pure.

The NetworkPolicies are a second fence beside mTLS: they hold where a pod is not part of the mesh.
"""

from collections.abc import Mapping
from typing import Any

from extproc.install.istio_release import plan_wiring
from extproc.install.native_pools import picker_hosts, plain_inbound
from extproc.install.objects import (
    EXPORT_TO,
    Document,
    component_labels,
    component_object,
    fitting_name,
    kube_object,
    pods_of,
)
from extproc.install.plan import (
    CLUSTER_DOMAIN,
    EXTERNAL_METRICS_PORT,
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
from extproc.policy.values import Steering

NAMESPACE_NAME = "kubernetes.io/metadata.name"
HBONE = 15008  # what ambient's tunnels arrive at, whatever port is meant
MERGED_METRICS = 15020
ISTIOD = 15012  # configuration and certificates
AUTHORITY_PORTS = (443, 6443)  # certificates of a managed control plane, and of istio-csr's pods
DNS_PORTS = (53, 5353)  # 5353: OpenShift's DNS pods; a policy sees the port that a Service leads to
# Whatever the mesh's trust domain is: a sidecar would take cluster.local for it, ztunnel compares the text.
ANY_TRUST_DOMAIN = "*"
# where ambient has the kubelet's probes come from, so that they pass its proxy: to the network they are not the node's
AMBIENT_PROBES = ("169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
# where vLLM publishes its events by default (kv_events_config: endpoint, replay_endpoint)
EVENTS_PORT = 5557
REPLAY_PORT = 5558


def network_objects(plan: InstallPlan) -> list[Document]:
    """Return a NetworkPolicy for each component."""
    picks = _from(plan, [_peer(each.namespace, each.selector) for each in plan.callers], GRPC_PORT)
    policies = [
        _network_policy(plan, PICKER, [picks, *_to_admin(plan, PICKER_ADMIN_PORT), *_to_external_metrics(plan)]),
        _network_policy(plan, INDEXER, _to_admin(plan, INDEXER_ADMIN_PORT)),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = [_peer(plan.namespace, component_labels(name)) for name in (PICKER, INDEXER)]
        policy = _network_policy(plan, REDIS, [_from(plan, users, REDIS_PORT)])
        # Closed both ways, but for names and for the control plane, which the sidecar needs. By port alone: a node's
        # DNS cache is no pod, and istiod may be in any namespace or outside of the cluster.
        egress = [{"ports": [{"protocol": each, "port": port} for port in DNS_PORTS for each in ("UDP", "TCP")]}]
        if plan.membership is MeshMembership.SIDECAR:
            egress.append({"ports": [{"protocol": "TCP", "port": port} for port in (ISTIOD, *AUTHORITY_PORTS)]})
        policy["spec"] |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
        policies.append(policy)
    return policies


def _peer(namespace: str, selector: Mapping[str, str] | None = None) -> dict[str, Any]:
    peer: dict[str, Any] = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: namespace}}}
    if selector:
        peer["podSelector"] = {"matchLabels": dict(selector)}
    return peer


def _from(plan: InstallPlan, peers: list[dict[str, Any]], port: int) -> dict[str, Any]:
    ports = [port, HBONE] if plan.membership is MeshMembership.AMBIENT else [port]
    # an empty list would let in all: name pods of our own namespace that do not exist
    none = [{"podSelector": {"matchLabels": {"kvmesh.io/no-such-pod": "true"}}}]
    return {"from": peers or none, "ports": [{"protocol": "TCP", "port": each} for each in ports]}


def _to_admin(plan: InstallPlan, port: int) -> list[dict[str, Any]]:
    """Let in our own namespace, Prometheus, and the kubelet where it does not come from the node's own address."""
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


def _to_external_metrics(plan: InstallPlan) -> list[dict[str, Any]]:
    """Let in whoever has the right certificate: the API server is no pod, and its addresses are not known here."""
    return [{"ports": [{"protocol": "TCP", "port": EXTERNAL_METRICS_PORT}]}] if plan.external_metrics else []


def _network_policy(plan: InstallPlan, component: str, ingress: list[dict[str, Any]]) -> Document:
    """Close what comes in. What goes out stays open: pods and the API server may be at any address and port."""
    spec = {"podSelector": pods_of(component), "policyTypes": ["Ingress"], "ingress": ingress}
    return component_object("NetworkPolicy", component, plan.namespace, spec=spec)


def mesh_objects(plan: InstallPlan) -> list[Document]:
    """Return DestinationRules and, where kvmesh is part of the mesh, who may call it and that only with mTLS."""
    rules = [_picker_rule(plan, PICKER, plan.picker_host), *_pool_rules(plan)]
    twins = [each for pool in plan.pools for each in _pods_by_address(plan, pool)]
    if plan.membership is MeshMembership.NONE:
        return [*rules, *twins]
    is_asked_by_istio = plan.mode is Mode.INFERENCE_POOL and plan.membership is MeshMembership.SIDECAR
    inbound = [plain_inbound(plan)] if is_asked_by_istio else []
    return [*rules, *twins, *_strict_mtls(plan), *_authorization_policies(plan), *inbound]


def _pool_rules(plan: InstallPlan) -> list[Document]:
    """Return the rules of the pools' hosts; of native pools those of the names under which they ask the picker."""
    if plan.mode is Mode.INFERENCE_POOL:
        return [_picker_rule(plan, host.partition(".")[0], host) for host in picker_hosts(plan)]
    needs_rule = plan_wiring(plan).steering is Steering.ORIGINAL_DST
    return [_pool_rule(plan, pool) for pool in plan.pools if needs_rule or not pool.has_rule]


def _picker_rule(plan: InstallPlan, name: str, host: str) -> Document:
    """Return how gateways connect to the picker; no `tls`, so that Istio uses mTLS wherever both sides can."""
    policy = {
        # with outlier detection Istio prefers pickers of the gateway's own zone: one would be asked by all, and the
        # autoscaler, which sees the mean of all pickers, would add none
        "loadBalancer": {"simple": "LEAST_REQUEST", "localityLbSetting": {"enabled": False}},
        "connectionPool": {
            # requests wait in the picker without a byte moving: only keepalives notice that its machine is gone
            "tcp": {"connectTimeout": "1s", "tcpKeepalive": {"time": "30s", "interval": "10s", "probes": 2}},
            "http": {"http2MaxRequests": 1000000, "maxRequestsPerConnection": 0, "idleTimeout": PICKER_IDLE_TIMEOUT},
        },
        # a picker that is gone without a word; not its answers, which say what is wrong with requests
        "outlierDetection": {
            "consecutive5xxErrors": 0,
            "consecutiveGatewayErrors": 5,
            "interval": "2s",
            "baseEjectionTime": "10s",
            "maxEjectionPercent": 50,
        },
    }
    spec = {"host": host, "exportTo": ["*"], "trafficPolicy": policy}  # as its Service, whatever the mesh's default is
    return kube_object("DestinationRule", name, plan.namespace, component=PICKER, spec=spec)


def _pool_rule(plan: InstallPlan, pool: PoolTarget) -> Document:
    """Return how a pool's pods are connected to.

    No locality: Envoy refuses a cluster that has weights by it beside an override of the host.
    """
    policy: dict[str, Any] = {
        "loadBalancer": {"simple": "LEAST_REQUEST", "localityLbSetting": {"enabled": False}},
        "connectionPool": {
            "tcp": {"connectTimeout": "1s", "maxConnections": 1000000},
            "http": {
                # the picker decides what a pod can take
                "http1MaxPendingRequests": 1000000,
                "http2MaxRequests": 1000000,
                # vLLM closes idle connections after 5 s: close first, or a request meets one that is just being closed
                "idleTimeout": "4s",
            },
        },
    }
    if plan_wiring(plan).steering is Steering.ORIGINAL_DST:
        policy["loadBalancer"] = {"simple": "PASSTHROUGH"}
        # cannot be found out for an address that is dialled as the picker names it
        policy["tls"] = {"mode": "ISTIO_MUTUAL" if pool.in_mesh else "DISABLE"}
    # only for those who ask the picker: PASSTHROUGH would change what all other requests do
    askers = sorted({each.namespace for each in plan.callers})
    spec = {"host": pool.host, "exportTo": askers, "trafficPolicy": policy}
    return kube_object("DestinationRule", f"kvmesh-{pool.name}", pool.namespace, spec=spec)


def _pods_by_address(plan: InstallPlan, pool: PoolTarget) -> list[Document]:
    """Return what lets picker and indexer reach a pool's pods one by one with mTLS; needs the pods' labels.

    To a sidecar an address that no Service names is foreign: it would speak plain text, which STRICT refuses. A
    headless Service names them all; plain TCP, because what is asked is the address, not a host.
    """
    if pool.selector is None or not pool.in_mesh or plan.membership is not MeshMembership.SIDECAR:
        return []
    name = fitting_name("kvmesh-", pool.name, "-pods")
    ports = {"tcp-api": pool.api_port, "tcp-kv-events": EVENTS_PORT, "tcp-kv-replay": REPLAY_PORT}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # events begin before readiness
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
    """Return STRICT for each component; some ports also take who is outside the mesh: a Prometheus, the API server."""
    admin_ports = {PICKER: PICKER_ADMIN_PORT, INDEXER: INDEXER_ADMIN_PORT}
    policies = []
    for component in (PICKER, INDEXER, REDIS) if plan.redis is RedisKind.BUNDLED else (PICKER, INDEXER):
        spec: dict[str, Any] = {"selector": pods_of(component), "mtls": {"mode": "STRICT"}}
        if plan.monitoring and component in admin_ports:
            spec["portLevelMtls"] = {str(admin_ports[component]): {"mode": "PERMISSIVE"}}
        if plan.external_metrics and component == PICKER:
            spec.setdefault("portLevelMtls", {})[str(EXTERNAL_METRICS_PORT)] = {"mode": "PERMISSIVE"}
        policies.append(component_object("PeerAuthentication", component, plan.namespace, spec=spec))
    return policies


def _authorization_policies(plan: InstallPlan) -> list[Document]:
    """Return an ALLOW policy for each component: all that it does not name are refused."""
    picks = {"from": [{"source": _callers(plan)}], "to": [{"operation": _to_port(plan, GRPC_PORT, paths=[PROCESS])}]}
    # the API server has no identity of the mesh: the picker looks at its certificate
    asked = [{"to": [{"operation": {"ports": [str(EXTERNAL_METRICS_PORT)]}}]}] if plan.external_metrics else []
    policies = [
        _allow(plan, PICKER, [picks, *_admin(plan, PICKER_ADMIN_PORT), *asked]),
        _allow(plan, INDEXER, _admin(plan, INDEXER_ADMIN_PORT)),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = [f"{ANY_TRUST_DOMAIN}/ns/{plan.namespace}/sa/{name}" for name in (PICKER, INDEXER)]
        to = [{"operation": {"ports": [str(REDIS_PORT)]}}]
        policies.append(_allow(plan, REDIS, [{"from": [{"source": {"principals": users}}], "to": to}]))
    return policies


def _admin(plan: InstallPlan, port: int) -> list[dict[str, Any]]:
    """Open the admin pages to our own namespace; with monitoring, the metrics also to all that reach the port."""
    ours = [{"source": {"namespaces": [plan.namespace]}}]
    rules: list[dict[str, Any]] = [{"from": ours, "to": [{"operation": {"ports": [str(port)]}}]}]
    if plan.monitoring:
        rules.append({"to": [{"operation": _to_port(plan, port, paths=["/metrics"])}]})
    return rules


def _to_port(plan: InstallPlan, port: int, *, paths: list[str]) -> dict[str, Any]:
    """Name a port and paths, where they are seen: a rule that names some lets nobody in where they are not.

    Ambient's ztunnel sees none, and neither does the picker's sidecar in front of a port that is TCP to it.
    """
    is_tcp = plan.mode is Mode.INFERENCE_POOL and port == GRPC_PORT
    operation: dict[str, Any] = {"ports": [str(port)]}
    return operation if is_tcp or plan.membership is MeshMembership.AMBIENT else operation | {"paths": paths}


def _callers(plan: InstallPlan) -> dict[str, Any]:
    if plan.mode is Mode.SIDECAR:
        return {"namespaces": sorted({clients.namespace for clients in plan.clients}) or [plan.namespace]}
    names = [f"{ANY_TRUST_DOMAIN}/ns/{each.namespace}/sa/{each.service_account}" for each in plan.gateways]
    # an empty list would let in all
    return {"principals": names or [f"{ANY_TRUST_DOMAIN}/ns/{plan.namespace}/sa/{PICKER}"]}


def _allow(plan: InstallPlan, component: str, rules: list[dict[str, Any]]) -> Document:
    spec = {"selector": pods_of(component), "action": "ALLOW", "rules": rules}
    return component_object("AuthorizationPolicy", component, plan.namespace, spec=spec)
