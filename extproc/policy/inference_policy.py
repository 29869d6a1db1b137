"""InferencePolicy documents (kvmesh.io/v1alpha1), and files of the picker's own settings -> the fields that they give.

docs/reference/inference-policy.md has the fields. What a document gives is kept as plain values under the names of
`policy.spec`, so that several can be merged field by field and every message names the field as people write it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

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
# a policy that gives the first drops what wider ones have under the second: a preset is meant to be one
RESETS: Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]] = {("scoring", "strategy"): (("scoring", "weights"),)}
# mappings whose keys are names that people give
NAMED = (("priorities", "classes"), ("priorities", "objectives"))
# what files had before they were InferencePolicies; every other field of theirs is written in snake case
FORMER_FIELDS = frozenset(
    {"policy", "strategy", "weights", "scales", "fallbacks", "health", "hotspot", "cordoned", "roles"}
)
RESOURCE = {"apiVersion", "kind", "spec"}  # one of them tells a resource from a `spec` alone
MOST_FORMER = 3  # that a message names
SNAKE_CASE = re.compile(r"[a-z]+(_[a-z]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePolicy:
    """What one resource says by itself.

    `fields` is the `spec` as far as it is given, without `targetRefs`; lists whose items have names are mappings. In
    merging, a mapping is merged key by key and everything else is one value; see RESETS.
    """

    namespace: str
    name: str
    created_at: str  # RFC 3339 in UTC, compares as text; "" unknown
    generation: int  # 0 unknown
    target_refs: tuple[TargetRef, ...]
    fields: Mapping[str, Any]

    @property
    def key(self) -> str:
        """`namespace/name`."""
        return f"{self.namespace}/{self.name}"


def parse_inference_policy(document: Mapping[str, Any]) -> InferencePolicy:
    """Read a document as the API has it. Raise PolicyDocumentError with the path of the first wrong field."""
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
    """Return the fields that a `spec` gives. Raise PolicyDocumentError with the path of the first wrong one."""
    fields = read_record(kind_of(Spec), document, "spec")
    # lists are merged as a whole: what contradicts within one is wrong whatever the other policies say
    quotas = fields.get("quotas", ())
    for i, quota in enumerate(quotas):
        for j, earlier in enumerate(quotas[:i]):
            if earlier["tenant"] in (ANY, quota["tenant"]) and earlier["model"] in (ANY, quota["model"]):
                message = f"never counts: spec.quotas[{j}] comes first and matches all that it matches"
                raise PolicyDocumentError(f"spec.quotas[{i}]", message)
    _require_single_names(fields.get("models", {}).get("served", ()))
    return fields


def read_policy_file(document: object) -> dict[str, Any]:
    """Return the fields of a file for all pools of a picker: an InferencePolicy, or its `spec` alone.

    Raise PolicyDocumentError with the path of what is wrong, also for fields that name single pools.
    """
    if isinstance(document, Mapping) and not RESOURCE.isdisjoint(document):
        document = document["spec"] if set(document) == {"spec"} else _top_level({"metadata": {}, **document})["spec"]
    fields = read_settings({} if document is None else document)
    for name in ("targetRefs", "hosts"):
        if name in fields:
            message = (
                "this file holds for all pools of the picker: leave it out, or put the file into a --policies folder"
            )
            raise PolicyDocumentError(f"spec.{name}", message)
    return fields


def read_section(name: str, document: object) -> dict[str, Any]:
    """Return the fields of a file with one section of `spec` by itself. Raise PolicyDocumentError."""
    return read_settings({name: {} if document is None else document})


def read_settings(document: object) -> dict[str, Any]:
    """Return the fields that a `spec` gives, and say of one in the former format that it is one."""
    try:
        return read_spec(document)
    except PolicyDocumentError:
        top = set(document) & FORMER_FIELDS if isinstance(document, Mapping) else set()
        former = sorted({*top, *_snake_case_keys(document)})
        if not former:
            raise
        message = (
            f"{', '.join(former[:MOST_FORMER])}: a policy file is an InferencePolicy or its spec now, in camel case"
        )
        raise PolicyDocumentError("spec", f"{message} (docs/reference/policy.md has the new names)") from None


def _snake_case_keys(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            if isinstance(key, str) and SNAKE_CASE.fullmatch(key):
                yield key
            yield from _snake_case_keys(part)
    elif isinstance(value, list):
        for part in value:
            yield from _snake_case_keys(part)


def _require_single_names(served: Iterable[Mapping[str, Any]]) -> None:
    claimed: dict[str, str] = {}
    for i, model in enumerate(served):
        where = f"spec.models.served[{i}]"
        for name in (model["name"], *sorted(model.get("aliases", ())), *sorted(model.get("adapters", ()))):
            if name in claimed:
                raise PolicyDocumentError(where, f"the name {name!r} is already that of {claimed[name]}")
            claimed[name] = where


def spec_path(path: tuple[str, ...]) -> str:
    """Return where people write what merged fields have at this path.

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
