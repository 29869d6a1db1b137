"""Workloads of picker, indexer and the bundled Redis, and their rights in the Kubernetes API. Pure."""

from collections.abc import Mapping
from typing import Any

from operate.install.model_volume import MODELS, fetching_containers, model_volume, token_volumes
from operate.install.objects import (
    EXPORT_TO,
    INSTALLATION,
    OWNED,
    STATUS_LEASE,
    Document,
    component_labels,
    component_object,
    kube_object,
    pods_of,
)
from operate.install.plan import (
    GRPC_PORT,
    INDEXER,
    INDEXER_ADMIN_PORT,
    PICKER,
    PICKER_ADMIN_PORT,
    REDIS,
    REDIS_PORT,
    InstallPlan,
    Mode,
    RedisKind,
    Scope,
)
from operate.install.pod_parts import LOCKED_DOWN, SETTLE_SECONDS, TMP_MOUNT, pod_template, role_container, role_volumes
from operate.install.redis_access import INDEXER_USER, PICKER_USER, PROBE, hash_environment, user_arguments

BUSY_PERCENT = 60  # HPA target, of the one core that a picker can use
HEADROOM = 1.6  # memory limit / data size: copy-on-write during AOF rewrites, client buffers
ROLLING_UPDATE = {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
# the endpoint picker protocol has this status for sheddable requests
REFUSED_WITH_429 = "priorities: {classes: [{name: sheddable, refusalStatus: 429}]}"
RBAC = "rbac.authorization.k8s.io"
READ = ["get", "list", "watch"]


def picker_objects(plan: InstallPlan) -> list[Document]:
    """Return the picker's objects except RBAC and network objects."""
    # name and appProtocol make Istio use HTTP/2; without them every pick would fail
    picks = {"name": "grpc-ext-proc", "port": GRPC_PORT, "targetPort": "grpc", "appProtocol": "grpc"}
    return [
        # visible to callers in other namespaces, even if the mesh's default hides Services
        *_account_and_service(PICKER, plan, picks, _admin_port(PICKER_ADMIN_PORT), annotations={EXPORT_TO: "*"}),
        _picker_deployment(plan),
        _budget(PICKER, plan),
        _picker_autoscaler(plan),
    ]


def indexer_objects(plan: InstallPlan) -> list[Document]:
    """Return the indexer's objects except RBAC and network objects."""
    return [
        *_account_and_service(INDEXER, plan, _admin_port(INDEXER_ADMIN_PORT)),
        _indexer_deployment(plan),
        _budget(INDEXER, plan),
    ]


def redis_objects(plan: InstallPlan) -> list[Document]:
    """Return the bundled Redis (one server with a disk), or nothing with an external Redis.

    Its data may be lost: the index is rebuilt from the pods' replay buffers, and everything else lives for minutes.
    The disk only makes that rare.
    """
    if plan.redis is not RedisKind.BUNDLED:
        return []
    # "tcp-": a port named redis would enable Envoy's Redis proxy, if Istio has it on
    port = {"name": "tcp-redis", "port": REDIS_PORT, "targetPort": "redis", "appProtocol": "tcp"}
    return [*_account_and_service(REDIS, plan, port), _redis_server(plan), _budget(REDIS, plan)]


def _admin_port(number: int) -> dict[str, Any]:
    return {"name": "http-admin", "port": number, "targetPort": "http-admin", "appProtocol": "http"}


def _account_and_service(
    component: str, plan: InstallPlan, *ports: dict[str, Any], annotations: Mapping[str, str] | None = None
) -> list[Document]:
    """Return a ServiceAccount, whose token is mounted only if the pod template requests it, and a Service."""
    service = {"selector": component_labels(component), "ports": list(ports)}
    return [
        component_object("ServiceAccount", component, plan.namespace, automountServiceAccountToken=False),
        component_object("Service", component, plan.namespace, annotations=annotations, spec=service),
    ]


def _budget(component: str, plan: InstallPlan) -> Document:
    spec = {"maxUnavailable": 1, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": pods_of(component)}
    return component_object("PodDisruptionBudget", component, plan.namespace, spec=spec)


def _picker_deployment(plan: InstallPlan) -> Document:
    settings = {
        "host": "0.0.0.0",
        "grpc_port": str(GRPC_PORT),
        "admin_port": str(PICKER_ADMIN_PORT),
        "drain_seconds": str(plan.drain_seconds),
        "respawn": "true",
        "root_namespace": plan.root_namespace,
    }
    if plan.mode is Mode.INFERENCE_POOL:
        settings["policy"] = REFUSED_WITH_429
    ports = {"grpc": GRPC_PORT, "http-admin": PICKER_ADMIN_PORT}
    container = role_container(
        plan, "extproc", settings=settings, ports=ports, cpu="1", memory="512Mi", redis_user=PICKER_USER
    )
    volumes = role_volumes(plan, redis_user=PICKER_USER)
    if (models := model_volume(plan)) is not None:
        container["env"].append({"name": "KVMESH_TOKENIZERS", "value": MODELS})
        container["volumeMounts"].append({"name": models["name"], "mountPath": MODELS, "readOnly": True})
        volumes += [models, *token_volumes(plan)]
    spec = {  # no `replicas`: the HPA owns them
        "selector": pods_of(PICKER),
        "strategy": ROLLING_UPDATE,
        "minReadySeconds": 5,
        "template": pod_template(
            plan,
            PICKER,
            container=container,
            volumes=volumes,
            grace_seconds=plan.drain_seconds + SETTLE_SECONDS,
            token=True,
            first=fetching_containers(plan),
        ),
    }
    return component_object("Deployment", PICKER, plan.namespace, spec=spec)


def _picker_autoscaler(plan: InstallPlan) -> Document:
    """Scale by the CPU of the picker's container, its bottleneck; the sidecar does not count."""
    cpu = {"name": "cpu", "container": "extproc", "target": {"type": "Utilization", "averageUtilization": BUSY_PERCENT}}
    spec = {
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": PICKER},
        "minReplicas": plan.picker_replicas,
        "maxReplicas": plan.picker_replicas_max,
        "metrics": [{"type": "ContainerResource", "containerResource": cpu}],
        "behavior": {
            "scaleUp": {
                "stabilizationWindowSeconds": 0,
                "policies": [{"type": "Percent", "value": 100, "periodSeconds": 15}],
            },
            # a picker that ends loses its knowledge of recent routes
            "scaleDown": {
                "stabilizationWindowSeconds": 300,
                "policies": [{"type": "Pods", "value": 1, "periodSeconds": 120}],
            },
        },
    }
    return component_object("HorizontalPodAutoscaler", PICKER, plan.namespace, spec=spec)


def _indexer_deployment(plan: InstallPlan) -> Document:
    settings = {"host": "0.0.0.0", "indexer_admin_port": str(INDEXER_ADMIN_PORT)}
    ports = {"http-admin": INDEXER_ADMIN_PORT}
    container = role_container(
        plan, "indexer", settings=settings, ports=ports, cpu="500m", memory="256Mi", redis_user=INDEXER_USER
    )
    spec = {
        "replicas": plan.indexer_replicas,
        "selector": pods_of(INDEXER),
        "strategy": ROLLING_UPDATE,
        "template": pod_template(
            plan,
            INDEXER,
            container=container,
            volumes=role_volumes(plan, redis_user=INDEXER_USER),
            grace_seconds=SETTLE_SECONDS,  # another indexer takes over when its leases expire, after 2 s
            token=True,
        ),
    }
    return component_object("Deployment", INDEXER, plan.namespace, spec=spec)


def _redis_server(plan: InstallPlan) -> Document:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        # find its claims if the cluster does not delete them with the StatefulSet
        "metadata": {"name": "data", "labels": component_labels(REDIS) | OWNED | {INSTALLATION: plan.namespace}},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "volumeMode": "Filesystem",
            "resources": {"requests": {"storage": f"{plan.redis_storage_gib}Gi"}},
        },
        # as stored by the API server: the list is atomic, and with other values it would belong to another manager
        "status": {"phase": "Pending"},
    }
    spec = {
        "replicas": 1,
        "serviceName": REDIS,
        "selector": pods_of(REDIS),
        "template": pod_template(
            plan,
            REDIS,
            container=_redis_container(plan),
            volumes=[{"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}],
            grace_seconds=60,  # flushes its AOF
            token=False,
        ),
        "volumeClaimTemplates": [claim],
        "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
    }
    return component_object("StatefulSet", REDIS, plan.namespace, spec=spec)


def _redis_container(plan: InstallPlan) -> dict[str, Any]:
    ping = {"exec": {"command": PROBE}}
    memory = f"{round(plan.redis_memory_mib * HEADROOM)}Mi"
    return {
        "name": "redis",
        "image": plan.redis_image,
        "args": ["valkey-server", *_redis_arguments(plan), *user_arguments()],
        "env": hash_environment(plan),
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": ping | {"periodSeconds": 2, "failureThreshold": 150},  # loads its AOF
        "readinessProbe": ping | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": ping | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "500m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": LOCKED_DOWN,
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, TMP_MOUNT],
    }


def _redis_arguments(plan: InstallPlan) -> list[str]:
    settings = {
        "port": str(REDIS_PORT),
        "dir": "/data",
        "maxmemory": f"{plan.redis_memory_mib}mb",
        "maxmemory-policy": "noeviction",  # evictions would make the index wrong
        "tracking-table-max-keys": "262144",  # caps memory for keys tracked by pickers: 36 MB, not 137
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
    }
    return [part for name, value in settings.items() for part in (f"--{name}", value)]


def rbac_objects(plan: InstallPlan) -> list[Document]:
    """Return the RBAC objects of picker and indexer, and the pickers' shared Lease.

    Scope mesh: ClusterRoles. Scope namespaced: Roles in the namespaces of the installation and the pools.
    """
    rules = {PICKER: _picker_rules(), INDEXER: _pool_rules()}
    spaces: list[str | None] = [None] if plan.scope is Scope.MESH else [*plan.watched_namespaces]
    readers = [
        each
        for namespace in spaces
        for component in rules
        for each in _role(
            plan,
            component,
            rules[component],
            # installations do not share roles
            name=component if namespace == plan.namespace else f"{component}-{plan.namespace}",
            namespace=namespace,
        )
    ]
    # created here, so that pickers need no right to create Leases and uninstalling removes it
    lease = {
        "apiGroups": ["coordination.k8s.io"],
        "resources": ["leases"],
        "resourceNames": [STATUS_LEASE],
        "verbs": ["get", "update"],
    }
    return [
        *readers,
        kube_object("Lease", STATUS_LEASE, plan.namespace, component=PICKER),
        *_role(plan, PICKER, [lease], name=STATUS_LEASE, namespace=plan.namespace),
    ]


def _pool_rules() -> list[dict[str, Any]]:
    return [
        {"apiGroups": [""], "resources": ["pods", "services"], "verbs": READ},
        {"apiGroups": ["inference.networking.k8s.io"], "resources": ["inferencepools"], "verbs": READ},
        {"apiGroups": ["inference.networking.x-k8s.io"], "resources": ["inferencepoolimports"], "verbs": READ},
    ]


def _picker_rules() -> list[dict[str, Any]]:
    extension = ["inferenceobjectives", "inferencemodelrewrites"]
    return [
        *_pool_rules(),
        {"apiGroups": ["kvmesh.io"], "resources": ["inferencepolicies"], "verbs": READ},
        {"apiGroups": ["kvmesh.io"], "resources": ["inferencepolicies/status"], "verbs": ["get", "update"]},
        {"apiGroups": ["llm-d.ai", "inference.networking.x-k8s.io"], "resources": extension, "verbs": READ},
        {"apiGroups": ["gateway.networking.k8s.io"], "resources": ["gateways", "httproutes"], "verbs": READ},
    ]


def _role(
    plan: InstallPlan, component: str, rules: list[dict[str, Any]], *, name: str, namespace: str | None
) -> list[Document]:
    kind = "ClusterRole" if namespace is None else "Role"
    return [
        kube_object(kind, name, namespace, component=component, rules=rules),
        kube_object(
            f"{kind}Binding",
            name,
            namespace,
            component=component,
            roleRef={"apiGroup": RBAC, "kind": kind, "name": name},
            subjects=[{"kind": "ServiceAccount", "name": component, "namespace": plan.namespace}],
        ),
    ]
