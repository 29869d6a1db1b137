"""What Istio is told of our Services and the pools': connections, mTLS, who may call. Pure; used by `render`."""

from hashlib import sha256
from typing import Any

from extproc.install.ext_proc_filter import GRPC_PORT, picker_host
from extproc.install.indexer_objects import ADMIN_PORT as INDEXER_ADMIN_PORT
from extproc.install.istio_release import plan_wiring
from extproc.install.labels import component_labels, object_meta
from extproc.install.picker_objects import ADMIN_PORT
from extproc.install.plan import (
    CLUSTER_DOMAIN,
    INDEXER,
    PICKER,
    REDIS,
    InstallPlan,
    MeshMembership,
    Mode,
    PoolTarget,
    RedisKind,
)
from extproc.install.pod_parts import REDIS_PORT
from extproc.policy.values import Steering

NETWORKING = "networking.istio.io/v1"
SECURITY = "security.istio.io/v1"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
# where vLLM publishes its events unless it is told otherwise (kv_events_config: endpoint, replay_endpoint)
EVENTS_PORT = 5557
REPLAY_PORT = 5558
LONGEST_NAME = 63


def mesh_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return DestinationRules, and where kvmesh is part of the mesh who may call it and that only with mTLS."""
    rules = [_picker_rule(plan), *(_pool_rule(plan, pool) for pool in plan.pools)]
    twins = [each for pool in plan.pools for each in _pods_by_address(plan, pool)]
    if plan.membership is MeshMembership.NONE:
        return [*rules, *twins]
    return [*rules, *twins, *_strict_mtls(plan), *_who_may_call(plan)]


def _picker_rule(plan: InstallPlan) -> dict[str, Any]:
    """Return how gateways connect to the picker; no `tls`, so that Istio uses mTLS wherever both sides can."""
    return {
        "apiVersion": NETWORKING,
        "kind": "DestinationRule",
        "metadata": object_meta(PICKER, plan.namespace, component=PICKER),
        "spec": {
            "host": picker_host(plan),
            "trafficPolicy": {
                "loadBalancer": {"simple": "LEAST_REQUEST"},
                "connectionPool": {
                    # requests wait in the picker without a byte moving: if its machine is gone, nobody else would tell
                    "tcp": {"connectTimeout": "1s", "tcpKeepalive": {"time": "30s", "interval": "10s", "probes": 2}},
                    "http": {"http2MaxRequests": 1000000, "maxRequestsPerConnection": 0, "idleTimeout": "3600s"},
                },
                # a picker that is gone without a word; not its answers, which say what is wrong with requests
                "outlierDetection": {
                    "consecutive5xxErrors": 0,
                    "consecutiveGatewayErrors": 5,
                    "interval": "2s",
                    "baseEjectionTime": "10s",
                    "maxEjectionPercent": 50,
                },
            },
        },
    }


def _pool_rule(plan: InstallPlan, pool: PoolTarget) -> dict[str, Any]:
    """Return how a pool's pods are connected to.

    No locality, no consistent hash, no warm-up: Envoy refuses a cluster that has these beside an override of the host.
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
    return {
        "apiVersion": NETWORKING,
        "kind": "DestinationRule",
        "metadata": object_meta(f"kvmesh-{pool.name}", pool.namespace),
        # for those alone who ask the picker: PASSTHROUGH would change what everybody else's requests do
        "spec": {"host": pool.host, "exportTo": _askers(plan), "trafficPolicy": policy},
    }


def _askers(plan: InstallPlan) -> list[str]:
    targets = plan.clients if plan.mode is Mode.SIDECAR else plan.gateways
    return sorted({each.namespace for each in targets})


def _pods_by_address(plan: InstallPlan, pool: PoolTarget) -> list[dict[str, Any]]:
    """Return what lets picker and indexer reach a pool's pods one by one with mTLS; needs the pods' labels.

    To a sidecar an address that no Service names is foreign: it would speak plain text, which STRICT refuses. A
    headless Service names them all; plain TCP, because what is asked is the address, not a host.
    """
    if pool.selector is None or not pool.in_mesh or plan.membership is not MeshMembership.SIDECAR:
        return []
    name = _pods_name(pool)
    ports = {"tcp-api": pool.api_port, "tcp-kv-events": EVENTS_PORT, "tcp-kv-replay": REPLAY_PORT}
    meta = object_meta(name, pool.namespace)
    meta["annotations"] = {"networking.istio.io/exportTo": plan.namespace}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": meta,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # events begin before readiness
            "selector": dict(pool.selector),
            "ports": [
                {"name": port, "port": number, "targetPort": number, "appProtocol": "tcp"}
                for port, number in ports.items()
            ],
        },
    }
    rule = {
        "apiVersion": NETWORKING,
        "kind": "DestinationRule",
        "metadata": object_meta(name, pool.namespace),
        "spec": {
            "host": f"{name}.{pool.namespace}.svc.{CLUSTER_DOMAIN}",
            "exportTo": [plan.namespace],
            "trafficPolicy": {"tls": {"mode": "ISTIO_MUTUAL"}},
        },
    }
    return [service, rule]


def _pods_name(pool: PoolTarget) -> str:
    """Return a name of at most 63 characters: it is a Service's."""
    name = f"kvmesh-{pool.name}-pods"
    if len(name) <= LONGEST_NAME:
        return name
    return f"kvmesh-{pool.name[:40].rstrip('-')}-{sha256(pool.name.encode()).hexdigest()[:8]}-pods"


def _strict_mtls(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return STRICT for each of our parts; the metrics' port also takes a Prometheus outside of the mesh."""
    parts = [(PICKER, ADMIN_PORT), (INDEXER, INDEXER_ADMIN_PORT)]
    if plan.redis is RedisKind.BUNDLED:
        parts.append((REDIS, 0))
    return [_strict(plan, component, open_port=port if plan.monitoring else 0) for component, port in parts]


def _strict(plan: InstallPlan, component: str, *, open_port: int) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "selector": {"matchLabels": component_labels(component)},
        "mtls": {"mode": "STRICT"},
    }
    if open_port:
        spec["portLevelMtls"] = {str(open_port): {"mode": "PERMISSIVE"}}
    return {
        "apiVersion": SECURITY,
        "kind": "PeerAuthentication",
        "metadata": object_meta(component, plan.namespace, component=component),
        "spec": spec,
    }


def _who_may_call(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return an ALLOW policy for each of our parts: whoever it does not name is refused."""
    ours = {"from": [{"source": {"namespaces": [plan.namespace]}}]}
    picks = {"from": [{"source": _callers(plan)}], "to": [{"operation": _to_port(plan, GRPC_PORT, paths=[PROCESS])}]}
    policies = [
        _allow(plan, PICKER, [picks, *_admin(plan, ours, ADMIN_PORT)]),
        _allow(plan, INDEXER, _admin(plan, ours, INDEXER_ADMIN_PORT)),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = [f"{CLUSTER_DOMAIN}/ns/{plan.namespace}/sa/{name}" for name in (PICKER, INDEXER)]
        rule = {
            "from": [{"source": {"principals": users}}],
            "to": [{"operation": {"ports": [str(REDIS_PORT)]}}],
        }
        policies.append(_allow(plan, REDIS, [rule]))
    return policies


def _admin(plan: InstallPlan, ours: dict[str, Any], port: int) -> list[dict[str, Any]]:
    """Return who sees the admin pages: all of it from our own namespace, the metrics also whoever gets so far."""
    rules = [{**ours, "to": [{"operation": {"ports": [str(port)]}}]}]
    if plan.monitoring:
        rules.append({"to": [{"operation": _to_port(plan, port, paths=["/metrics"])}]})
    return rules


def _to_port(plan: InstallPlan, port: int, *, paths: list[str]) -> dict[str, Any]:
    """Name a port and paths. Ambient's ztunnel sees no paths, and drops a whole ALLOW rule that names some."""
    operation: dict[str, Any] = {"ports": [str(port)]}
    return operation if plan.membership is MeshMembership.AMBIENT else operation | {"paths": paths}


def _callers(plan: InstallPlan) -> dict[str, Any]:
    if plan.mode is Mode.SIDECAR:
        return {"namespaces": sorted({clients.namespace for clients in plan.clients}) or [plan.namespace]}
    names = [f"{CLUSTER_DOMAIN}/ns/{each.namespace}/sa/{each.service_account}" for each in plan.gateways]
    # an empty list would mean everybody
    return {"principals": names or [f"{CLUSTER_DOMAIN}/ns/{plan.namespace}/sa/{PICKER}"]}


def _allow(plan: InstallPlan, component: str, rules: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": SECURITY,
        "kind": "AuthorizationPolicy",
        "metadata": object_meta(component, plan.namespace, component=component),
        "spec": {"selector": {"matchLabels": component_labels(component)}, "action": "ALLOW", "rules": rules},
    }
