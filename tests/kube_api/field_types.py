"""How lists and maps of an object are merged: keys of list items, sets, what is replaced whole. Pure."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kube_api.errors import Document
from tests.kube_api.patches import merge_key

# objects of built-in kinds that have one owner as a whole (x-kubernetes-map-type: atomic)
_WHOLE = frozenset(
    {
        "selector",
        "labelSelector",
        "podSelector",
        "namespaceSelector",
        "configMapKeyRef",
        "secretKeyRef",
        "fieldRef",
        "resourceFieldRef",
        "roleRef",
        "nodeSelector",
    }
)
_SETS = frozenset({"finalizers"})


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldType:
    """One place in an object: its name, and its schema where a CRD gives one (None: as built-in kinds have it)."""

    name: str = ""
    schema: Document | None = field(default=None, hash=False)
    root: bool = False

    def child(self, name: str) -> "FieldType":
        if self.schema is None or (self.root and name == "metadata"):
            return FieldType(name=name)
        inner = self.schema.get("properties", {}).get(name)
        if inner is None:
            others = self.schema.get("additionalProperties")
            inner = others if isinstance(others, dict) else {}
        return FieldType(name=name, schema=inner)

    def item(self) -> "FieldType":
        if self.schema is None:
            return FieldType(name=self.name + "[]")
        return FieldType(name=self.name, schema=self.schema.get("items") or {})

    def is_map_key(self, name: str) -> bool:
        """Whether the child is an entry of a map and not a declared field: then it is owned beside what is in it."""
        if self.schema is None:
            return self.name in {"labels", "annotations", "data", "binaryData", "stringData", "limits", "requests"}
        return not self.root and name not in self.schema.get("properties", {})

    def is_whole(self) -> bool:
        if self.schema is None:
            return self.name in _WHOLE
        return self.schema.get("x-kubernetes-map-type") == "atomic"

    def item_keys(self, items: Sequence[Any]) -> tuple[str, ...] | None:
        """The keys that tell a list's items apart, () for a set of scalars, None for a list that is replaced whole."""
        if self.schema is None:
            if self.name in _SETS:
                return ()
            keys = merge_key(self.name, items)
            return keys if keys and all(isinstance(item, dict) for item in items) else None
        kind = self.schema.get("x-kubernetes-list-type")
        if kind == "set":
            return ()
        return tuple(self.schema["x-kubernetes-list-map-keys"]) if kind == "map" else None

    def step(self, item: Any, keys: tuple[str, ...]) -> str:
        """The item's step in a path, as in FieldsV1."""
        if not keys:
            return "v:" + _compact(item)
        return "k:" + _compact({key: item[key] if key in item else self._default(key) for key in sorted(keys)})

    def _default(self, key: str) -> Any:
        if self.schema is None:
            return "TCP" if key == "protocol" else None
        return (self.schema.get("items") or {}).get("properties", {}).get(key, {}).get("default")


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
