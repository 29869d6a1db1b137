"""Whether `metadata` can be read at all: what the real server decodes into typed fields before anything else. Pure."""

from typing import Any

from tests.kube_api.errors import Document, bad_request

_TEXTS = ("name", "generateName", "namespace", "uid", "resourceVersion", "creationTimestamp", "deletionTimestamp")


def readable_metadata(document: Document) -> dict[str, Any]:
    """The document's metadata, {} where it has none; raises 400 naming the field that has the wrong type."""
    metadata = document.get("metadata")
    if metadata is None:
        metadata = document["metadata"] = {}
    if not isinstance(metadata, dict):
        raise _unreadable("metadata", metadata, "v1.ObjectMeta")
    for name in _TEXTS:
        if metadata.get(name) is not None and not isinstance(metadata[name], str):
            raise _unreadable(f"metadata.{name}", metadata[name], "string")
    for name in ("labels", "annotations"):
        _check(
            metadata, name, dict, "map[string]string", lambda value: all(isinstance(one, str) for one in value.values())
        )
    _check(metadata, "finalizers", list, "[]string", lambda value: all(isinstance(one, str) for one in value))
    for name in ("ownerReferences", "managedFields"):
        _check(metadata, name, list, "[]object", lambda value: all(isinstance(one, dict) for one in value))
    for name in [name for name, value in metadata.items() if value is None and name != "creationTimestamp"]:
        del metadata[name]  # null is absent in typed fields
    return metadata


def _check(metadata: dict[str, Any], name: str, kind: type, words: str, fits: Any) -> None:
    value = metadata.get(name)
    if value is not None and not (isinstance(value, kind) and fits(value)):
        raise _unreadable(f"metadata.{name}", value, words)


def _unreadable(path: str, value: Any, words: str) -> Exception:
    names = {dict: "object", list: "array", str: "string", bool: "bool"}
    found = names.get(type(value), "number")
    text = f"json: cannot unmarshal {found} into Go struct field {path} of type {words}"
    return bad_request(f"unable to decode the body: {text}")
