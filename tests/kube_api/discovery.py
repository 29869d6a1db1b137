"""What clients read to learn which resources exist: /version, /api, /apis and what is below them. Pure."""

from tests.kube_api.errors import Document
from tests.kube_api.registry import VERBS, Registry, Resource

VERSION: Document = {
    "major": "1",
    "minor": "34",
    "gitVersion": "v1.34.0",
    "gitCommit": "0" * 40,
    "gitTreeState": "clean",
    "buildDate": "2025-08-27T10:19:03Z",
    "goVersion": "go1.24.6",
    "compiler": "gc",
    "platform": "linux/amd64",
}


def discovery(path: str, registry: Registry) -> Document | None:
    """The document at a discovery path; None for all other paths."""
    parts = tuple(part for part in path.split("/") if part)
    if parts == ("version",):
        return VERSION
    if parts == ("api",):
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if parts == ("apis",):
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [_group(name, registry) for name in registry.groups()],
        }
    if len(parts) == 2 and parts[0] == "apis" and parts[1] in registry.groups():
        return {"kind": "APIGroup", "apiVersion": "v1", **_group(parts[1], registry)}
    if len(parts) == 2 and parts[0] == "api":
        return _resources("", parts[1], registry)
    if len(parts) == 3 and parts[0] == "apis":
        return _resources(parts[1], parts[2], registry)
    return None


def _group(name: str, registry: Registry) -> Document:
    versions = [{"groupVersion": f"{name}/{version}", "version": version} for version in registry.versions(name)]
    return {"name": name, "versions": versions, "preferredVersion": versions[0]}


def _resources(group: str, version: str, registry: Registry) -> Document | None:
    listed = [one for one in registry if (one.group, one.version) == (group, version)]
    if not listed:
        return None
    rows = [row for one in listed for row in _rows(one)]
    api_version = f"{group}/{version}" if group else version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": api_version, "resources": rows}


def _rows(resource: Resource) -> list[Document]:
    row: Document = {
        "name": resource.plural,
        "singularName": resource.kind.lower(),
        "namespaced": resource.namespaced,
        "kind": resource.kind,
        "verbs": list(VERBS),
    }
    if resource.short_names:
        row["shortNames"] = list(resource.short_names)
    if resource.categories:
        row["categories"] = list(resource.categories)
    rows = [row]
    if resource.status:
        rows.append(
            {
                "name": f"{resource.plural}/status",
                "singularName": "",
                "namespaced": resource.namespaced,
                "kind": resource.kind,
                "verbs": ["get", "patch", "update"],
            }
        )
    return rows
