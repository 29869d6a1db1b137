"""The difference of two objects as a JSON patch (RFC 6902), which is how an overlay changes a base. Pure."""

from collections.abc import Iterator
from typing import Any

Operation = dict[str, Any]


def json_patch(old: Any, new: Any, *, path: str = "") -> list[Operation]:
    """Return operations that turn `old` into `new`; items of lists are compared by place."""
    return list(_changes(old, new, path))


def _changes(old: Any, new: Any, path: str) -> Iterator[Operation]:
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _of_mapping(old, new, path)
    elif isinstance(old, list) and isinstance(new, list):
        yield from _of_list(old, new, path)
    elif old != new:
        yield {"op": "replace", "path": path, "value": new}


def _of_mapping(old: dict[str, Any], new: dict[str, Any], path: str) -> Iterator[Operation]:
    for key, value in old.items():
        if key in new:
            yield from _changes(value, new[key], f"{path}/{_escaped(key)}")
        else:
            yield {"op": "remove", "path": f"{path}/{_escaped(key)}"}
    for key, value in new.items():
        if key not in old:
            yield {"op": "add", "path": f"{path}/{_escaped(key)}", "value": value}


def _of_list(old: list[Any], new: list[Any], path: str) -> Iterator[Operation]:
    for index, (before, after) in enumerate(zip(old, new, strict=False)):
        yield from _changes(before, after, f"{path}/{index}")
    for index in range(len(old) - 1, len(new) - 1, -1):  # from the end: each removal moves what is behind it
        yield {"op": "remove", "path": f"{path}/{index}"}
    for item in new[len(old) :]:
        yield {"op": "add", "path": f"{path}/-", "value": item}


def _escaped(key: str) -> str:
    """Write a key as a part of a JSON pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")
