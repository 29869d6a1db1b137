"""Strict reading of a policy document by the kinds of its fields: plain values under the same names.

Every refusal is a `PolicyDocumentError` with the path of the field, whatever the document holds.
"""

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from extproc.errors import ConfigError
from extproc.policy.schema import Choice, Flag, Kind, ListOf, Number, Record, Rule, Text

PLAIN_NAME = re.compile(r"[A-Za-z0-9][-\w]{0,99}", re.ASCII)
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", re.ASCII)
MOST_SHOWN = 80


class PolicyDocumentError(ConfigError):
    """A document is refused: `path` leads to the field (`spec.scoring.weights.prefx`), `message` tells the fix."""

    reason = "invalid"

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def read_record(kind: Record, value: object, path: str) -> dict[str, Any]:
    """Return the given fields by name; lists with named items become mappings. Raise PolicyDocumentError."""
    document = record_of(value, path)
    for name in document:
        if name not in kind.properties and not kind.is_open:
            raise PolicyDocumentError(child(path, name), f"unknown field{nearest(name, kind.properties)}")
    # as in the API server, null means not given
    given = {name: part for name, part in document.items() if part is not None}
    found: dict[str, Any] = {}
    for name, prop in kind.properties.items():
        if name in given:
            found[name] = read_value(prop.kind, given[name], f"{path}.{name}")
        elif prop.required:
            raise PolicyDocumentError(f"{path}.{name}", "is missing")
        elif prop.filled is not None:
            found[name] = prop.filled
    require(kind.rules, given, path)
    return found


def require(rules: Iterable[Rule], given: Any, path: str) -> None:
    """Raise PolicyDocumentError for the first rule that a value breaks."""
    for rule in rules:
        if not rule.holds(given):
            raise PolicyDocumentError(f"{path}.{rule.at}" if rule.at else path, rule.message)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message: the nearest valid name."""
    close = difflib.get_close_matches(name[:MOST_SHOWN], sorted(known), n=1, cutoff=0.0)
    return f"; the nearest valid one is {close[0]!r}" if close else ""


def record_of(value: object, path: str) -> Mapping[str, Any]:
    """Return an object with text keys, or raise PolicyDocumentError."""
    if not isinstance(value, Mapping):
        raise PolicyDocumentError(path, f"must be an object, not {shown(value)}")
    for key in value:
        if not isinstance(key, str):
            raise PolicyDocumentError(path, f"has the field name {shown(key)}, which is no text; quote it")
    return value


def created_at_of(metadata: Mapping[str, Any]) -> str:
    """Return the creation time as RFC 3339 in UTC, which compares as text; "" without one."""
    value, path = metadata.get("creationTimestamp"), "metadata.creationTimestamp"
    if value is None:
        return ""
    if isinstance(value, str) and TIME.fullmatch(value):
        return value
    if isinstance(value, datetime):  # YAML has a type for it
        return (value.astimezone(UTC) if value.tzinfo else value).strftime("%Y-%m-%dT%H:%M:%SZ")
    raise PolicyDocumentError(path, f"must be a time such as 2026-01-31T12:00:00Z, not {shown(value)}")


def child(path: str, name: str) -> str:
    """Return the path of a field; unusual names are quoted."""
    return f"{path}.{name}" if PLAIN_NAME.fullmatch(name) else f"{path}[{json.dumps(name[:MOST_SHOWN])}]"


def shown(value: object) -> str:
    """Return a value for a message: short, and in one line."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list | tuple):
        return "a list"
    try:
        text = json.dumps(value) if isinstance(value, str | int | float | bool) or value is None else repr(value)
    except ValueError:  # Python refuses to print integers of more than 4,300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "…"


def read_value(kind: Kind, value: object, path: str) -> Any:
    """Return a value of this kind, or raise PolicyDocumentError."""
    match kind:
        case Record():
            return read_record(kind, value, path)
        case ListOf():
            return _read_list(kind, value, path)
        case Number():
            return _read_number(kind, value, path)
        case Text():
            return read_text(kind, value, path)
        case Flag():
            if not isinstance(value, bool):
                raise PolicyDocumentError(path, f"must be true or false, not {shown(value)}")
            return value
        case Choice():
            return _read_choice(kind, value, path)


def _read_number(kind: Number, value: object, path: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and kind.whole and isinstance(value, float):
        is_number = value.is_integer()
    what = "a whole number" if kind.whole else "a number"
    if not is_number:
        raise PolicyDocumentError(path, f"must be {what}, not {shown(value)}")
    number: float = value  # type: ignore[assignment]  # as was just checked
    if kind.above and not kind.least < number <= kind.most:
        raise PolicyDocumentError(path, f"must be above {kind.least:g} and at most {kind.most:g}, not {shown(value)}")
    if not kind.above and not kind.least <= number <= kind.most:
        raise PolicyDocumentError(path, f"must be between {kind.least:.12g} and {kind.most:.12g}, not {shown(value)}")
    return int(number) if kind.whole else number


def read_text(kind: Text, value: object, path: str) -> str:
    """Return a text of this kind, or raise PolicyDocumentError."""
    if not isinstance(value, str):
        raise PolicyDocumentError(path, f"must be a text, not {shown(value)}")
    if not kind.least <= len(value) <= kind.most:
        raise PolicyDocumentError(path, f"must have {kind.least} to {kind.most} characters, not {len(value)}")
    if not _is_unicode(value):
        raise PolicyDocumentError(path, f"must be text without halves of characters, not {shown(value)}")
    if kind.pattern and re.fullmatch(kind.pattern, value, re.ASCII) is None:
        raise PolicyDocumentError(path, f"must be {kind.meaning}, not {shown(value)}")
    return value


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False  # a lone surrogate, which is impossible in headers, labels and keys
    return True


def _read_choice(kind: Choice, value: object, path: str) -> Any:
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        for allowed in kind.of:
            if value == allowed:
                return allowed
    choices = [str(allowed) for allowed in kind.of]
    hint = nearest(value, choices) if isinstance(value, str) else ""
    raise PolicyDocumentError(path, f"must be one of {', '.join(choices)}, not {shown(value)}{hint}")


def _read_list(kind: ListOf, value: object, path: str) -> Any:
    if not isinstance(value, list | tuple):
        raise PolicyDocumentError(path, f"must be a list, not {shown(value)}")
    if not kind.least <= len(value) <= kind.most:
        raise PolicyDocumentError(path, f"must have {kind.least} to {kind.most} items, not {len(value)}")
    items = [read_value(kind.item, item, f"{path}[{i}]") for i, item in enumerate(value)]
    names: list[tuple[object, ...]] = [(item,) for item in items] if kind.unique else []
    if kind.keys:
        names = [tuple(item.get(key) for key in kind.keys) for item in items]
    for i, name in enumerate(names):
        if name in names[:i]:
            double = ", ".join(str(part) for part in name)
            raise PolicyDocumentError(f"{path}[{i}]", f"{shown(double)} is already in {path}[{names.index(name)}]")
    require(kind.rules, value, path)
    if not kind.as_mapping:
        return items
    return {item.pop(kind.keys[0]): item[kind.value] if kind.value else item for item in items}
