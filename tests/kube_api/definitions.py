"""CustomResourceDefinitions: the status of one that is taken. What makes one acceptable a real API server says."""

from tests.kube_api.errors import Document


def accept_definition(document: Document, timestamp: str) -> Document:
    """The definition with its names filled in and its status as after the server's controllers have seen it."""
    spec = document["spec"]
    names = spec["names"]
    names.setdefault("singular", names["kind"].lower())
    names.setdefault("listKind", names["kind"] + "List")
    spec.setdefault("conversion", {"strategy": "None"})
    storage = next(version["name"] for version in spec["versions"] if version.get("storage"))
    for version in spec["versions"]:
        for column in version.get("additionalPrinterColumns", ()):
            if column.get("priority") == 0:
                del column["priority"]  # not stored, so that an applied 0 is a conflict for ever
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
