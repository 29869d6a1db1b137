"""What the status of one document should say. Values; computed by who understands the document, written by a leader."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvmesh.documents.documents import Document, DocumentKey

OUR_CONDITIONS = frozenset({"Accepted", "Conflicted", "Overridden", "Warning"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusUpdate:
    """The wished status of one document."""

    key: DocumentKey
    uid: str  # of the document that was judged; "" if unknown
    generation: int  # of its spec; 0 if unknown
    status: Mapping[str, Any]  # fields that are replaced, others stay; `conditions` are all of ours
    own_conditions: frozenset[str] = OUR_CONDITIONS  # conditions of other types are somebody else's and stay


def status_to_write(current: Document, update: StatusUpdate) -> dict[str, Any] | None:
    """Return the whole status to write over `current`, or None: it says so already, or another document was judged."""
    metadata = current.get("metadata") or {}
    if update.uid and metadata.get("uid") != update.uid:
        return None
    if update.generation and metadata.get("generation", update.generation) != update.generation:
        return None  # the spec is newer than the judgement; a better one is on its way
    before = current.get("status") or {}
    wished = {**before, **update.status}
    if "conditions" in update.status:
        others = [each for each in before.get("conditions") or () if each.get("type") not in update.own_conditions]
        wished["conditions"] = [*update.status["conditions"], *others]
    return None if _comparable(wished) == _comparable(before) else wished


def _comparable(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a status whose conditions have no order, as the API sees them."""
    conditions = status.get("conditions") or ()
    return {**status, "conditions": {each.get("type"): each for each in conditions}}
