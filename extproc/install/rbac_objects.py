"""What picker and indexer may ask of the Kubernetes API, and nothing else. Pure; used by `render`.

Mesh-wide: ClusterRoles. Namespaced: Roles in the installation's own namespace and in each pool's.
"""

from typing import Any

from extproc.install.labels import object_meta
from extproc.install.picker_objects import watched_namespaces
from extproc.install.plan import INDEXER, PICKER, InstallPlan, Scope

LEASE = "kvmesh-status-writer"  # who holds it writes the status of policies
API = "rbac.authorization.k8s.io"
READ = ["get", "list", "watch"]


def rbac_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return roles, their bindings, and the lease that the pickers share."""
    roles = [(PICKER, _picker_rules()), (INDEXER, _pool_rules())]
    if plan.scope is Scope.MESH:
        readers = [each for name, rules in roles for each in _cluster_wide(plan, name, rules)]
    else:
        readers = [
            each
            for namespace in watched_namespaces(plan)
            for name, rules in roles
            for each in _within(plan, name, rules, namespace=namespace)
        ]
    return [*readers, *_leadership(plan)]


def _pool_rules() -> list[dict[str, Any]]:
    """Who serves what."""
    return [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": READ},
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": READ},
        {"apiGroups": ["inference.networking.x-k8s.io"], "resources": ["inferencepoolimports"], "verbs": READ},
    ]


def _picker_rules() -> list[dict[str, Any]]:
    """Pools, policies and what policies refer to; of all these, only the status of ours may be written."""
    extension = ["inferenceobjectives", "inferencemodelrewrites"]
    return [
        *_pool_rules(),
        {"apiGroups": ["kvmesh.io"], "resources": ["inferencepolicies"], "verbs": READ},
        {"apiGroups": ["kvmesh.io"], "resources": ["inferencepolicies/status"], "verbs": ["get", "update"]},
        {"apiGroups": ["llm-d.ai", "inference.networking.x-k8s.io"], "resources": extension, "verbs": READ},
        {"apiGroups": ["gateway.networking.k8s.io"], "resources": ["gateways", "httproutes"], "verbs": READ},
    ]


def _cluster_wide(plan: InstallPlan, name: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    full_name = f"{name}-{plan.namespace}"  # several installations do not share a role
    return [
        {
            "apiVersion": f"{API}/v1",
            "kind": "ClusterRole",
            "metadata": object_meta(full_name, None, component=name),
            "rules": rules,
        },
        {
            "apiVersion": f"{API}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": object_meta(full_name, None, component=name),
            "roleRef": {"apiGroup": API, "kind": "ClusterRole", "name": full_name},
            "subjects": [_subject(plan, name)],
        },
    ]


def _within(
    plan: InstallPlan, name: str, rules: list[dict[str, Any]], *, namespace: str, full_name: str | None = None
) -> list[dict[str, Any]]:
    role = full_name or (name if namespace == plan.namespace else f"{name}-{plan.namespace}")
    return [
        {
            "apiVersion": f"{API}/v1",
            "kind": "Role",
            "metadata": object_meta(role, namespace, component=name),
            "rules": rules,
        },
        {
            "apiVersion": f"{API}/v1",
            "kind": "RoleBinding",
            "metadata": object_meta(role, namespace, component=name),
            "roleRef": {"apiGroup": API, "kind": "Role", "name": role},
            "subjects": [_subject(plan, name)],
        },
    ]


def _leadership(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the pickers' lease: made here, none needs the right to create one, and it goes with the rest."""
    rules = [
        {
            "apiGroups": ["coordination.k8s.io"],
            "resources": ["leases"],
            "resourceNames": [LEASE],
            "verbs": ["get", "update"],
        }
    ]
    lease = {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": object_meta(LEASE, plan.namespace, component=PICKER),
    }
    return [lease, *_within(plan, PICKER, rules, namespace=plan.namespace, full_name=LEASE)]


def _subject(plan: InstallPlan, name: str) -> dict[str, Any]:
    return {"kind": "ServiceAccount", "name": name, "namespace": plan.namespace}
