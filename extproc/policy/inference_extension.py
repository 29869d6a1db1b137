"""InferenceObjective and InferenceModelRewrite (v1alpha2) -> what they say of a pool, in the terms of the policy.

Both groups that had them are read: llm-d.ai, and inference.networking.x-k8s.io.
Fields: https://github.com/llm-d/llm-d-inference-scheduler, `apix`. Fields that we do not know are left alone: the
resources are not ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.models.models import ANY_MODEL, ModelRule, ModelTarget
from extproc.policy.priority import PriorityClass
from extproc.policy.reading import PolicyDocumentError, created_at_of, record_of, shown, text_of

GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
VERSION = "v1alpha2"
POOL_GROUPS = ("inference.networking.k8s.io", "inference.networking.x-k8s.io")
POOL_KIND = "InferencePool"
LEAST_PRIORITY, MOST_PRIORITY = -(2**31), 2**31 - 1
MOST_WEIGHT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """How important the requests are that name it."""

    namespace: str
    name: str
    created_at: str  # RFC 3339, "" unknown
    pool: str  # namespace/name
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRule:
    """What becomes of requests for these models."""

    models: tuple[str, ...]  # as clients write them; (): every model
    targets: tuple[ModelTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRewrite:
    """The rules of one resource, in their order."""

    namespace: str
    name: str
    created_at: str
    pool: str
    rules: tuple[RewriteRule, ...]


def read_objective(document: Mapping[str, Any]) -> Objective:
    """Read an InferenceObjective. Raise PolicyDocumentError with the path of what is wrong."""
    namespace, name, created_at, spec = _head(document, "InferenceObjective")
    priority = spec.get("priority")
    return Objective(
        namespace=namespace,
        name=name,
        created_at=created_at,
        pool=_pool(spec, namespace),
        priority=0 if priority is None else _whole(priority, "spec.priority", LEAST_PRIORITY, MOST_PRIORITY),
    )


def read_model_rewrite(document: Mapping[str, Any]) -> ModelRewrite:
    """Read an InferenceModelRewrite. Raise PolicyDocumentError with the path of what is wrong."""
    namespace, name, created_at, spec = _head(document, "InferenceModelRewrite")
    rules = _list(spec.get("rules"), "spec.rules")
    return ModelRewrite(
        namespace=namespace,
        name=name,
        created_at=created_at,
        pool=_pool(spec, namespace),
        rules=tuple(_rule(rule, f"spec.rules[{i}]") for i, rule in enumerate(rules)),
    )


def objectives_of(
    pool: str, objectives: Iterable[Objective], classes: Mapping[str, PriorityClass]
) -> Mapping[str, str]:
    """Return objective -> class: the most important class that is no more important than the objective.

    Where all are, it is the least important one. Of objectives of one name the oldest counts.
    """
    ordered = sorted(classes.items(), key=lambda item: (-item[1].priority, item[0]))
    found: dict[str, str] = {}
    for objective in sorted(objectives, key=_age):
        if objective.pool == pool and ordered:
            fitting = [name for name, known in ordered if known.priority <= objective.priority]
            found.setdefault(objective.name, fitting[0] if fitting else ordered[-1][0])
    return found


def model_rules_of(pool: str, rewrites: Iterable[ModelRewrite]) -> list[ModelRule]:
    """Return the rewrites of a pool as rules of a model table; "*" is the rule for every other model.

    An exact match goes before the generic one wherever it stands; else the oldest resource, then its first rule.
    """
    found: dict[str, ModelRule] = {}
    for rewrite in sorted(rewrites, key=_age):
        if rewrite.pool != pool:
            continue
        for rule in rewrite.rules:
            for model in rule.models or (ANY_MODEL,):
                found.setdefault(model, ModelRule(model=model, targets=rule.targets))
    return list(found.values())


def _age(resource: Objective | ModelRewrite) -> tuple[bool, str, str, str]:
    return not resource.created_at, resource.created_at, resource.namespace, resource.name


def _head(document: object, kind: str) -> tuple[str, str, str, Mapping[str, Any]]:
    given = record_of(document, "document")
    group, _, version = str(given.get("apiVersion", "")).partition("/")
    if group not in GROUPS or version != VERSION:
        wanted = " or ".join(f"{known}/{VERSION}" for known in GROUPS)
        raise PolicyDocumentError("apiVersion", f"must be {wanted}, not {shown(given.get('apiVersion'))}")
    if given.get("kind") != kind:
        raise PolicyDocumentError("kind", f"must be {kind}, not {shown(given.get('kind'))}")
    metadata = record_of(given.get("metadata"), "metadata")
    return (
        text_of(metadata.get("namespace", "default"), "metadata.namespace", "a namespace's name"),
        text_of(metadata.get("name"), "metadata.name", "the object's name"),
        created_at_of(metadata),
        record_of(given.get("spec"), "spec"),
    )


def _pool(spec: Mapping[str, Any], namespace: str) -> str:
    reference = record_of(spec.get("poolRef"), "spec.poolRef")
    group, kind = reference.get("group", POOL_GROUPS[0]), reference.get("kind", POOL_KIND)
    if group not in POOL_GROUPS:
        raise PolicyDocumentError("spec.poolRef.group", f"must be {POOL_GROUPS[0]}, not {shown(group)}")
    if kind != POOL_KIND:
        raise PolicyDocumentError("spec.poolRef.kind", f"must be {POOL_KIND}, not {shown(kind)}")
    return f"{namespace}/{text_of(reference.get('name'), 'spec.poolRef.name', 'the name of an InferencePool')}"


def _rule(document: object, path: str) -> RewriteRule:
    given = record_of(document, path)
    targets = tuple(
        _rewrite_target(target, f"{path}.targets[{i}]")
        for i, target in enumerate(_list(given.get("targets"), f"{path}.targets"))
    )
    if not targets:
        raise PolicyDocumentError(f"{path}.targets", "must have at least one item")
    models = []
    for i, match in enumerate(_list(given.get("matches", []), f"{path}.matches")):
        where = f"{path}.matches[{i}]"
        model = record_of(record_of(match, where).get("model"), f"{where}.model")
        if model.get("type", "Exact") != "Exact":
            raise PolicyDocumentError(f"{where}.model.type", f"must be Exact, not {shown(model.get('type'))}")
        models.append(text_of(model.get("value"), f"{where}.model.value", "a model's name"))
    return RewriteRule(models=tuple(models), targets=_added_up(targets))


def _rewrite_target(document: object, path: str) -> ModelTarget:
    given = record_of(document, path)
    weight = given.get("weight")
    return ModelTarget(
        model=text_of(given.get("modelRewrite"), f"{path}.modelRewrite", "a model's name"),
        weight=1.0 if weight is None else float(_whole(weight, f"{path}.weight", 1, MOST_WEIGHT)),
    )


def _added_up(targets: Iterable[ModelTarget]) -> tuple[ModelTarget, ...]:
    weights: dict[str, float] = {}
    for target in targets:
        weights[target.model] = weights.get(target.model, 0.0) + target.weight
    return tuple(ModelTarget(model=model, weight=weight) for model, weight in weights.items())


def _whole(value: object, path: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise PolicyDocumentError(path, f"must be a whole number between {least} and {most}, not {shown(value)}")
    return value


def _list(value: object, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise PolicyDocumentError(path, f"must be a list, not {shown(value)}")
    return value
