"""Common parts of the pods of picker, indexer and Redis: rights, spreading, probes, settings, Secrets. Pure."""

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from operate.install.objects import INSTALLATION, OWNED, Document, component_labels, kube_object, pods_of
from operate.install.plan import InstallPlan, MeshMembership
from operate.install.redis_access import redis_mounts, redis_url, redis_volumes

USER_ID = 65532  # the image's user; outside the host's range
FIXED_USER = {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
ADMIN_SECRET = "kvmesh-admin-token"  # noqa: S105 - its name
ADMIN_KEY = "token"
ADMIN_FOLDER = "/etc/kvmesh/admin"
POD_KEY_FOLDER, POD_KEY_FILE = "/etc/kvmesh/pods", "key"
POD_FACTS = (("POD_NAME", "metadata.name"), ("POD_NAMESPACE", "metadata.namespace"))  # identity of the lease holder
SETTLE_SECONDS = 15  # for the end after draining: 5 s for open exchanges, then closing connections
MEMBERSHIP_LABELS = {
    MeshMembership.SIDECAR: {"sidecar.istio.io/inject": "true"},
    MeshMembership.AMBIENT: {"istio.io/dataplane-mode": "ambient", "sidecar.istio.io/inject": "false"},
    MeshMembership.NONE: {"istio.io/dataplane-mode": "none", "sidecar.istio.io/inject": "false"},
}
LOCKED_DOWN = {  # security context of all our containers: pod security standard `restricted`
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
TMP_MOUNT = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108 - of the container
# Loading tokenizers may take up to two minutes at the start; liveness is patient.
HTTP_PROBES = {
    "startupProbe": {"httpGet": {"path": "/healthz", "port": "http-admin"}, "periodSeconds": 2, "failureThreshold": 60},
    "readinessProbe": {
        "httpGet": {"path": "/readyz", "port": "http-admin"},
        "periodSeconds": 2,
        "timeoutSeconds": 2,
        "failureThreshold": 3,
    },
    "livenessProbe": {
        "httpGet": {"path": "/healthz", "port": "http-admin"},
        "periodSeconds": 10,
        "timeoutSeconds": 5,
        "failureThreshold": 6,
    },
}


def pod_template(
    plan: InstallPlan,
    component: str,
    *,
    container: Mapping[str, Any],
    volumes: Sequence[Mapping[str, Any]],
    grace_seconds: int,
    token: bool,
    first: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return a pod template with our labels, mesh membership and a locked-down security context.

    `token` mounts a token for the Kubernetes API; `first` are the init containers.
    """
    secrets = plan.image_pull_secrets
    labels = component_labels(component) | OWNED | MEMBERSHIP_LABELS[plan.membership] | revision_label(plan)
    meta: dict[str, Any] = {"labels": labels}
    if plan.membership is MeshMembership.SIDECAR:
        # the proxy starts before the first connection and ends after the last
        proxy = f"{{holdApplicationUntilProxyStarts: true, terminationDrainDuration: {grace_seconds}s}}"
        meta["annotations"] = {"proxy.istio.io/config": proxy}
    return {
        "metadata": meta,
        "spec": {
            "serviceAccountName": component,
            "automountServiceAccountToken": token,
            **({"imagePullSecrets": [{"name": name} for name in secrets]} if secrets else {}),
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": grace_seconds,
            "securityContext": {
                "runAsNonRoot": True,
                **(FIXED_USER if plan.run_as_user else {}),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "topologySpreadConstraints": [
                _spread(component, "kubernetes.io/hostname"),
                _spread(component, "topology.kubernetes.io/zone"),
            ],
            **({"initContainers": list(first)} if first else {}),
            "containers": [container],
            "volumes": list(volumes),
        },
    }


def revision_label(plan: InstallPlan) -> dict[str, str]:
    """Return the label that selects the control plane revision for sidecar injection."""
    return {"istio.io/rev": plan.istio_revision} if plan.istio_revision else {}


def _spread(component: str, key: str) -> dict[str, Any]:
    """Spread the pods if possible; a single node must be enough."""
    return {
        "maxSkew": 1,
        "topologyKey": key,
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": pods_of(component),
    }


def role_container(
    plan: InstallPlan,
    name: str,
    *,
    settings: Mapping[str, str],
    ports: Mapping[str, int],
    cpu: str,
    memory: str,
    redis_user: str,
) -> dict[str, Any]:
    """Return a role's container. No CPU limit: throttling would delay picks.

    Optional settings come last: kustomize overlays patch by index, so indices must not shift.
    """
    environment = {**settings, **_shared_settings(plan, redis_user)}
    if plan.watched_namespaces:
        environment["namespaces"] = ",".join(plan.watched_namespaces)
    if plan.pod_key_secret:
        environment["pod_key_file"] = f"{POD_KEY_FOLDER}/{POD_KEY_FILE}"
    return {
        "name": name,
        **image_of(plan),
        "args": [name],
        "env": [
            *(
                {"name": fact, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}
                for fact, path in POD_FACTS
            ),
            *({"name": f"KVMESH_{key.upper()}", "value": value} for key, value in environment.items()),
        ],
        "ports": [{"name": port, "containerPort": number} for port, number in ports.items()],
        **HTTP_PROBES,
        "resources": {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": "2Gi"}},
        "securityContext": LOCKED_DOWN,
        # whole Secrets, not single files (subPath), so that renewals arrive
        "volumeMounts": [
            TMP_MOUNT,
            {"name": "admin-token", "mountPath": ADMIN_FOLDER, "readOnly": True},
            *redis_mounts(plan),
            *([{"name": "pod-key", "mountPath": POD_KEY_FOLDER, "readOnly": True}] if plan.pod_key_secret else []),
        ],
    }


def image_of(plan: InstallPlan) -> dict[str, Any]:
    """Return image and pull policy of our containers."""
    policy = {"imagePullPolicy": str(plan.image_pull_policy)} if plan.image_pull_policy else {}
    return {"image": plan.image, **policy}


def role_volumes(plan: InstallPlan, *, redis_user: str) -> list[dict[str, Any]]:
    """Return the volumes that `role_container` mounts.

    Without the admin token's Secret the pods run, but the admin pages are closed.
    """
    token = {"secretName": admin_secret_name(plan), "defaultMode": 0o440, "optional": True}
    return [
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
        {"name": "admin-token", "secret": token},
        *redis_volumes(plan, redis_user),
        *_pod_key_volumes(plan),
    ]


def _pod_key_volumes(plan: InstallPlan) -> list[dict[str, Any]]:
    """Return the volume with the pods' key, which exposes no other key of the Secret."""
    if not plan.pod_key_secret:
        return []
    items = [{"key": plan.pod_key_secret_key, "path": POD_KEY_FILE}]
    secret = {"secretName": plan.pod_key_secret, "items": items, "defaultMode": 0o440}
    return [{"name": "pod-key", "secret": secret}]


def admin_secret_name(plan: InstallPlan) -> str:
    """Return the name of the admin token's Secret: ours or the user's."""
    return plan.admin_token_secret or ADMIN_SECRET


def admin_secret(plan: InstallPlan, *, token: str) -> list[Document]:
    """Return the Secret to create if missing, or nothing if the user names one.

    `render` omits it: a file that is applied repeatedly must not hold a token.
    """
    if plan.admin_token_secret:
        return []
    data = {ADMIN_KEY: b64encode(token.encode("ascii")).decode("ascii")}
    mark = {INSTALLATION: plan.namespace}
    return [kube_object("Secret", ADMIN_SECRET, plan.namespace, labels=mark, type="Opaque", data=data)]


def _shared_settings(plan: InstallPlan, redis_user: str) -> dict[str, str]:
    return {
        "kubernetes": "true",
        "redis": redis_url(plan, redis_user),
        "hash_seed": plan.hash_seed,
        "log_format": "json",
        "log_level": plan.log_level,
        "admin_token_file": f"{ADMIN_FOLDER}/{ADMIN_KEY}",
        "token_file": f"{ADMIN_FOLDER}/{ADMIN_KEY}",  # for clients: `kubectl exec … -- kvmesh doctor`
    }
