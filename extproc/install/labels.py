"""Names and labels of everything that is installed: by these labels `kvmesh uninstall` finds it again. Pure."""

from typing import Any

MANAGED_BY = "app.kubernetes.io/managed-by"
PART_OF = "app.kubernetes.io/part-of"
NAME = "app.kubernetes.io/name"
OWNER = "kvmesh-install"
INSTALLATION = "kvmesh.io/installation"  # its namespace: a cluster may have several
OWNED = {PART_OF: "kvmesh", MANAGED_BY: OWNER}


def object_meta(name: str, namespace: str | None, *, component: str | None = None) -> dict[str, Any]:
    """Return metadata with our labels; `namespace` is None for what belongs to the whole cluster."""
    meta: dict[str, Any] = {"name": name}
    if namespace is not None:
        meta["namespace"] = namespace
    meta["labels"] = component_labels(component) | OWNED if component else dict(OWNED)
    return meta


def component_labels(component: str) -> dict[str, str]:
    """Return what a component's pods are selected by; never changed, selectors of Deployments cannot be."""
    return {NAME: component, PART_OF: "kvmesh"}


def account_object(component: str, namespace: str) -> dict[str, Any]:
    """Return a component's ServiceAccount; no pod gets its token unless the pod's template asks for it."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": object_meta(component, namespace, component=component),
        "automountServiceAccountToken": False,
    }


def service_object(component: str, namespace: str, *ports: dict[str, Any]) -> dict[str, Any]:
    """Return the Service in front of a component's pods."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_meta(component, namespace, component=component),
        "spec": {"selector": component_labels(component), "ports": list(ports)},
    }
