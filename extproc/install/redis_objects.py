"""The bundled Redis: one server with a disk. Pure; used by `render`.

It may be lost: the index is rebuilt from the pods' replay buffers, everything else in it lives for minutes. The disk
only makes that rare.
"""

from typing import Any

from extproc.install.labels import INSTALLATION, OWNED, account_object, component_labels, object_meta, service_object
from extproc.install.plan import REDIS, InstallPlan, RedisKind
from extproc.install.pod_parts import REDIS_PORT, locked_down, pod_template

HEADROOM = 1.6  # of memory above the data: the copy-on-write of rewriting the log, buffers of clients


def redis_objects(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the bundled server's objects, or none where Redis is somebody else's."""
    if plan.redis is not RedisKind.BUNDLED:
        return []
    return [account_object(REDIS, plan.namespace), _service(plan), _server(plan)]


def _service(plan: InstallPlan) -> dict[str, Any]:
    # "tcp-": a port called redis would put Envoy's Redis proxy in between where that is switched on
    port = {"name": "tcp-redis", "port": REDIS_PORT, "targetPort": "redis", "appProtocol": "tcp"}
    return service_object(REDIS, plan.namespace, port)


def _server(plan: InstallPlan) -> dict[str, Any]:
    template = pod_template(
        plan,
        REDIS,
        {
            "containers": [_container(plan)],
            "volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "16Mi"}}],
        },
        grace_seconds=60,  # it writes its log to disk
        token=False,
    )
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": object_meta(REDIS, plan.namespace, component=REDIS),
        "spec": {
            "replicas": 1,
            "serviceName": REDIS,
            "selector": {"matchLabels": component_labels(REDIS)},
            "template": template,
            "volumeClaimTemplates": [_claim(plan)],
            "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Delete", "whenScaled": "Retain"},
        },
    }


def _claim(plan: InstallPlan) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        # what the claims made of it are found by, where the cluster does not delete them with the server
        "metadata": {"name": "data", "labels": component_labels(REDIS) | OWNED | {INSTALLATION: plan.namespace}},
        "spec": {
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{plan.redis_storage_gib}Gi"}},
        },
    }


def _container(plan: InstallPlan) -> dict[str, Any]:
    ping = {"exec": {"command": ["valkey-cli", "-p", str(REDIS_PORT), "ping"]}}
    memory = f"{round(plan.redis_memory_mib * HEADROOM)}Mi"
    container: dict[str, Any] = {
        "name": "redis",
        "image": plan.redis_image,
        "args": ["valkey-server", *_arguments(plan)],
        "ports": [{"name": "redis", "containerPort": REDIS_PORT}],
        "startupProbe": ping | {"periodSeconds": 2, "failureThreshold": 150},  # it reads its log first
        "readinessProbe": ping | {"periodSeconds": 5, "timeoutSeconds": 3},
        "livenessProbe": ping | {"periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
        "resources": {"requests": {"cpu": "500m", "memory": memory}, "limits": {"memory": memory}},
        "securityContext": locked_down(),
        "volumeMounts": [
            {"name": "data", "mountPath": "/data"},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the container
        ],
    }
    if plan.redis_password_secret:
        secret = {"secretKeyRef": {"name": plan.redis_password_secret, "key": "password"}}
        container["env"] = [{"name": name, "valueFrom": secret} for name in ("REDIS_PASSWORD", "REDISCLI_AUTH")]
    return container


def _arguments(plan: InstallPlan) -> list[str]:
    settings = {
        "port": str(REDIS_PORT),
        "dir": "/data",
        "protected-mode": "no",  # the mesh and the network policy say who may connect
        "maxmemory": f"{plan.redis_memory_mib}mb",
        "maxmemory-policy": "noeviction",  # evicted keys would make the index lie
        "tracking-table-max-keys": "262144",  # what pickers had it track stays in its memory: 36 MB, not 137
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
    }
    if plan.redis_password_secret:
        settings["requirepass"] = "$(REDIS_PASSWORD)"
    return [part for name, value in settings.items() for part in (f"--{name}", value)]
