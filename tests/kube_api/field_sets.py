"""Objects as sets of field paths, and merging by paths: the part of server-side apply that knows no managers. Pure."""

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

from tests.kube_api.errors import Document
from tests.kube_api.field_types import FieldType

Path = tuple[str, ...]  # steps as in FieldsV1: f:name, k:{"name":"a"}, v:"a"
BRANCH = object()  # the value of a path that only holds others

_UNTRACKED = frozenset(
    {
        "name",
        "namespace",
        "uid",
        "resourceVersion",
        "generation",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "selfLink",
        "generateName",
    }
)


def tracked(document: Document) -> Document:
    """The part of an object whose fields have managers."""
    rest = {name: value for name, value in document.items() if name not in {"apiVersion", "kind", "metadata"}}
    metadata = {name: value for name, value in document.get("metadata", {}).items() if name not in _UNTRACKED}
    return {**({"metadata": metadata} if metadata else {}), **rest}


def flat(kind: FieldType, value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every path with its value; BRANCH for maps and items that hold others."""
    if isinstance(value, dict) and value and not kind.is_whole():
        if path:
            yield path, BRANCH
        for name, inner in value.items():
            yield from flat(kind.child(name), inner, (*path, f"f:{name}"))
        return
    keys = kind.item_keys(value) if isinstance(value, list) and value else None
    if keys is None:
        yield path, value
        return
    yield path, BRANCH
    for item in value:
        yield from flat(kind.item(), item, (*path, kind.step(item, keys)))


def owned_paths(kind: FieldType, value: Any, path: Path = ()) -> Iterator[Path]:
    """What a manager who applies this owns: leaves, list items, entries of maps."""
    if isinstance(value, dict) and value and not kind.is_whole():
        for name, inner in value.items():
            at = (*path, f"f:{name}")
            if kind.is_map_key(name):
                yield at
            yield from owned_paths(kind.child(name), inner, at)
        return
    keys = kind.item_keys(value) if isinstance(value, list) and value else None
    if keys is None:
        yield path
        return
    for item in value:
        at = (*path, kind.step(item, keys))
        yield at
        if isinstance(item, dict):
            yield from owned_paths(kind.item(), item, at)


def changes(kind: FieldType, old: Document, new: Document) -> tuple[set[Path], set[Path]]:
    """Paths that were added or got another value, and paths that are gone."""
    before, after = dict(flat(kind, tracked(old))), dict(flat(kind, tracked(new)))
    changed = {
        path for path, value in after.items() if path and (path not in before or not _equal(before[path], value))
    }
    return changed, {path for path in before if path and path not in after}


def _equal(one: Any, other: Any) -> bool:
    return one is other if BRANCH in (one, other) else bool(one == other)


def merge(kind: FieldType, live: Any, applied: Any) -> Any:
    """What is applied laid over the live object."""
    if isinstance(applied, dict) and isinstance(live, dict) and not kind.is_whole():
        merged = dict(live)
        for name, value in applied.items():
            if value is not None:
                merged[name] = merge(kind.child(name), live.get(name), value)
        return merged
    if isinstance(applied, list) and isinstance(live, list) and applied:
        keys = kind.item_keys(applied)
        if keys is not None:
            return _merge_lists(kind, live, applied, keys)
    return copy.deepcopy(applied)


def _merge_lists(kind: FieldType, live: list[Any], applied: list[Any], keys: tuple[str, ...]) -> list[Any]:
    wanted = {kind.step(item, keys): item for item in applied}
    merged = []
    for item in live:
        step = kind.step(item, keys)
        merged.append(merge(kind.item(), item, wanted.pop(step)) if step in wanted else item)
    return merged + [copy.deepcopy(item) for item in wanted.values()]


def without(kind: FieldType, document: Document, paths: Iterable[Path], held: frozenset[Path]) -> Document:
    """The object without those paths; maps and lists that become empty go too, unless they are `held` by themselves."""
    result: Document = copy.deepcopy(document)
    for path in sorted(paths, key=len):  # an item before its fields: without its keys it cannot be found
        _remove(kind, result, path, (), held)
    return result


def _remove(kind: FieldType, value: Any, path: Path, above: Path, held: frozenset[Path]) -> None:
    step, rest = path[0], path[1:]
    here = (*above, step)
    if step.startswith("f:"):
        name = step[2:]
        if not isinstance(value, dict) or name not in value:
            return
        if rest:
            _remove(kind.child(name), value[name], rest, here, held)
        if not rest or (value[name] in ({}, []) and here not in held):
            del value[name]
        return
    keys = kind.item_keys(value) if isinstance(value, list) else None
    for index, item in enumerate(value) if keys is not None else ():
        if keys is not None and kind.step(item, keys) == step:
            if rest:
                _remove(kind.item(), item, rest, here, held)
            else:
                del value[index]
            return


def to_fields(paths: Iterable[Path]) -> Document:
    """FieldsV1: paths as nested objects, with "." where a path is owned that others go through."""
    fields: Document = {}
    for path in sorted(paths):
        here = fields
        for step in path:
            here = here.setdefault(step, {})
        here["."] = {}
    return _trimmed(fields)


def _trimmed(fields: Document) -> Document:
    return {step: {} if step == "." or inner == {".": {}} else _trimmed(inner) for step, inner in fields.items()}


def from_fields(fields: Document, path: Path = ()) -> Iterator[Path]:
    for step, inner in fields.items():
        if step == ".":
            yield path
        elif inner:
            yield from from_fields(inner, (*path, step))
        else:
            yield (*path, step)


def shown(path: Path) -> str:
    """As in messages: .spec.containers[name="a"].image."""
    text = ""
    for step in path:
        if step.startswith("f:"):
            text += "." + step[2:]
        elif step.startswith("k:"):
            keys = json.loads(step[2:])
            text += "[" + ",".join(f"{name}={json.dumps(value)}" for name, value in keys.items()) + "]"
        else:
            text += f"[={step[2:]}]"
    return text
