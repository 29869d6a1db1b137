"""The patch formats that only need the two documents: JSON patch, JSON merge patch, strategic merge. Pure."""

import copy
from collections.abc import Sequence
from typing import Any

from tests.kube_api.errors import ApiError, Document, bad_request

# fields of built-in kinds whose lists strategic merge patches join by a key instead of replacing them
MERGE_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "env": ("name",),
    "volumes": ("name",),
    "volumeMounts": ("mountPath",),
    "conditions": ("type",),
    "ownerReferences": ("uid",),
    "imagePullSecrets": ("name",),
    "secrets": ("name",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}


def json_merge(target: Any, patch: Any) -> Any:
    """RFC 7386: objects are joined, null removes, everything else replaces."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = json_merge(merged.get(name), value)
    return merged


def strategic_merge(target: Any, patch: Any, field: str = "") -> Any:
    """Kubernetes' own merge for built-in kinds: lists with a merge key are joined, `$patch` and `$delete…` obeyed."""
    if isinstance(patch, list):
        key = merge_key(field, patch)
        return _merge_lists(target if isinstance(target, list) else [], patch, key) if key else copy.deepcopy(patch)
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if name.startswith("$"):
            if name.startswith("$deleteFromPrimitiveList/"):
                list_name = name.partition("/")[2]
                merged[list_name] = [one for one in merged.get(list_name, ()) if one not in value]
        elif value is None:
            merged.pop(name, None)
        else:
            merged[name] = strategic_merge(merged.get(name), value, name)
    return merged


def merge_key(field: str, items: Sequence[Any]) -> tuple[str, ...]:
    """How the items of a built-in kind's list are told apart; () for lists that are replaced whole."""
    if field == "ports":
        sample: Document = next((one for one in items if isinstance(one, dict)), {})
        return ("containerPort", "protocol") if "containerPort" in sample else ("port", "protocol")
    return MERGE_KEYS.get(field, ())


def _merge_lists(target: list[Any], patch: list[Any], key: tuple[str, ...]) -> list[Any]:
    def identity(item: Any) -> tuple[Any, ...]:
        return tuple(item.get(one, "TCP" if one == "protocol" else None) for one in key)

    merged = list(target)
    for item in patch:
        at = next((index for index, one in enumerate(merged) if identity(one) == identity(item)), None)
        if item.get("$patch") == "delete":
            if at is not None:
                del merged[at]
        elif at is None:
            merged.append(copy.deepcopy(item))
        else:
            merged[at] = strategic_merge(merged[at], item)
    return merged


def json_patch(target: Document, operations: Any) -> Document:
    """RFC 6902; raises 422 where an operation does not fit, as the real server does."""
    if not isinstance(operations, list):
        raise bad_request("error decoding patch: json: cannot unmarshal object into Go value of type jsonpatch.Patch")
    document: Any = copy.deepcopy(target)
    try:
        for operation in operations:
            document = _operate(document, operation)
    except (KeyError, IndexError, ValueError, TypeError) as problem:
        raise ApiError(
            422, "Invalid", f"the server rejected our request due to an error in our request: {problem}"
        ) from None
    result: Document = document
    return result


def _operate(document: Any, operation: dict[str, Any]) -> Any:
    kind, path = operation["op"], _pointer(operation["path"])
    if kind in {"add", "replace"}:
        return _set(document, path, operation["value"], replace=kind == "replace")
    if kind == "remove":
        return _remove(document, path)
    if kind in {"move", "copy"}:
        value = copy.deepcopy(_get(document, _pointer(operation["from"])))
        document = _remove(document, _pointer(operation["from"])) if kind == "move" else document
        return _set(document, path, value, replace=False)
    if kind == "test":
        if _get(document, path) != operation["value"]:
            raise ValueError(f"testing value {operation['path']} failed: test failed")
        return document
    raise ValueError(f"Unexpected kind: {kind}")


def _pointer(path: str) -> list[str]:
    return [part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:]]


def _get(document: Any, path: list[str]) -> Any:
    for part in path:
        document = document[int(part)] if isinstance(document, list) else document[part]
    return document


def _set(document: Any, path: list[str], value: Any, *, replace: bool) -> Any:
    if not path:
        return value
    parent, last = _get(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        if replace:
            parent[int(last)] = value
        else:
            parent.insert(len(parent) if last == "-" else int(last), value)
    else:
        if replace and last not in parent:
            raise KeyError(last)
        parent[last] = value
    return document


def _remove(document: Any, path: list[str]) -> Any:
    parent, last = _get(document, path[:-1]), path[-1]
    if isinstance(parent, list):
        del parent[int(last)]
    else:
        del parent[last]
    return document
