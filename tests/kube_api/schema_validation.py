"""A value against a structural schema: every wrong field, in the words of the real server. Pure; without CEL."""

import json
import math
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from tests.kube_api.errors import Cause, Document
from tests.kube_api.go_durations import parse_duration

_NAMES: dict[type, str] = {
    dict: "object",
    list: "array",
    str: "string",
    bool: "boolean",
    int: "integer",
    float: "number",
}
_RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


def validate(schema: Document, value: Any, path: str = "") -> list[Cause]:
    """What is wrong with the value; paths as in `spec.ports[0].number`, map keys as in `spec.labels[a.b/c]`."""
    if value is None:
        return [] if schema.get("nullable") else [_type_error(schema.get("type", "object"), value, path)]
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            return [_type_error("integer,string", value, path)]
    elif "type" in schema and not _has_type(value, schema["type"]):
        return [_type_error(schema["type"], value, path)]
    causes = _enumerated(schema, value, path)
    if isinstance(value, dict):
        causes += _object(schema, value, path)
    elif isinstance(value, list):
        causes += _array(schema, value, path)
    elif isinstance(value, str):
        causes += _string(schema, value, path)
    elif not isinstance(value, bool):
        causes += _number(schema, value, path)
    return causes + _combined(schema, value, path)


def child(path: str, name: str, *, key: bool = False) -> str:
    if key:
        return f"{path}[{name}]"
    return f"{path}.{name}" if path else name


def _invalid(path: str, value: Any, message: str) -> Cause:
    return Cause(path or "<nil>", "FieldValueInvalid", f"Invalid value: {shown(value)}: {message}")


def _type_error(expected: str, value: Any, path: str) -> Cause:
    name = "null" if value is None else _NAMES.get(type(value), "object")
    message = f'{path} in body must be of type {expected}: "{name}"'
    return Cause(path or "<nil>", "FieldValueTypeInvalid", f'Invalid value: "{name}": {message}')


def shown(value: Any) -> str:
    """A wrong value as messages show it."""
    return json.dumps(value)


def _has_type(value: Any, name: str) -> bool:
    if name == "number":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if name == "integer":
        whole = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value) and value == int(value))
        return whole and not isinstance(value, bool)
    return _NAMES.get(type(value)) == name


def _enumerated(schema: Document, value: Any, path: str) -> list[Cause]:
    allowed = schema.get("enum")
    if allowed is None or value in allowed:
        return []
    listed = ", ".join(shown(one) for one in allowed)
    return [Cause(path, "FieldValueNotSupported", f"Unsupported value: {shown(value)}: supported values: {listed}")]


def _object(schema: Document, value: Document, path: str) -> list[Cause]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    causes = [
        Cause(child(path, name), "FieldValueRequired", "Required value")
        for name in schema.get("required", ())
        if name not in value
    ]
    most, least = schema.get("maxProperties"), schema.get("minProperties")
    if most is not None and len(value) > most:
        causes.append(_too_many(path, len(value), most))
    if least is not None and len(value) < least:
        causes.append(_invalid(path, len(value), f"{path} in body should have at least {least} properties"))
    for name, inner in value.items():
        if name in properties:
            causes += validate(properties[name], inner, child(path, name))
        elif isinstance(others, dict):
            causes += validate(others, inner, child(path, name))
    return causes


def _too_many(path: str, count: int, most: int) -> Cause:
    return Cause(path, "FieldValueTooMany", f"Too many: {count}: must have at most {most} item{'s' * (most != 1)}")


def _array(schema: Document, value: list[Any], path: str) -> list[Cause]:
    causes: list[Cause] = []
    most, least = schema.get("maxItems"), schema.get("minItems")
    if most is not None and len(value) > most:
        causes.append(_too_many(path, len(value), most))
    if least is not None and len(value) < least:
        causes.append(_invalid(path, len(value), f"{path} in body should have at least {least} items"))
    items = schema.get("items")
    if isinstance(items, dict):
        for index, item in enumerate(value):
            causes += validate(items, item, f"{path}[{index}]")
    return causes + _duplicates(schema, value, path)


def _duplicates(schema: Document, value: list[Any], path: str) -> list[Cause]:
    kind, causes, seen = schema.get("x-kubernetes-list-type"), [], set()
    if kind not in {"map", "set"}:
        return []
    for index, item in enumerate(value):
        identity: Any = item
        if kind == "map":
            if not isinstance(item, dict):
                continue
            identity = {name: item.get(name) for name in schema["x-kubernetes-list-map-keys"]}
        text = json.dumps(identity, sort_keys=True)
        if text in seen:
            causes.append(Cause(f"{path}[{index}]", "FieldValueDuplicate", f"Duplicate value: {text}"))
        seen.add(text)
    return causes


def _string(schema: Document, value: str, path: str) -> list[Cause]:
    causes = []
    most, least, pattern = schema.get("maxLength"), schema.get("minLength"), schema.get("pattern")
    if most is not None and len(value) > most:
        causes.append(Cause(path, "FieldValueTooLong", f"Too long: may not be more than {most} bytes"))
    if least is not None and len(value) < least:
        causes.append(_invalid(path, value, f"{path} in body should be at least {least} chars long"))
    if pattern is not None and not re.search(_as_python(pattern), value):
        causes.append(_invalid(path, value, f"{path} in body should match '{pattern}'"))
    name = schema.get("format")
    if name in _FORMATS and not _FORMATS[name](value):
        causes.append(_invalid(path, value, f'{path} in body must be of type {name}: "{value}"'))
    return causes


def _as_python(pattern: str) -> str:
    """Go's `$` is the very end of the text, Python's also stands before a last line break."""
    return re.sub(r"(?<!\\)\$(?=$|\))", r"\\Z", pattern)


def _number(schema: Document, value: float, path: str) -> list[Cause]:
    causes = []
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is not None and (value <= least if schema.get("exclusiveMinimum") else value < least):
        words = "greater than" if schema.get("exclusiveMinimum") else "greater than or equal to"
        causes.append(_invalid(path, value, f"{path} in body should be {words} {least}"))
    if most is not None and (value >= most if schema.get("exclusiveMaximum") else value > most):
        words = "less than" if schema.get("exclusiveMaximum") else "less than or equal to"
        causes.append(_invalid(path, value, f"{path} in body should be {words} {most}"))
    step = schema.get("multipleOf")
    if step is not None and abs(value / step - round(value / step)) > 1e-9:
        causes.append(_invalid(path, value, f"{path} in body should be a multiple of {step}"))
    low, high = _RANGES.get(schema.get("format", ""), (-math.inf, math.inf))
    if not low <= value <= high:
        causes.append(_invalid(path, value, f'{path} in body must be of type {schema["format"]}: "{value}"'))
    return causes


def _combined(schema: Document, value: Any, path: str) -> list[Cause]:
    causes: list[Cause] = []
    for one in schema.get("allOf", ()):
        causes += validate(one, value, path)
    some = [validate(one, value, path) for one in schema.get("anyOf", ())]
    if some and all(some):
        causes.append(
            _invalid(path, _NAMES.get(type(value)), f"{path} in body must validate at least one schema (anyOf)")
        )
    one_of = [validate(one, value, path) for one in schema.get("oneOf", ())]
    if one_of and sum(not found for found in one_of) != 1:
        words = f"{path} in body must validate one and only one schema (oneOf)"
        causes.append(_invalid(path, _NAMES.get(type(value)), words))
    if "not" in schema and not validate(schema["not"], value, path):
        causes.append(_invalid(path, _NAMES.get(type(value)), f"{path} in body must not validate the schema (not)"))
    return causes


def _is_date_time(text: str) -> bool:
    try:
        return "T" in text and datetime.fromisoformat(text).tzinfo is not None
    except ValueError:
        return False


_FORMATS: dict[str, Callable[[str], bool]] = {
    "date-time": _is_date_time,
    "duration": lambda text: parse_duration(text) is not None,
}
