"""Structural schemas at work: unknown fields go, defaults come in. Pure; called by `schemas` before validation."""

import copy
from typing import Any

from tests.kube_api.errors import Document

_META = frozenset({"apiVersion", "kind", "metadata"})


def prune(schema: Document, value: Any, path: str = "", *, root: bool = False) -> tuple[Any, list[str]]:
    """The value without fields that the schema does not know, and the paths of those."""
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        pairs = [prune(schema["items"], item, f"{path}[{index}]") for index, item in enumerate(value)]
        return [item for item, _ in pairs], [unknown for _, found in pairs for unknown in found]
    if not isinstance(value, dict):
        return value, []
    if schema.get("x-kubernetes-embedded-resource"):
        root = True
    kept: Document = {}
    unknown: list[str] = []
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    for name, inner in value.items():
        at = f"{path}.{name}" if path else name
        if root and name in _META:
            kept[name] = inner
        elif name in properties:
            kept[name], found = prune(properties[name], inner, at)
            unknown += found
        elif isinstance(others, dict):
            kept[name], found = prune(others, inner, at)
            unknown += found
        elif others is True or schema.get("x-kubernetes-preserve-unknown-fields"):
            kept[name] = inner
        else:
            unknown.append(at)
    return kept, unknown


def fill_defaults(schema: Document, value: Any) -> Any:
    """The value with the schema's defaults; a null that may not be one counts as absent."""
    if isinstance(value, list) and isinstance(schema.get("items"), dict):
        return [fill_defaults(schema["items"], item) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, inner in schema.get("properties", {}).items():
        if filled.get(name) is None and "default" in inner and not (name in filled and inner.get("nullable")):
            filled[name] = copy.deepcopy(inner["default"])
        elif name in filled and filled[name] is None and not inner.get("nullable"):
            del filled[name]
        if name in filled:
            filled[name] = fill_defaults(inner, filled[name])
    others = schema.get("additionalProperties")
    if isinstance(others, dict):
        known = schema.get("properties", {})
        filled = {name: one if name in known else fill_defaults(others, one) for name, one in filled.items()}
    return filled
