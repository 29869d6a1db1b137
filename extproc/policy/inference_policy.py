"""Reads the fields of InferencePolicy documents (kvmesh.io/v1alpha1), and of files with the picker's own settings.

docs/reference/inference-policy.md has the fields. They are kept as plain values under the names of `policy.spec`, so
that policies can be merged field by field, and every message names the field as in the document.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from extproc.policy.merge import Path
from extproc.policy.priority import ANY
from extproc.policy.reading import (
    PolicyDocumentError,
    child,
    created_at_of,
    read_record,
    read_text,
    record_of,
    shown,
)
from extproc.policy.schema import Text, kind_of
from extproc.policy.spec import OBJECT_NAME, Spec, TargetRef

GROUP, VERSION, KIND = "kvmesh.io", "v1alpha1", "InferencePolicy"
API_VERSION = f"{GROUP}/{VERSION}"
TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
NAME = Text(least=1, most=253, pattern=OBJECT_NAME, meaning="an object's name (lower case)")
NAMESPACE = Text(least=1, most=63, pattern=OBJECT_NAME, meaning="a namespace's name (lower case)")
CLASSES = ("priorities", "classes")
TARGET_FIELDS = ("ttftSeconds", "interTokenSeconds")
# field of a class -> fields of the class that it presets
CLASS_PRESETS: Mapping[tuple[str, ...], tuple[str, ...]] = {
    ("targets",): TARGET_FIELDS,
    ("tolerance",): ("targets", *TARGET_FIELDS, "queueSeconds"),
}
# mappings with user-defined names as keys
NAMED = (CLASSES, ("priorities", "objectives"))
RESOURCE = {"apiVersion", "kind", "spec"}  # any of these tells a resource from a bare `spec`


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePolicy:
    """One resource, before merging.

    `fields` has the given fields of the `spec`, without `targetRefs`; lists of named items are mappings. Merging goes
    through mappings key by key and takes everything else as one value; see also `resets_of`.
    """

    namespace: str
    name: str
    created_at: str  # RFC 3339 in UTC, so that it compares as text; "" if unknown
    generation: int  # 0 if unknown
    target_refs: tuple[TargetRef, ...]
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


def parse_inference_policy(document: Mapping[str, Any]) -> InferencePolicy:
    """Read a document in the API's form. Raise PolicyDocumentError with the path of the first wrong field."""
    given = _top_level(document)
    metadata = record_of(given["metadata"], "metadata")
    fields = read_spec(given["spec"])
    return InferencePolicy(
        namespace=read_text(NAMESPACE, metadata.get("namespace", "default"), "metadata.namespace"),
        name=read_text(NAME, metadata.get("name"), "metadata.name"),
        created_at=created_at_of(metadata),
        generation=_generation(metadata.get("generation"), "metadata.generation"),
        target_refs=msgspec.convert(fields.pop("targetRefs", []), tuple[TargetRef, ...]),
        fields=fields,
    )


def read_spec(document: object) -> dict[str, Any]:
    """Return the given fields of a `spec`. Raise PolicyDocumentError with the path of the first wrong one."""
    fields = read_record(kind_of(Spec), document, "spec")
    # lists are merged as a whole: a contradiction within one is an error in any merge
    quotas = fields.get("quotas", ())
    for i, quota in enumerate(quotas):
        for j, earlier in enumerate(quotas[:i]):
            if earlier["tenant"] in (ANY, quota["tenant"]) and earlier["model"] in (ANY, quota["model"]):
                message = f"never counts: spec.quotas[{j}] comes first and matches all that it matches"
                raise PolicyDocumentError(f"spec.quotas[{i}]", message)
    _require_single_names(fields.get("models", {}).get("served", ()))
    return fields


def read_policy_file(document: object) -> dict[str, Any]:
    """Return the fields of a file for all pools of a picker: an InferencePolicy, or a bare `spec`.

    Raise PolicyDocumentError with the path of the wrong field; fields about single pools are wrong here, too.
    """
    if isinstance(document, Mapping) and not RESOURCE.isdisjoint(document):
        document = document["spec"] if set(document) == {"spec"} else _top_level({"metadata": {}, **document})["spec"]
    fields = read_spec({} if document is None else document)
    for name in ("targetRefs", "hosts"):
        if name in fields:
            message = (
                "this file holds for all pools of the picker: leave it out, or put the file into a --policies folder"
            )
            raise PolicyDocumentError(f"spec.{name}", message)
    return fields


def read_section(name: str, document: object) -> dict[str, Any]:
    """Return the fields of a file with a single section of `spec`. Raise PolicyDocumentError."""
    return read_spec({name: {} if document is None else document})


def _require_single_names(served: Iterable[Mapping[str, Any]]) -> None:
    claimed: dict[str, str] = {}
    for i, model in enumerate(served):
        where = f"spec.models.served[{i}]"
        for name in (model["name"], *sorted(model.get("aliases", ())), *sorted(model.get("adapters", ()))):
            if name in claimed:
                raise PolicyDocumentError(where, f"the name {name!r} is already that of {claimed[name]}")
            claimed[name] = where


def resets_of(path: Path) -> tuple[Path, ...]:
    """Return the fields of weaker policies that a policy with this field drops: a preset replaces single values."""
    if path == ("scoring", "strategy"):
        return (("scoring", "weights"),)
    if path[:2] == CLASSES:
        return tuple((*path[:3], name) for name in CLASS_PRESETS.get(path[3:], ()))
    return ()


def spec_path(path: Path) -> str:
    """Return the path in a document for a path in the merged fields.

    ("priorities", "classes", "chat", "ttftSeconds") -> "spec.priorities.classes[chat].ttftSeconds".
    """
    if path[:2] in NAMED and len(path) > 2:
        return ".".join((f"spec.{path[0]}.{path[1]}[{path[2]}]", *path[3:]))
    return ".".join(("spec", *path))


def _top_level(document: object) -> Mapping[str, Any]:
    given = record_of(document, "document")
    for name in given:
        if name not in TOP_LEVEL:
            raise PolicyDocumentError(child("", name).lstrip("."), f"unknown field; there are {', '.join(TOP_LEVEL)}")
    for name, wanted in (("apiVersion", API_VERSION), ("kind", KIND)):
        if given.get(name) != wanted:
            raise PolicyDocumentError(name, f"must be {wanted}, not {shown(given.get(name))}")
    for name in ("metadata", "spec"):
        if given.get(name) is None:
            raise PolicyDocumentError(name, "is missing")
    return given


def _generation(value: object, path: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PolicyDocumentError(path, f"must be a whole number, not {shown(value)}")
    return value
