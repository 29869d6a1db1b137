"""One InferencePolicy (kvmesh.io/v1alpha1) -> what it says, as the partial documents that the picker reads; strict.

Called by whoever gets documents, from Kubernetes or a folder. `parse_inference_policy` reads one; what several say is
put together elsewhere, and `pick_policy` reads the whole. docs/inference-policy.md has the fields.
"""

import json
from collections.abc import Mapping
from typing import Any

from extproc.errors import ConfigError
from extproc.models.models import ModelTable
from extproc.models.models_document import parse_models
from extproc.policy.document import parse_policy
from extproc.policy.field_kinds import Path, Text
from extproc.policy.fields import OBJECT_NAME, SPEC
from extproc.policy.paths import in_words_of_the_resource, spec_path
from extproc.policy.priority import DEFAULT_CLASSES
from extproc.policy.reading import (
    PolicyDocumentError,
    child,
    created_at_of,
    read_record,
    read_text,
    record_of,
    shown,
)
from extproc.policy.resource import InferencePolicy, TargetRef
from extproc.policy.values import PickPolicy
from extproc.policy.warnings import merged_warnings, warnings

__all__ = [
    "RESETS",
    "InferencePolicy",
    "PolicyDocumentError",
    "TargetRef",
    "merged_warnings",
    "parse_inference_policy",
    "pick_policy",
    "spec_path",
    "warnings",
]

GROUP, VERSION, KIND = "kvmesh.io", "v1alpha1", "InferencePolicy"
API_VERSION = f"{GROUP}/{VERSION}"
TOP_LEVEL = ("apiVersion", "kind", "metadata", "spec", "status")
TARGET_REFS = "target_refs"
MOST_CLASSES = 256  # of all policies together: each has a queue and metrics of its own
NAME = Text(most=253, pattern=OBJECT_NAME, words="an object's name (lower case)")
NAMESPACE = Text(most=63, pattern=OBJECT_NAME, words="a namespace's name (lower case)")
# a policy that gives the first drops what wider ones have under the second: a preset is meant to be one
RESETS: Mapping[Path, tuple[Path, ...]] = {("policy", "strategy"): (("policy", "weights"),)}


def parse_inference_policy(document: Mapping[str, Any]) -> InferencePolicy:
    """Read a document as the API has it. Raise PolicyDocumentError with the path of the first wrong field."""
    given = _top_level(document)
    metadata = record_of(given["metadata"], "metadata")
    fields = read_record(SPEC, given["spec"], "spec")
    for model in fields.get("models", {}).get("served", ()):
        if "chat_template_kwargs" in model:
            model["chat_template_kwargs"] = {
                name: _json_or_text(value) for name, value in model["chat_template_kwargs"].items()
            }
    references = fields.pop(TARGET_REFS, [])
    policy = InferencePolicy(
        namespace=read_text(NAMESPACE, metadata.get("namespace", "default"), "metadata.namespace"),
        name=read_text(NAME, metadata.get("name"), "metadata.name"),
        created_at=created_at_of(metadata),
        generation=_generation(metadata.get("generation"), "metadata.generation"),
        target_refs=tuple(TargetRef(**reference) for reference in references),
        fields=fields,
    )
    _require_lists_make_sense(fields)
    return policy


def pick_policy(fields: Mapping[str, Any]) -> tuple[PickPolicy, ModelTable]:
    """Read merged `fields`. Raise PolicyDocumentError with the `spec` path of what only the whole can show.

    That is: a class that nobody declares, reserved shares above 1, growing below shrinking, an arm that is not served,
    more classes than a picker can have.
    """
    _require_few_classes(fields)
    try:
        policy, models = parse_policy(fields.get("policy", {})), parse_models(fields.get("models"))
    except ConfigError as error:
        raise in_words_of_the_resource(str(error), fields) from error
    if models.only_listed:
        _require_smaller_models_are_listed(policy, models)
    return policy, models


def _require_few_classes(fields: Mapping[str, Any]) -> None:
    """Refuse too many before they are read, which would take long."""
    given = fields.get("policy", {}).get("priorities", {}).get("classes", {})
    count = len({*DEFAULT_CLASSES, *given})
    if count > MOST_CLASSES:
        raise PolicyDocumentError("spec.priorities.classes", f"{count} in all policies; at most {MOST_CLASSES} can be")


def _require_smaller_models_are_listed(policy: PickPolicy, models: ModelTable) -> None:
    for name, priority_class in policy.priorities.classes.items():
        for i, step in enumerate(priority_class.degrade):
            if step.model and step.model not in models.names():
                raise PolicyDocumentError(
                    f"spec.priorities.classes[{name}].degrade[{i}].model",
                    f"{step.model!r} is not in spec.models and would be answered 404 (onlyListed)",
                )


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


def _json_or_text(value: str) -> Any:
    """Return what JSON says, else the text: NaN and halves of characters are none, and no page could show them."""
    try:
        found = json.loads(value, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return value
    return found


def _refuse(word: str) -> None:
    raise ValueError(word)


def _generation(value: object, path: str) -> int:
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise PolicyDocumentError(path, f"must be a whole number, not {shown(value)}")
    return value


def _require_lists_make_sense(fields: Mapping[str, Any]) -> None:
    """Lists are merged as a whole: what contradicts within one is wrong whatever the other policies say."""
    quotas = fields.get("policy", {}).get("priorities", {}).get("quotas", ())
    for i, quota in enumerate(quotas):
        for j, earlier in enumerate(quotas[:i]):
            if earlier["tenant"] in ("*", quota["tenant"]) and earlier["model"] in ("*", quota["model"]):
                raise PolicyDocumentError(
                    f"spec.quotas[{i}]",
                    f"never counts: spec.quotas[{j}] comes first and matches all that it matches",
                )
    models = {name: fields["models"][name] for name in ("served", "rules") if name in fields.get("models", {})}
    try:
        parse_models(models)
    except ConfigError as error:
        raise in_words_of_the_resource(str(error), {"models": models}) from error
