"""CustomResourceDefinitions: their names and versions, and the status of an accepted one.

Whether a schema is structural and its rules compile is for the real server to say (tests/mesh/test_definitions.py).
"""

from collections.abc import Iterator
from typing import Any

from tests.kube_api.errors import Cause, Document, invalid

_GROUP = "apiextensions.k8s.io"


def accept_definition(document: Document, timestamp: str) -> Document:
    """The definition with its names filled in and its status as after the server's controllers have seen it."""
    causes = list(_causes(document))
    if causes:
        raise invalid(_GROUP, "CustomResourceDefinition", document["metadata"]["name"], causes)
    spec = document["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec.setdefault("conversion", {"strategy": "None"})
    for column in (one for version in spec["versions"] for one in version.get("additionalPrinterColumns", ())):
        if column.get("priority") == 0:
            del column["priority"]  # Go leaves out what is zero
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    known = document.get("status") or {}
    conditions = known.get("conditions") or [
        _condition("NamesAccepted", "NoConflicts", "no conflicts found", timestamp),
        _condition("Established", "InitialNamesAccepted", "the initial names have been accepted", timestamp),
    ]
    stored = list(dict.fromkeys([*known.get("storedVersions", ()), storage]))
    document["status"] = {"acceptedNames": names, "conditions": conditions, "storedVersions": stored}
    return document


def _condition(kind: str, reason: str, message: str, timestamp: str) -> Document:
    return {"type": kind, "status": "True", "reason": reason, "message": message, "lastTransitionTime": timestamp}


def _causes(document: Document) -> Iterator[Cause]:
    spec: Any = document.get("spec") or {}
    names = spec.get("names") or {}
    for path, value in (("spec.group", spec.get("group")), ("spec.names.plural", names.get("plural"))):
        if not value:
            yield Cause(path, "FieldValueRequired", "Required value")
    if not names.get("kind"):
        yield Cause("spec.names.kind", "FieldValueRequired", "Required value")
    if spec.get("scope") not in {"Cluster", "Namespaced"}:
        shown = f'Unsupported value: "{spec.get("scope", "")}": supported values: "Cluster", "Namespaced"'
        yield Cause("spec.scope", "FieldValueNotSupported", shown)
    name = document["metadata"]["name"]
    if name != f"{names.get('plural')}.{spec.get('group')}":
        text = f'Invalid value: "{name}": must be spec.names.plural+"."+spec.group'
        yield Cause("metadata.name", "FieldValueInvalid", text)
    versions = spec.get("versions") or []
    if sum(bool(version.get("storage")) for version in versions) != 1:
        text = "Invalid value: must have exactly one version marked as storage version"
        yield Cause("spec.versions", "FieldValueInvalid", text)
