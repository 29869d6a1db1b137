"""Turns merged fields into the policy of a picker, checked as a whole."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, TokensFrom
from extproc.policy.inference_policy import resets_of
from extproc.policy.merge import Layer, Level, merge_layers
from extproc.policy.priority import DEFAULT_CLASSES, Priorities, PriorityClass, StepKind
from extproc.policy.profiles import with_profile
from extproc.policy.reading import PolicyDocumentError, nearest, require
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.spec import Models, Served, Spec
from extproc.policy.values import PRESETS, PickPolicy

MOST_CLASSES = 256  # of all policies together: each has its own queue and metrics
ROUNDING = 1e-9
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {name: msgspec.to_builtins(each) for name, each in DEFAULT_CLASSES.items()}


def pick_policy(fields: Mapping[str, Any], *, rewrites: Sequence[ModelRule] = ()) -> tuple[PickPolicy, ModelTable]:
    """Read merged `fields`; `rewrites` are further rules, for models without a rule in the fields.

    A profile among the fields is added below them, which changes nothing if they are merged with it already.

    Raise PolicyDocumentError with the `spec` path of an error that only the merged policy shows: a class that no policy
    declares, reserved shares above 1, a scale-up threshold not above its scale-down one, a target that is not served,
    more classes than a picker can have.
    """
    if "profile" in fields:
        layer = Layer(source="fields", level=Level.SETTINGS, created_at=None, fields=fields)
        fields = merge_layers(with_profile([layer]), resets=resets_of).fields
    given: Mapping[str, Mapping[str, Any]] = fields.get("priorities", {}).get("classes", {})
    classes = {**_DEFAULTS, **{name: {**_DEFAULTS.get(name, {}), **part} for name, part in given.items()}}
    if len(classes) > MOST_CLASSES:
        message = f"{len(classes)} in all policies; at most {MOST_CLASSES} can be"
        raise PolicyDocumentError("spec.priorities.classes", message)
    spec = msgspec.convert(
        {**fields, "priorities": {**fields.get("priorities", {}), "classes": classes}}, Spec, dec_hook=_custom
    )
    scoring, cache, load = spec.scoring, spec.prefix_cache, spec.load
    weights = {name: weight for name, weight in {**PRESETS[scoring.strategy], **scoring.weights}.items() if weight}
    weights |= {name: weight for name, weight in scoring.plugins.items() if weight}
    if not weights:
        raise PolicyDocumentError("spec.scoring.weights", "every weight is 0")
    for path, section in (
        ("spec.disaggregation", spec.disaggregation),
        *((f"spec.autoscale.{role}", scaled) for role, scaled in spec.autoscale.by_role.items()),
    ):
        require(section.conditions, msgspec.to_builtins(section), path)
    priorities = spec.priorities
    _require_classes(priorities)
    policy = PickPolicy(
        strategy=scoring.strategy,
        weights=weights,
        stale_after_seconds=load.stale_after_seconds,
        fallbacks=scoring.fallbacks,
        tier_weights=cache.tier_weights,
        alert_hit_ratio=cache.alert_hit_ratio,
        recent_prefix_seconds=cache.recent_seconds,
        session_seconds=scoring.session_seconds,
        prefill_tokens_per_second=load.prefill_tokens_per_second,
        health=load.health,
        copy_hot_prefixes=cache.copy_hot_prefixes,
        disaggregation=spec.disaggregation,
        autoscale=spec.autoscale,
        priorities=PriorityPolicy(
            classes=_with_falling_ceilings(priorities.classes),
            default_class=priorities.default_class,
            rules=priorities.rules,
            objectives=priorities.objectives,
            trust_objective=priorities.trust_objective,
            tenant_header=priorities.tenants.header,
            tenant_claim=priorities.tenants.claim,
            quotas=spec.quotas,
            engine_priority=priorities.engine_priority,
            overload=load.overload,
            shadow=spec.shadow,
        ),
        observability=spec.observability,
    )
    models = _model_table(spec.models, rewrites)
    if models.only_listed:
        _require_listed(models, policy)
    return policy, models


def _custom(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise NotImplementedError(kind)
    return Path(value)


def _require_classes(priorities: Priorities) -> None:
    classes = priorities.classes
    for name, priority_class in classes.items():
        for i, step in enumerate(priority_class.degrade):
            if step.step is StepKind.REJECT and not priority_class.sheddable:
                path = f"spec.priorities.classes[{name}].degrade[{i}].step"
                raise PolicyDocumentError(path, "only sheddable classes may be refused (sheddable: true)")
    reserved = sum(priority_class.reserved_share for priority_class in classes.values())
    if reserved > 1 + ROUNDING:
        message = f"the reserved shares add up to {reserved:g}, and there is only 1 to share"
        raise PolicyDocumentError("spec.priorities.classes", message)
    for path, name in (
        ("defaultClass", priorities.default_class),
        *((f"objectives[{objective}]", name) for objective, name in priorities.objectives.items()),
        *((f"rules[{i}].priorityClass", rule.priority_class) for i, rule in enumerate(priorities.rules)),
    ):
        if name not in classes:
            raise PolicyDocumentError(f"spec.priorities.{path}", f"there is no class {name!r}{nearest(name, classes)}")


def _with_falling_ceilings(classes: Mapping[str, PriorityClass]) -> Mapping[str, PriorityClass]:
    """Cap each class's ceiling at the lowest one of the more important classes: otherwise it would overtake them."""
    lowest = {
        priority: min(item.ceiling for item in classes.values() if item.priority >= priority)
        for priority in {item.priority for item in classes.values()}
    }
    return {
        name: (
            item
            if item.ceiling <= lowest[item.priority]
            else msgspec.structs.replace(item, ceiling=lowest[item.priority])
        )
        for name, item in classes.items()
    }


def _model_table(models: Models, rewrites: Sequence[ModelRule]) -> ModelTable:
    rules = [
        ModelRule(
            model=rule.model,
            targets=tuple(ModelTarget(model=target.model, weight=target.weight) for target in rule.targets),
            sticky_by=rule.sticky_by,
            sticky_header=rule.sticky_header,
            fallbacks=rule.fallbacks,
        )
        for rule in models.rules
    ]
    named = {rule.model for rule in rules}
    return ModelTable(
        served=tuple(_served_model(each) for each in models.served),
        rules=(*rules, *(rule for rule in rewrites if rule.model not in named)),
        only_listed=models.only_listed,
    )


def _served_model(model: Served) -> ServedModel:
    return ServedModel(
        name=model.name,
        aliases=model.aliases,
        adapters=model.adapters,
        tokens_from=model.tokens or (TokensFrom.AUTO if model.tokenizer is None else TokensFrom.TOKENIZER),
        tokenizer_folder=model.tokenizer,
        chat_template=model.chat_template,
        chat_template_kwargs={name: _json_or_text(value) for name, value in model.chat_template_kwargs.items()},
        max_model_len=model.max_model_len,
    )


def _json_or_text(value: str) -> Any:
    """Return the JSON value, or the text if it is not JSON; NaN and lone surrogates count as text, for the pages."""
    try:
        found = json.loads(value, parse_constant=_refuse)
        json.dumps(found, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return value
    return found


def _refuse(word: str) -> None:
    raise ValueError(word)


def _require_listed(models: ModelTable, policy: PickPolicy) -> None:
    for i, rule in enumerate(models.rules):
        for name in (*(target.model for target in rule.targets), *rule.fallbacks):
            if models.served_as(name) is None and models.base_of(name) is None:
                raise PolicyDocumentError(
                    f"spec.models.rules[{i}]",
                    f"{name!r} is neither a served model nor an adapter in spec.models.served, and onlyListed refuses "
                    "all others",
                )
    for class_name, priority_class in policy.priorities.classes.items():
        for i, step in enumerate(priority_class.degrade):
            if step.model and step.model not in models.names():
                raise PolicyDocumentError(
                    f"spec.priorities.classes[{class_name}].degrade[{i}].model",
                    f"{step.model!r} is not in spec.models and would be answered 404 (onlyListed)",
                )
