"""From an HTTP request's path and query to what is asked of which resource. Pure; `server` calls it first."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.kube_api.errors import NoSuchPathError, not_allowed
from tests.kube_api.registry import Registry, Resource

_VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to a resource; the verb is what RBAC calls it."""

    resource: Resource
    verb: str
    namespace: str  # "" for all namespaces and for cluster-wide objects
    name: str
    subresource: str
    query: Mapping[str, str]

    @property
    def at(self) -> tuple[str, str]:
        return (self.namespace if self.resource.namespaced else "", self.name)

    def flag(self, name: str) -> bool:
        return self.query.get(name, "").lower() in {"true", "1"}


def parse_call(method: str, path: str, query: Mapping[str, str], registry: Registry) -> Call:
    """/api/v1/namespaces/NS/pods/NAME/status and its shorter forms; raises 404 for what is not served."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] == ["api"] and len(parts) > 2:
        group, version, rest = "", parts[1], parts[2:]
    elif parts[:1] == ["apis"] and len(parts) > 3:
        group, version, rest = parts[1], parts[2], parts[3:]
    else:
        raise NoSuchPathError
    namespace = ""
    if rest[0] == "namespaces" and len(rest) > 2 and registry.find(group, version, rest[2]):
        namespace, rest = rest[1], rest[2:]
    resource = registry.find(group, version, rest[0])
    if resource is None or len(rest) > 3:
        raise NoSuchPathError
    name = rest[1] if len(rest) > 1 else ""
    subresource = rest[2] if len(rest) > 2 else ""
    if bool(namespace) > resource.namespaced:
        raise NoSuchPathError
    verb = _verb(method, name, query)
    if resource.namespaced and not namespace and (name or verb == "create"):
        raise NoSuchPathError if name else not_allowed()
    return Call(resource=resource, verb=verb, namespace=namespace, name=name, subresource=subresource, query=query)


def _verb(method: str, name: str, query: Mapping[str, str]) -> str:
    if method == "GET" and query.get("watch", "").lower() in {"true", "1"}:
        return "watch"
    if method == "GET":
        return "get" if name else "list"
    if method == "DELETE":
        return "delete" if name else "deletecollection"
    verb = _VERBS.get(method, "")
    if not verb or (verb == "create") is bool(name):
        raise not_allowed()
    return verb
