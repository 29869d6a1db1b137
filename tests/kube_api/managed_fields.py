"""Who manages which field: `metadata.managedFields`, kept on each write. Pure; `writing` and `applying` call it."""

from collections.abc import Mapping
from dataclasses import dataclass

from tests.kube_api.errors import Document
from tests.kube_api.field_sets import Path, changes, from_fields, to_fields
from tests.kube_api.field_types import FieldType

APPLY, UPDATE = "Apply", "Update"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """Who wrote: the same name is another manager where it applies and where it updates, or writes the status."""

    name: str
    operation: str
    subresource: str = ""
    api_version: str = ""
    time: str = ""

    @property
    def identity(self) -> tuple[str, str, str]:
        return self.name, self.operation, self.subresource

    def shown(self) -> str:
        """As conflicts name it."""
        text = f'"{self.name}"' + (f' with subresource "{self.subresource}"' if self.subresource else "")
        return text if self.operation == APPLY else f"{text} using {self.api_version}"


Owned = dict[Manager, frozenset[Path]]


def read_managers(document: Document) -> Owned:
    owned: Owned = {}
    for entry in document["metadata"].get("managedFields") or ():
        if "manager" not in entry:
            continue
        manager = Manager(
            name=entry["manager"],
            operation=entry["operation"],
            subresource=entry.get("subresource", ""),
            api_version=entry.get("apiVersion", ""),
            time=entry.get("time", ""),
        )
        owned[manager] = frozenset(from_fields(entry.get("fieldsV1") or {}))
    return owned


def write_managers(document: Document, owned: Mapping[Manager, frozenset[Path]]) -> Document:
    """The document with these managers; those who own nothing any more are left out."""
    entries = []
    for manager, paths in owned.items():
        if not paths:
            continue
        entry: Document = {
            "manager": manager.name,
            "operation": manager.operation,
            "apiVersion": manager.api_version,
            "time": manager.time,
            "fieldsType": "FieldsV1",
            "fieldsV1": to_fields(paths),
        }
        entries.append({**entry, **({"subresource": manager.subresource} if manager.subresource else {})})
    metadata = {name: value for name, value in document["metadata"].items() if name != "managedFields"}
    return {**document, "metadata": {**metadata, **({"managedFields": entries} if entries else {})}}


def track_update(kind: FieldType, old: Document | None, new: Document, manager: Manager) -> Document:
    """After a create, update or patch: what it changed is the writer's now, what is gone is nobody's."""
    given = new["metadata"].get("managedFields")
    owned = {} if given in ([], [{}]) else read_managers(old or {"metadata": {}})
    changed, removed = changes(kind, old or {"metadata": {}}, new)
    if not changed and not removed:
        return write_managers(new, owned)
    mine = frozenset(changed)
    kept: Owned = {}
    for one, paths in owned.items():
        if one.identity == manager.identity:
            mine |= paths
        else:
            kept[one] = paths - changed - removed
    kept[manager] = mine - removed
    return write_managers(new, kept)
