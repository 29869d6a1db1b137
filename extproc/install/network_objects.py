"""NetworkPolicies: who may open connections to our pods, and to whom they may open some. Pure; used by `render`.

A second fence beside mTLS: it holds where a pod is not part of the mesh.
"""

from collections.abc import Mapping
from typing import Any

from extproc.install.ext_proc_filter import GRPC_PORT
from extproc.install.indexer_objects import ADMIN_PORT as INDEXER_ADMIN_PORT
from extproc.install.labels import component_labels, object_meta
from extproc.install.picker_objects import ADMIN_PORT
from extproc.install.plan import INDEXER, PICKER, REDIS, InstallPlan, MeshMembership, Mode, RedisKind
from extproc.install.pod_parts import REDIS_PORT

NAMESPACE_NAME = "kubernetes.io/metadata.name"
HBONE = 15008  # what ambient's tunnels arrive at, whatever port is meant
MERGED_METRICS = 15020
ISTIOD = 15012  # configuration and certificates
# where ambient has the kubelet's probes come from, so that they pass its proxy: to the network they are not the node's
AMBIENT_PROBES = ("169.254.7.127/32", "fd16:9254:7127:1337:ffff:ffff:ffff:ffff/128")


def network_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return a policy for each of our parts."""
    admin = [_peer(plan.namespace, None)]
    monitoring = [_peer(plan.monitoring_namespace, None)] if plan.monitoring else []
    policies = [
        _policy(
            plan,
            PICKER,
            [
                _from(plan, _callers(plan), GRPC_PORT),
                _from(plan, admin, ADMIN_PORT),
                *_metrics(plan, monitoring, ADMIN_PORT),
                *_probes(plan, ADMIN_PORT),
            ],
        ),
        _policy(
            plan,
            INDEXER,
            [
                _from(plan, admin, INDEXER_ADMIN_PORT),
                *_metrics(plan, monitoring, INDEXER_ADMIN_PORT),
                *_probes(plan, INDEXER_ADMIN_PORT),
            ],
        ),
    ]
    if plan.redis is RedisKind.BUNDLED:
        users = [_peer(plan.namespace, component_labels(name)) for name in (PICKER, INDEXER)]
        policies.append(_closed(plan, REDIS, [_from(plan, users, REDIS_PORT)]))
    return policies


def _callers(plan: InstallPlan) -> list[dict[str, Any]]:
    if plan.mode is Mode.SIDECAR:
        return [_peer(each.namespace, each.selector) for each in plan.clients]
    return [_peer(each.namespace, each.selector) for each in plan.gateways]


def _peer(namespace: str, selector: Mapping[str, str] | None) -> dict[str, Any]:
    peer: dict[str, Any] = {"namespaceSelector": {"matchLabels": {NAMESPACE_NAME: namespace}}}
    if selector:
        peer["podSelector"] = {"matchLabels": dict(selector)}
    return peer


def _from(plan: InstallPlan, peers: list[dict[str, Any]], port: int) -> dict[str, Any]:
    ports = [port, HBONE] if plan.membership is MeshMembership.AMBIENT else [port]
    # no peers would mean everybody: then nobody's pods of our own namespace
    nobody = [{"podSelector": {"matchLabels": {"kvmesh.io/no-such-pod": "true"}}}]
    return {"from": peers or nobody, "ports": [{"protocol": "TCP", "port": each} for each in ports]}


def _metrics(plan: InstallPlan, peers: list[dict[str, Any]], port: int) -> list[dict[str, Any]]:
    if not peers:
        return []
    rule = _from(plan, peers, port)
    if plan.membership is MeshMembership.SIDECAR:
        rule["ports"].append({"protocol": "TCP", "port": MERGED_METRICS})
    return [rule]


def _probes(plan: InstallPlan, port: int) -> list[dict[str, Any]]:
    """Let the kubelet's probes in where they do not come from the node's own address, which is let in anyway."""
    if plan.membership is not MeshMembership.AMBIENT:
        return []
    peers = [{"ipBlock": {"cidr": cidr}} for cidr in AMBIENT_PROBES]
    return [{"from": peers, "ports": [{"protocol": "TCP", "port": port}]}]


def _policy(plan: InstallPlan, component: str, ingress: list[dict[str, Any]]) -> dict[str, Any]:
    """Close what comes in. What goes out stays open: pods and the API server may be at any address and port."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_meta(component, plan.namespace, component=component),
        "spec": {
            "podSelector": {"matchLabels": component_labels(component)},
            "policyTypes": ["Ingress"],
            "ingress": ingress,
        },
    }


def _closed(plan: InstallPlan, component: str, ingress: list[dict[str, Any]]) -> dict[str, Any]:
    """Close both ways, but for names and for the control plane, which the sidecar needs.

    By port alone: a node's DNS cache is no pod, and istiod may be in any namespace or outside of the cluster.
    """
    policy = _policy(plan, component, ingress)
    egress = [{"ports": [{"protocol": each, "port": 53} for each in ("UDP", "TCP")]}]
    if plan.membership is MeshMembership.SIDECAR:
        egress.append({"ports": [{"protocol": "TCP", "port": ISTIOD}]})
    policy["spec"] |= {"policyTypes": ["Ingress", "Egress"], "egress": egress}
    return policy
