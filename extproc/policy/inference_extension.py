"""InferenceObjective and InferenceModelRewrite (v1alpha2), translated into the terms of a pool's policy.

Both API groups are read: llm-d.ai, and inference.networking.x-k8s.io; of llm-d.ai's objectives also v1, with several
pools. Fields: https://github.com/llm-d/llm-d-router, `apix`. Unknown fields are ignored: the resources are not
ours.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from extproc.models.models import ANY_MODEL, ModelRule, ModelTarget
from extproc.policy.priority import PriorityClass
from extproc.policy.reading import PolicyDocumentError, created_at_of, read_record, read_text, record_of, shown
from extproc.policy.schema import Name, Section, Text, kind_of

GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
VERSION = "v1alpha2"
LLM_D_OBJECTIVE = ("llm-d.ai", "v1", "InferenceObjective")
MOST_RULES = 10_000
NAME = Text(least=1, most=253, pattern="", meaning="")
T = TypeVar("T", bound=Section)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The priority of requests that name this objective."""

    namespace: str
    name: str
    created_at: str  # RFC 3339, "" unknown
    pools: tuple[str, ...]  # namespace/name
    priority: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRule:
    """A rewrite or split of requests for these models."""

    models: tuple[str, ...]  # clients' names; (): every model
    targets: tuple[ModelTarget, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRewrite:
    """The rules of one resource, in order."""

    namespace: str
    name: str
    created_at: str
    pool: str
    rules: tuple[RewriteRule, ...]


class _Open(Section, frozen=True, kw_only=True):
    is_open = True


class _PoolRef(_Open, frozen=True, kw_only=True):
    group: Literal["inference.networking.k8s.io", "inference.networking.x-k8s.io"] = "inference.networking.k8s.io"
    kind: Literal["InferencePool"] = "InferencePool"
    name: Name


class _ObjectiveSpec(_Open, frozen=True, kw_only=True):
    pool_ref: _PoolRef | None = None
    pool_refs: Annotated[tuple[_PoolRef, ...], Meta(max_length=16)] = ()
    priority: Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)] = 0


class _Model(_Open, frozen=True, kw_only=True):
    type: Literal["Exact"] = "Exact"
    value: Name


class _Match(_Open, frozen=True, kw_only=True):
    model: _Model


class _Target(_Open, frozen=True, kw_only=True):
    model_rewrite: Name
    weight: Annotated[int, Meta(ge=1, le=10**6)] = 1


class _Rule(_Open, frozen=True, kw_only=True):
    matches: Annotated[tuple[_Match, ...], Meta(max_length=MOST_RULES)] = ()
    targets: Annotated[tuple[_Target, ...], Meta(min_length=1, max_length=MOST_RULES)]

    def rule(self) -> RewriteRule:
        weights: dict[str, float] = {}
        for target in self.targets:
            weights[target.model_rewrite] = weights.get(target.model_rewrite, 0.0) + target.weight
        return RewriteRule(
            models=tuple(match.model.value for match in self.matches),
            targets=tuple(ModelTarget(model=model, weight=weight) for model, weight in weights.items()),
        )


class _RewriteSpec(_Open, frozen=True, kw_only=True):
    pool_ref: _PoolRef
    rules: Annotated[tuple[_Rule, ...], Meta(max_length=MOST_RULES)]


def read_objective(document: Mapping[str, Any]) -> Objective:
    """Read an InferenceObjective. Raise PolicyDocumentError with the path of the wrong field."""
    metadata, spec = _read(document, "InferenceObjective", _ObjectiveSpec)
    references = spec.pool_refs or ((spec.pool_ref,) if spec.pool_ref else ())
    if not references:
        raise PolicyDocumentError("spec.poolRef", "is missing; in v1 poolRefs (poolSelector is not read)")
    pools = tuple(f"{metadata['namespace']}/{reference.name}" for reference in references)
    return Objective(**metadata, pools=pools, priority=spec.priority)


def read_model_rewrite(document: Mapping[str, Any]) -> ModelRewrite:
    """Read an InferenceModelRewrite. Raise PolicyDocumentError with the path of the wrong field."""
    metadata, spec = _read(document, "InferenceModelRewrite", _RewriteSpec)
    pool = f"{metadata['namespace']}/{spec.pool_ref.name}"
    return ModelRewrite(**metadata, pool=pool, rules=tuple(rule.rule() for rule in spec.rules))


def objectives_of(
    pool: str, objectives: Iterable[Objective], classes: Mapping[str, PriorityClass]
) -> Mapping[str, str]:
    """Return objective -> class: the class with the highest priority not above the objective's.

    If all classes are above it, the lowest one. Of objectives with equal names the oldest counts.
    """
    ordered = sorted(classes.items(), key=lambda item: (-item[1].priority, item[0]))
    found: dict[str, str] = {}
    for objective in sorted(objectives, key=_age):
        if pool in objective.pools and ordered:
            fitting = [name for name, known in ordered if known.priority <= objective.priority]
            found.setdefault(objective.name, fitting[0] if fitting else ordered[-1][0])
    return found


def model_rules_of(pool: str, rewrites: Iterable[ModelRewrite]) -> list[ModelRule]:
    """Return the rewrites of a pool as rules of a model table; "*" is the rule for every other model.

    An exact match precedes the generic one, wherever it stands. Among equal matches the oldest resource wins, then its
    first rule.
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


def _read(document: object, kind: str, struct: type[T]) -> tuple[dict[str, str], T]:
    given = record_of(document, "document")
    group, _, version = str(given.get("apiVersion", "")).partition("/")
    if (group not in GROUPS or version != VERSION) and (group, version, kind) != LLM_D_OBJECTIVE:
        wanted = " or ".join(f"{known}/{VERSION}" for known in GROUPS)
        raise PolicyDocumentError("apiVersion", f"must be {wanted}, not {shown(given.get('apiVersion'))}")
    if given.get("kind") != kind:
        raise PolicyDocumentError("kind", f"must be {kind}, not {shown(given.get('kind'))}")
    metadata = record_of(given.get("metadata"), "metadata")
    head = {
        "namespace": read_text(NAME, metadata.get("namespace", "default"), "metadata.namespace"),
        "name": read_text(NAME, metadata.get("name"), "metadata.name"),
        "created_at": created_at_of(metadata),
    }
    return head, msgspec.convert(read_record(kind_of(struct), given.get("spec"), "spec"), struct)
