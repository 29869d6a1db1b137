"""What the server does with a custom object and its schema: prune, default, validate, ask the CEL rules. Pure."""

from dataclasses import dataclass
from typing import Any

from tests.kube_api.cel_rules import check_rules
from tests.kube_api.errors import Cause, Document
from tests.kube_api.schema_validation import validate
from tests.kube_api.structural import fill_defaults, prune

_NOT_ASKED = Cause(
    "<nil>",
    "FieldValueInvalid",
    'Invalid value: "null": some validation rules were not checked because the object was invalid; correct the '
    "existing errors to complete validation",
)
_NAMED = frozenset({"apiVersion", "kind", "metadata"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The document as it would be stored, the paths that were pruned, and what is wrong (nothing: accepted)."""

    document: Document
    unknown: tuple[str, ...]
    causes: tuple[Cause, ...]


def admit(schema: Document, document: Document, old: Document | None = None) -> Admission:
    """A whole custom object against a version's openAPIV3Schema; `old` is the stored one for updates."""
    pruned, unknown = prune(schema, document, root=True)
    filled = fill_defaults(schema, pruned)
    own = {name: value for name, value in filled.items() if name not in _NAMED}
    causes = validate(_without_metadata(schema), own)
    if causes:
        if _has_rules(schema):
            causes.append(_NOT_ASKED)
    else:
        causes = check_rules(schema, filled) if old is None else check_rules(schema, filled, old)
    return Admission(document=filled, unknown=tuple(unknown), causes=tuple(causes))


def _without_metadata(schema: Document) -> Document:
    """The server itself validates apiVersion, kind and metadata."""
    properties = {name: inner for name, inner in schema.get("properties", {}).items() if name not in _NAMED}
    required = [name for name in schema.get("required", ()) if name not in _NAMED]
    return {**schema, "properties": properties, "required": required}


def _has_rules(schema: Any) -> bool:
    if isinstance(schema, dict):
        return "x-kubernetes-validations" in schema or any(_has_rules(one) for one in schema.values())
    return isinstance(schema, list) and any(_has_rules(one) for one in schema)
