"""Parts that the pods of picker, indexer and Redis have in common: rights, spreading, probes, settings. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from extproc.install.admin_token import token_mount, token_settings, token_volume
from extproc.install.labels import OWNED, component_labels
from extproc.install.plan import REDIS, InstallPlan, MeshMembership, RedisKind

USER_ID = 65532  # of the image; not in the host's range
REDIS_PORT = 6379
SECRETS = "/etc/kvmesh/redis"
POD_FACTS = (("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"))  # who holds the lease, and where
SETTLE_SECONDS = 15  # to end once drained: 5 s for open exchanges, and to close its connections


def pod_template(
    plan: InstallPlan, component: str, spec: Mapping[str, Any], *, grace_seconds: int, token: bool
) -> dict[str, Any]:
    """Return a pod template: our labels, its place in the mesh, and a pod that may nothing."""
    meta: dict[str, Any] = {"labels": component_labels(component) | OWNED | _membership_labels(plan)}
    if plan.membership is MeshMembership.SIDECAR:
        # the proxy is there before the first connection and stays until the last one has ended
        proxy = f"{{holdApplicationUntilProxyStarts: true, terminationDrainDuration: {grace_seconds}s}}"
        meta["annotations"] = {"proxy.istio.io/config": proxy}
    return {
        "metadata": meta,
        "spec": {
            "serviceAccountName": component,
            "automountServiceAccountToken": token,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": USER_ID,
                "runAsGroup": USER_ID,
                "fsGroup": USER_ID,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                _spread(component, "kubernetes.io/hostname"),
                _spread(component, "topology.kubernetes.io/zone"),
            ],
            **spec,
        },
    }


def _membership_labels(plan: InstallPlan) -> dict[str, str]:
    match plan.membership:
        case MeshMembership.SIDECAR:
            return {"sidecar.istio.io/inject": "true"}
        case MeshMembership.AMBIENT:
            return {"istio.io/dataplane-mode": "ambient", "sidecar.istio.io/inject": "false"}
        case MeshMembership.NONE:
            return {"istio.io/dataplane-mode": "none", "sidecar.istio.io/inject": "false"}


def _spread(component: str, key: str) -> dict[str, Any]:
    """Spread where possible: a cluster of one node must do, too."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": component_labels(component)},
    }


def locked_down() -> dict[str, Any]:
    """Return the security context of every container of ours (the pod standard `restricted`)."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def http_probes(port: str) -> dict[str, Any]:
    """Return the probes of a role. It may take two minutes to begin, reading tokenizers; liveness is patient."""
    return {
        "startupProbe": {"httpGet": {"path": "/healthz", "port": port}, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {
            "httpGet": {"path": "/readyz", "port": port},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/healthz", "port": port},
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
    }


def role_container(
    plan: InstallPlan,
    name: str,
    *,
    settings: Mapping[str, str],
    namespaces: Sequence[str],
    ports: list[dict[str, Any]],
    cpu: str,
    memory: str,
) -> dict[str, Any]:
    """Return the container of a role of the image. No CPU limit: it would hold back the very picks that are due.

    Settings that some installations lack come last: overlays patch by place, and must not move each other's.
    """
    environment = {**settings, **_shared_settings(plan)}
    if namespaces:
        environment["namespaces"] = ",".join(namespaces)
    environment |= _redis_settings(plan)
    return {
        "name": name,
        "image": plan.image,
        "args": [name],
        "env": [
            *(_field(*each) for each in POD_FACTS),
            *({"name": f"KVMESH_{key.upper()}", "value": value} for key, value in environment.items()),
        ],
        "ports": ports,
        **http_probes("http-admin"),
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": "2Gi"}},
        "securityContext": locked_down(),
        "volumeMounts": [
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108 - of the container
            token_mount(),
            *_redis_mounts(plan),
        ],
    }


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def role_volumes(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the volumes that `role_container` mounts."""
    return [{"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}}, token_volume(plan), *_redis_volumes(plan)]


def redis_url(plan: InstallPlan) -> str:
    """Return where Redis is."""
    if plan.redis is RedisKind.BUNDLED or plan.redis_url is None:
        return f"redis://{REDIS}.{plan.namespace}.svc:{REDIS_PORT}/0"
    return plan.redis_url


def _shared_settings(plan: InstallPlan) -> dict[str, str]:
    return {
        "kubernetes": "true",
        "redis": redis_url(plan),
        "hash_seed": plan.hash_seed,
        "log_format": "json",
        "log_level": plan.log_level,
        **token_settings(),
    }


def _redis_settings(plan: InstallPlan) -> dict[str, str]:
    settings = {"redis_username": plan.redis_username} if plan.redis_username else {}
    for part, _, files in _redis_secrets(plan):
        settings |= {setting: f"{SECRETS}/{part}/{file}" for setting, file in files.items()}
    return settings


def _redis_secrets(plan: InstallPlan) -> list[tuple[str, str, dict[str, str]]]:
    """Return which Secrets are mounted, under which name, and which setting each of their files is for."""
    secrets = [
        ("password", plan.redis_password_secret, {"redis_password_file": "password"}),
        ("sentinel", plan.redis_sentinel_password_secret, {"redis_sentinel_password_file": "password"}),
        ("ca", plan.redis_ca_secret, {"redis_ca_file": "ca.crt"}),
        ("tls", plan.redis_tls_secret, {"redis_cert_file": "tls.crt", "redis_key_file": "tls.key"}),
    ]
    return [(part, secret, files) for part, secret, files in secrets if secret]


def _redis_mounts(plan: InstallPlan) -> list[dict[str, Any]]:
    """Mount whole Secrets, not single files: what is renewed there must arrive."""
    return [
        {"name": f"redis-{part}", "mountPath": f"{SECRETS}/{part}", "readOnly": True}
        for part, _, _ in _redis_secrets(plan)
    ]


def _redis_volumes(plan: InstallPlan) -> list[dict[str, Any]]:
    return [
        {"name": f"redis-{part}", "secret": {"secretName": secret, "defaultMode": 0o440}}
        for part, secret, _ in _redis_secrets(plan)
    ]
