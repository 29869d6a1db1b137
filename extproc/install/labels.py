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
