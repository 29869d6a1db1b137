"""What the real server fills into built-in objects, as far as discovery and controllers read it. Pure."""

from typing import Any

from tests.kube_api.errors import Document


def fill_built_in(kind: str, document: Document) -> Document:
    """The document with its defaults; called for each write of a built-in kind."""
    fill = _FILL.get(kind)
    if fill is not None:
        fill(document)
    return document


def _namespace(document: Document) -> None:
    document.setdefault("spec", {"finalizers": ["kubernetes"]})
    document.setdefault("status", {}).setdefault("phase", "Active")
    document["metadata"].setdefault("labels", {})["kubernetes.io/metadata.name"] = document["metadata"]["name"]


def _pod(document: Document) -> None:
    _pod_spec(document.setdefault("spec", {}))
    document.setdefault("status", {}).setdefault("phase", "Pending")


def _pod_spec(spec: dict[str, Any]) -> None:
    defaults: dict[str, Any] = {
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": 30,
        "dnsPolicy": "ClusterFirst",
        "schedulerName": "default-scheduler",
    }
    for name, value in defaults.items():
        spec.setdefault(name, value)
    for container in spec.get("containers", ()):
        for port in container.get("ports", ()):
            port.setdefault("protocol", "TCP")
            if spec.get("hostNetwork"):
                port.setdefault("hostPort", port["containerPort"])
        for variable in container.get("env", ()):
            if field := variable.get("valueFrom", {}).get("fieldRef"):
                field.setdefault("apiVersion", "v1")


def _service(document: Document) -> None:
    spec = document.setdefault("spec", {})
    spec.setdefault("type", "ClusterIP")
    spec.setdefault("sessionAffinity", "None")
    for port in spec.get("ports", ()):
        port.setdefault("protocol", "TCP")
        if spec.get("clusterIP") != "None":
            port.setdefault("targetPort", port["port"])
        port.setdefault("targetPort", port["port"])


def _deployment(document: Document) -> None:
    spec = document.setdefault("spec", {})
    spec.setdefault("replicas", 1)
    _pod_spec(spec.setdefault("template", {}).setdefault("spec", {}))


def _stateful_set(document: Document) -> None:
    _deployment(document)
    for claim in document["spec"].get("volumeClaimTemplates", ()):
        claim["spec"].setdefault("volumeMode", "Filesystem")
        claim["status"] = {"phase": "Pending"}


_FILL = {
    "Namespace": _namespace,
    "Pod": _pod,
    "Service": _service,
    "Deployment": _deployment,
    "StatefulSet": _stateful_set,
}
