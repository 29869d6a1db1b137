"""Reads fields of untrusted documents: a value of the right type, or an error with the field's path. Pure."""

from collections.abc import Mapping
from typing import Any


class FieldError(ValueError):
    """A field is missing or has the wrong shape."""

    def __init__(self, path: str, message: str) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message


def value_at(document: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, or None if absent. Raise FieldError if a parent is no mapping."""
    here: Any = document
    walked = ""
    for name in path.split("."):
        if here is None:
            return None
        if not isinstance(here, Mapping):
            raise FieldError(walked or "document", f"must be a mapping, not {_kind_of(here)}")
        here = here.get(name)
        walked = f"{walked}.{name}" if walked else name
    return here


def mapping_at(document: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the mapping at a path; empty if absent."""
    found = value_at(document, path)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise FieldError(path, f"must be a mapping, not {_kind_of(found)}")
    return found


def texts_at(document: Mapping[str, Any], path: str) -> Mapping[str, str]:
    """Return a mapping from text to text (labels, annotations, a selector); empty if absent."""
    found = mapping_at(document, path)
    for name, text in found.items():
        if not isinstance(text, str):
            raise FieldError(f"{path}.{name}", f"must be text, not {_kind_of(text)}; in YAML, put it in quotes")
    return found


def items_at(document: Mapping[str, Any], path: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the items of a list of mappings, each with its own path; empty if absent."""
    found = value_at(document, path)
    if found is None:
        return []
    if not isinstance(found, list | tuple):
        raise FieldError(path, f"must be a list, not {_kind_of(found)}")
    items = [(f"{path}[{place}]", item) for place, item in enumerate(found)]
    for where, item in items:
        if not isinstance(item, Mapping):
            raise FieldError(where, f"must be a mapping, not {_kind_of(item)}")
    return items


def text_at(document: Mapping[str, Any], path: str) -> str:
    """Return the text at a path, or "" if absent."""
    found = value_at(document, path)
    if found is None:
        return ""
    if not isinstance(found, str):
        raise FieldError(path, f"must be text, not {_kind_of(found)}")
    return found


def port_number(value: Any, path: str) -> int:
    """Return a port, or raise FieldError."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 65535:
        raise FieldError(path, f"must be a port number from 1 to 65535, not {value!r}")
    return value


def _kind_of(value: Any) -> str:
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "a mapping", type(None): "nothing"}
    return names.get(type(value), type(value).__name__)
