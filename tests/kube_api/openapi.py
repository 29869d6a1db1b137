"""OpenAPI v3, as far as kubectl reads it: which kinds there are, their schemas, that fields are validated."""

from typing import Any

from tests.kube_api.errors import Document
from tests.kube_api.registry import Registry, Resource

_OBJECT: Document = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_PARAMETERS = [
    {"name": name, "in": "query", "schema": {"type": kind, "uniqueItems": True}}
    for name, kind in (
        ("dryRun", "string"),
        ("fieldManager", "string"),
        ("fieldValidation", "string"),
        ("force", "boolean"),
    )
]


def openapi(path: str, registry: Registry) -> Document | None:
    """The document at an OpenAPI path; None for all other paths."""
    path = path.strip("/")
    if path == "openapi/v3":
        served = dict.fromkeys(_group_path(one) for one in registry)
        return {"paths": {group: {"serverRelativeURL": f"/openapi/v3/{group}?hash=0"} for group in served}}
    if not path.startswith("openapi/v3/"):
        return None
    listed = [one for one in registry if f"openapi/v3/{_group_path(one)}" == path]
    return _document(listed) if listed else None


def _group_path(resource: Resource) -> str:
    return f"apis/{resource.api_version}" if resource.group else f"api/{resource.version}"


def _document(listed: list[Resource]) -> Document:
    paths: Document = {}
    schemas: Document = {}
    for one in listed:
        kind = {"group": one.group, "version": one.version, "kind": one.kind}
        name = ".".join([*reversed(one.group.split(".")), one.version, one.kind]).lstrip(".")
        schemas[name] = {**(one.schema or _OBJECT), "x-kubernetes-group-version-kind": [kind]}
        scope = "/namespaces/{namespace}" if one.namespaced else ""
        content: Any = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
        responses = {"200": {"description": "OK", "content": content}}
        for verb, action in (("get", "get"), ("put", "put"), ("patch", "patch")):
            operation: Document = {
                "x-kubernetes-action": action,
                "x-kubernetes-group-version-kind": kind,
                "responses": responses,
            }
            if verb != "get":
                operation["parameters"] = _PARAMETERS
            paths.setdefault(f"/{_group_path(one)}{scope}/{one.plural}/{{name}}", {})[verb] = operation
    info = {"title": "Kubernetes", "version": "v1.34.0"}
    return {"openapi": "3.0.0", "info": info, "paths": paths, "components": {"schemas": schemas}}
