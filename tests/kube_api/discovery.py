"""What clients read to learn which kinds a group's version has: /api/v1 and /apis/GROUP/VERSION. Pure."""

from tests.kube_api.errors import Document
from tests.kube_api.registry import Registry, Resource

_VERBS = ("create", "delete", "deletecollection", "get", "list", "patch", "update", "watch")


def discovery(path: str, registry: Registry) -> Document | None:
    """The document at such a path; None for all other paths, and for a group or version that is not served."""
    listed = [one for one in registry if path == f"/{'apis' if one.group else 'api'}/{one.api_version}"]
    if not listed:
        return None
    rows = [row for one in listed for row in _rows(one)]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": listed[0].api_version,
        "resources": rows,
    }


def _rows(resource: Resource) -> list[Document]:
    shared = {"namespaced": resource.namespaced, "kind": resource.kind}
    row = {"name": resource.plural, "singularName": resource.kind.lower(), **shared, "verbs": list(_VERBS)}
    status = {"name": f"{resource.plural}/status", "singularName": "", **shared, "verbs": ["get", "patch", "update"]}
    return [row, status] if resource.status else [row]
