"""Tables: what `kubectl get` asks for instead of objects. Columns of a CRD, or name and age. Pure."""

import re
from datetime import datetime
from typing import Any

from tests.kube_api.errors import Document
from tests.kube_api.registry import Column, Resource

_STEP = re.compile(
    r"\.?([A-Za-z0-9_\-]+)|\['([^']+)'\]|\[(\d+)\]|\[\?\(@\.([A-Za-z0-9_.]+)\s*==\s*[\"']([^\"']*)[\"']\)\]|\[\*\]"
)

_OWN: dict[str, tuple[Column, ...]] = {
    "Pod": (
        Column(name="Status", type="string", path=".status.phase"),
        Column(name="IP", type="string", path=".status.podIP", priority=1),
    ),
    "Namespace": (Column(name="Status", type="string", path=".status.phase"),),
    "Service": (Column(name="Type", type="string", path=".spec.type"),),
    "Lease": (Column(name="Holder", type="string", path=".spec.holderIdentity"),),
    "CustomResourceDefinition": (Column(name="Created At", type="date", path=".metadata.creationTimestamp"),),
}
_AGE = Column(name="Age", type="date", path=".metadata.creationTimestamp")


def json_path(document: Any, path: str) -> list[Any]:
    """The values at a printer column's path: fields, indexes, [*] and [?(@.a=="b")]."""
    path = path.replace("\\.", "\x00")
    values, position = [document], 0
    while position < len(path):
        found = _STEP.match(path, position)
        if not found:
            return []
        values = [one for value in values for one in _step(value, found)]
        position = found.end()
    return values


def _step(value: Any, found: re.Match[str]) -> list[Any]:
    name = (found[1] or found[2] or "").replace("\x00", ".")
    if name:
        return [value[name]] if isinstance(value, dict) and name in value else []
    if not isinstance(value, list):
        return []
    if found[3]:
        return value[int(found[3]) : int(found[3]) + 1]
    if found[4]:
        return [one for one in value if [str(inner) for inner in json_path(one, "." + found[4])] == [found[5]]]
    return value


def table(
    resource: Resource, documents: list[Document], metadata: Document, now: datetime, *, include: str
) -> Document:
    """The Table; `include` is the query's includeObject: None, Metadata or Object."""
    columns = resource.columns if resource.custom else (*_OWN.get(resource.kind, ()), _AGE)
    columns = columns or (_AGE,)
    rows = [
        {"cells": [one["metadata"]["name"], *(_cell(one, column, now) for column in columns)], **_object(one, include)}
        for one in documents
    ]
    heads = [{"name": "Name", "type": "string", "format": "name", "description": "", "priority": 0}]
    heads += [
        {"name": one.name, "type": one.type, "format": "", "description": "", "priority": one.priority}
        for one in columns
    ]
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": metadata,
        "columnDefinitions": heads,
        "rows": rows,
    }


def _object(document: Document, include: str) -> Document:
    if include == "None":
        return {}
    if include == "Object":
        return {"object": document}
    named = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1"}
    return {"object": {**named, "metadata": document["metadata"]}}


def _cell(document: Document, column: Column, now: datetime) -> Any:
    values = json_path(document, column.path)
    if not values:
        return "<unknown>" if column.type == "date" and column.path == _AGE.path else None
    if column.type == "date":
        return age(str(values[0]), now)
    if column.type in {"integer", "number", "boolean"}:
        return values[0]
    return ",".join(one if isinstance(one, str) else str(one) for one in values)


def age(timestamp: str, now: datetime) -> str:
    """How long ago, as kubectl shows it: 12s, 5m, 3h, 2d."""
    seconds = int((now - datetime.fromisoformat(timestamp)).total_seconds())
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s" if seconds >= 0 else "<invalid>"
