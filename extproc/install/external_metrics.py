"""What has the API server ask the pickers for external metrics: an APIService, its Service, and a right. Pure.

The right is to read whose client certificates the API server hands requests on with. Nothing else may ask.
"""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from extproc.errors import ConfigError
from extproc.install.objects import (
    EXPORT_TO,
    INSTALLATION,
    Document,
    component_labels,
    kube_object,
)
from extproc.install.plan import CLUSTER_DOMAIN, EXTERNAL_METRICS_PORT, PICKER, InstallPlan, Scope

GROUP, VERSION = "external.metrics.k8s.io", "v1beta1"
# who may read whom the API server lets hand requests on: a Role of every cluster
READER_NAMESPACE, READER_ROLE = "kube-system", "extension-apiserver-authentication-reader"
NAME = "kvmesh-external-metrics"  # the Service, the right, and the Secret that is made; as a component, too
API_SERVICE_NAME = f"{VERSION}.{GROUP}"
PORT_NAME = "metrics-api"
VOLUME, FOLDER = "external-metrics", "/etc/kvmesh/external-metrics"
CERT, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"
RBAC = "rbac.authorization.k8s.io"


def external_metrics_objects(plan: InstallPlan) -> list[Document]:
    """Return the objects, or nothing where the API is not wanted. The APIService comes last."""
    if not plan.external_metrics:
        return []
    port = {"name": "https-metrics", "port": 443, "targetPort": PORT_NAME, "appProtocol": "https"}
    service = {"selector": component_labels(PICKER), "ports": [port]}
    subject = {"kind": "ServiceAccount", "name": PICKER, "namespace": plan.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": READER_ROLE}
    return [
        kube_object("RoleBinding", NAME, READER_NAMESPACE, component=NAME, roleRef=role, subjects=[subject]),
        # no proxy has to know it
        kube_object("Service", NAME, plan.namespace, component=NAME, annotations={EXPORT_TO: "."}, spec=service),
        kube_object("APIService", API_SERVICE_NAME, None, component=NAME, spec=_api_service(plan)),
    ]


def _api_service(plan: InstallPlan) -> dict[str, Any]:
    return {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"namespace": plan.namespace, "name": NAME, "port": 443},
        **({"caBundle": plan.external_metrics_ca} if plan.external_metrics_ca else {}),
    }


def check_external_metrics(plan: InstallPlan) -> None:
    """Raise ConfigError where it cannot be served as it is wanted."""
    if plan.external_metrics_secret and not plan.external_metrics:
        raise ConfigError("--external-metrics-secret: is for --external-metrics, which is missing")
    if plan.external_metrics and plan.scope is Scope.NAMESPACED:
        raise ConfigError(
            "--external-metrics: the API is the whole cluster's, and --scope namespaced asks for no rights in it. "
            "KEDA's external scaler and the metrics work there (docs/guides/autoscaling.md)"
        )


def secret_name(plan: InstallPlan) -> str:
    """Return the Secret with the certificate of the port."""
    return plan.external_metrics_secret or NAME


def server_names(plan: InstallPlan) -> list[str]:
    """Return the names that its certificate has to have; the API server compares the first."""
    return [f"{NAME}.{plan.namespace}.svc", f"{NAME}.{plan.namespace}.svc.{CLUSTER_DOMAIN}"]


def serving_secret(plan: InstallPlan, *, cert: bytes, key: bytes) -> Document:
    """Return the Secret with a certificate that signs itself, to be made where there is none."""
    data = {name: b64encode(content).decode("ascii") for name, content in ((AUTHORITY, cert), (CERT, cert), (KEY, key))}
    mark = {INSTALLATION: plan.namespace}
    return kube_object("Secret", NAME, plan.namespace, labels=mark, type="kubernetes.io/tls", data=data)


def add_to_container(plan: InstallPlan, container: dict[str, Any], volumes: list[dict[str, Any]]) -> None:
    """Have the picker serve the API. Without the Secret it runs, and goes on looking for it."""
    if not plan.external_metrics:
        return
    settings: Mapping[str, str] = {
        "EXTERNAL_METRICS_PORT": str(EXTERNAL_METRICS_PORT),
        "EXTERNAL_METRICS_CERT": f"{FOLDER}/{CERT}",
        "EXTERNAL_METRICS_KEY": f"{FOLDER}/{KEY}",
    }
    container["env"] += [{"name": f"KVMESH_{name}", "value": value} for name, value in settings.items()]
    container["ports"].append({"name": PORT_NAME, "containerPort": EXTERNAL_METRICS_PORT})
    container["volumeMounts"].append({"name": VOLUME, "mountPath": FOLDER, "readOnly": True})
    secret = {"secretName": secret_name(plan), "defaultMode": 0o440, "optional": True}
    volumes.append({"name": VOLUME, "secret": secret})
