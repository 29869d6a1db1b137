"""`x-kubernetes-validations`: each rule at its place in the schema, over the value and the one before an update.

A rule here has a message and CEL's own functions, as ours have; the others that Kubernetes knows are the real server's.
"""

import functools
import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import cel

from tests.kube_api.cel_names import escaped
from tests.kube_api.errors import Cause, Document
from tests.kube_api.go_durations import parse_duration
from tests.kube_api.schema_validation import child

_NEVER = object()  # no value before: transition rules are not asked


@functools.lru_cache(maxsize=4096)
def compiled(rule: str) -> cel.Program:
    """The parsed rule; raises ValueError where it is no CEL."""
    return cel.compile(rule)


@functools.lru_cache(maxsize=4096)
def is_transition(rule: str) -> bool:
    return "oldSelf" in compiled(rule).variables()


def check_rules(schema: Document, value: Any, old: Any = _NEVER, path: str = "", *, root: bool = True) -> list[Cause]:
    """What the rules of the schema and of all that is below it say about the value."""
    causes = []
    for rule in schema.get("x-kubernetes-validations", ()):
        found = _ask(rule, schema, value, old, path, root=root)
        if found is not None:
            causes.append(found)
    for inner, one, before, at in _below(schema, value, old, path):
        if one is not None:
            causes += check_rules(inner, one, before, at, root=False)
    return causes


def _below(schema: Document, value: Any, old: Any, path: str) -> Iterator[tuple[Document, Any, Any, str]]:
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, one in value.items():
            before = old.get(name, _NEVER) if isinstance(old, dict) else _NEVER
            if name in properties:
                yield properties[name], one, before, child(path, name)
            elif isinstance(others, dict):
                yield others, one, before, child(path, name)
    elif isinstance(value, list) and isinstance(schema.get("items"), dict):
        known = _correlated(schema, old)
        for index, one in enumerate(value):
            yield schema["items"], one, known.get(_identity(schema, one), _NEVER), f"{path}[{index}]"


def _correlated(schema: Document, old: Any) -> dict[str, Any]:
    """Items of a list before the update, by key: only lists of type map can tell which was which."""
    if not isinstance(old, list) or schema.get("x-kubernetes-list-type") != "map":
        return {}
    return {_identity(schema, item): item for item in old}


def _identity(schema: Document, item: Any) -> str:
    keys = schema.get("x-kubernetes-list-map-keys", ())
    return json.dumps([item.get(key) for key in keys] if isinstance(item, dict) else None)


def _ask(rule: Document, schema: Document, value: Any, old: Any, path: str, *, root: bool) -> Cause | None:
    transition = is_transition(rule["rule"])
    if transition and old is _NEVER:
        return None
    variables: Document = {"self": typed(schema, value, root=root)}
    if transition:
        variables["oldSelf"] = typed(schema, old, root=root)
    context = cel.Context(variables)
    kind = schema.get("type", "object")
    try:
        held = compiled(rule["rule"]).execute(context)
    except Exception as problem:  # whatever a rule runs into refuses the object, as in the server
        held, message = False, f"{problem} evaluating rule: {rule['message']}"
    else:
        message = rule["message"]
    return None if held is True else Cause(path or "<nil>", "FieldValueInvalid", f'Invalid value: "{kind}": {message}')


def typed(schema: Document, value: Any, *, root: bool = False) -> Any:
    """The value as CEL sees it: numbers, durations and times as the schema declares, fields under escaped names."""
    if schema.get("x-kubernetes-int-or-string"):
        return value
    if isinstance(value, dict):
        return _typed_object(schema, value, root=root)
    if isinstance(value, list):
        items = schema.get("items")
        return [typed(items, one) for one in value] if isinstance(items, dict) else value
    kind, name = schema.get("type"), schema.get("format")
    if kind == "number" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind == "integer" and isinstance(value, float):
        return int(value)
    if isinstance(value, str) and name == "duration":
        return parse_duration(value) or value
    if isinstance(value, str) and name in {"date-time", "date"}:
        return datetime.fromisoformat(value)
    return value


def _typed_object(schema: Document, value: Document, *, root: bool) -> Document:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    if isinstance(others, dict):
        return {name: typed(others, one) for name, one in value.items()}
    seen = {
        escaped(name): typed(inner, value[name]) for name, inner in properties.items() if value.get(name) is not None
    }
    if root or schema.get("x-kubernetes-embedded-resource"):
        metadata = value.get("metadata") or {}
        named = {name: metadata[name] for name in ("name", "generateName") if name in metadata}
        seen |= {"apiVersion": value.get("apiVersion"), "kind": value.get("kind"), "metadata": named}
    return seen
