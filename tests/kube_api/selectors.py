"""Label and field selectors as list and watch take them. Pure."""

import re
from collections.abc import Callable
from typing import Any

from tests.kube_api.errors import Document, bad_request

Predicate = Callable[[Document], bool]

_SET = re.compile(r"^\s*([^\s=!,()]+)\s+(in|notin)\s*\(([^)]*)\)\s*$")
_EQUAL = re.compile(r"^\s*([^\s=!,()]+)\s*(==|=|!=)\s*([^\s=!,()]*)\s*$")
_EXISTS = re.compile(r"^\s*(!?)\s*([^\s=!,()]+)\s*$")
_COMMA = re.compile(r",(?![^(]*\))")

Requirement = tuple[str, str, frozenset[str]]  # key, "in" | "notin" | "exists" | "absent", values


def label_predicate(selector: str) -> Predicate:
    """Tells whether a document's labels satisfy `a=b,c!=d,e in (f,g),h,!i`; the empty selector takes everything."""
    wanted = [_requirement(part) for part in _COMMA.split(selector)] if selector.strip() else []

    def holds(document: Document) -> bool:
        labels = document["metadata"].get("labels") or {}
        return all(_satisfied(labels, requirement) for requirement in wanted)

    return holds


def _requirement(part: str) -> Requirement:
    if found := _SET.match(part):
        return found[1], found[2], frozenset(value.strip() for value in found[3].split(","))
    if found := _EQUAL.match(part):
        return found[1], "notin" if found[2] == "!=" else "in", frozenset({found[3]})
    if found := _EXISTS.match(part):
        return found[2], "absent" if found[1] else "exists", frozenset()
    raise bad_request(
        f'unable to parse requirement: found \'{part.strip()}\', expected: identifier, "!", "in", "notin", "="'
    )


def _satisfied(labels: dict[str, str], requirement: Requirement) -> bool:
    key, operator, values = requirement
    if operator == "exists":
        return key in labels
    if operator == "absent":
        return key not in labels
    if operator == "in":
        return labels.get(key) in values
    return labels.get(key) not in values


def field_predicate(selector: str, known: frozenset[str]) -> Predicate:
    """Tells whether a document's fields satisfy `metadata.name=a,spec.nodeName!=b`; known fields only."""
    wanted: list[tuple[str, bool, str]] = []
    for part in selector.split(",") if selector else []:
        found = _EQUAL.match(part)
        if not found:
            raise bad_request(f"invalid field selector {selector!r}: can't understand {part!r}")
        if found[1] not in known:
            raise bad_request(f"field label not supported: {found[1]}")
        wanted.append((found[1], found[2] != "!=", found[3]))

    def holds(document: Document) -> bool:
        return all((_text(document, path) == value) is equal for path, equal, value in wanted)

    return holds


def _text(document: Document, path: str) -> str:
    value: Any = document
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
