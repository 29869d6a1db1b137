"""The outcome of policies at each pool: merged, checked as a whole, and repaired from the last valid one if invalid.

Pools with the same layers share one outcome, so that a change costs one merge per distinct set of layers.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from extproc.errors import ConfigError
from extproc.models.models import ModelTable
from extproc.policy.inference_extension import ModelRewrite, Objective, model_rules_of, objectives_of
from extproc.policy.inference_policy import resets_of, spec_path
from extproc.policy.merge import NO_AGE, Layer, Merged, merge_layers, precedence
from extproc.policy.merged_policy import pick_policy
from extproc.policy.profiles import with_profile
from extproc.policy.values import PickPolicy
from extproc.reach.intake import Held
from extproc.reach.warnings import merged_warnings

logger = logging.getLogger(__name__)

OBJECTIVE, REWRITE = "InferenceObjective", "InferenceModelRewrite"
written_path = lru_cache(maxsize=1 << 14)(spec_path)  # a few hundred paths recur
SETTINGS = "settings"  # source name of the picker's own flags; never at fault here, as they are checked at start-up


class MergeDefectError(ConfigError):
    """A defect in our code that some policy triggers; that policy is held back like a contradictory one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayer:
    """A layer with its policy's version, the key for caching outcomes."""

    layer: Layer
    version: int
    generation: int

    @property
    def source(self) -> str:
        """The policy's "namespace/name"."""
        return self.layer.source

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal keys mean equal layers."""
        return (self.layer.source, self.layer.level, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """Objectives and model rewrites of the inference extension that name one pool."""

    objectives: tuple[Held[Objective], ...] = ()
    rewrites: tuple[Held[ModelRewrite], ...] = ()

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """Equal keys mean equal extensions."""
        return (
            *((f"{OBJECTIVE} {held.source}", held.version) for held in self.objectives),
            *((f"{REWRITE} {held.source}", held.version) for held in self.rewrites),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A policy (or a model rewrite) that is not in force at a pool, and why."""

    source: str
    pool: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result in force for these layers."""

    layers: tuple[PoolLayer, ...]
    merged: Merged
    policy: PickPolicy
    models: ModelTable
    origins: Mapping[str, str]  # by path in the document
    extended: Mapping[str, Any]  # the same paths -> values added by objectives and model rewrites
    warnings: tuple[str, ...]
    faults: tuple[Fault, ...] = ()


Merge = Callable[[Sequence[PoolLayer]], Outcome]  # for one pool; raises ConfigError
Left = list[tuple[PoolLayer, ConfigError]]  # layers that contradict the others, and why


@dataclass(slots=True)
class OutcomeBook:
    """Outcomes by pool, each the last valid one."""

    _by_pool: dict[str, tuple[Any, Outcome]] = field(default_factory=dict)  # pool -> key of its inputs, the outcome
    _shared: dict[Any, Outcome] = field(default_factory=dict)
    merges: int = 0  # number of computed merges, for tests and measurements

    def settle(self, wanted: Mapping[str, tuple[Sequence[PoolLayer], Extensions]]) -> dict[str, Outcome]:
        """Return the outcome of every pool; an unchanged one stays the same object."""
        by_pool: dict[str, tuple[Any, Outcome]] = {}
        repaired: dict[Any, Outcome] = {}  # a contradiction mostly affects many pools with the same past
        contradicting: set[str] = set()
        for pool, (layers, extensions) in wanted.items():
            key = (tuple(layer.key for layer in layers), extensions.key, pool if extensions.key else "")
            known, before = self._by_pool.get(pool, (None, None))
            if before is None or known != key:
                found = self._shared.get(key) or repaired.get((key, id(before)))
                if found is None:
                    merge = partial(self._merge, pool, extensions)
                    try:
                        self._shared[key] = found = merge(layers)
                    except ConfigError as error:
                        if isinstance(error, MergeDefectError):
                            logger.exception("policies could not be merged", extra={"pool": pool})
                        found = _repaired(pool, layers, merge, before, contradicting=contradicting)
                        repaired[key, id(before)] = found
                before = found
            by_pool[pool] = (key, before)
        self._by_pool = by_pool
        used = {key for key, _ in by_pool.values()}
        self._shared = {key: outcome for key, outcome in self._shared.items() if key in used}
        return {pool: outcome for pool, (_, outcome) in by_pool.items()}

    def _merge(self, pool: str, extensions: Extensions, layers: Sequence[PoolLayer]) -> Outcome:
        self.merges += 1
        try:
            return merge_pool(pool, layers, extensions)
        except ConfigError:
            raise
        except Exception as error:
            raise MergeDefectError(f"cannot be merged: {type(error).__name__}") from error


def _repaired(
    pool: str, layers: Sequence[PoolLayer], merge: Merge, before: Outcome | None, *, contradicting: set[str]
) -> Outcome:
    """Return the last valid outcome with every change that agrees, the oldest first, and a fault for each other one.

    A removed policy stays in force if others need it. `contradicting` are the policies found at other pools; it grows.
    """
    good = {each.source: each for each in before.layers} if before else {}
    changed = [each for each in layers if good.get(each.source) != each and each.source != SETTINGS]
    kept = [good.get(each.source, each) for each in layers if each.source in good or each.source == SETTINGS]
    faults: list[Fault] = []
    outcome = _try(merge, kept)
    if outcome is None:  # something that was removed is needed
        assert before is not None, "the settings are valid"
        outcome, there = before, {each.source for each in layers}
        for source in [each for each in good if each not in there]:
            outcome = _try(merge, [each for each in outcome.layers if each.source != source]) or outcome
        settings = merge([each for each in layers if each.source == SETTINGS])
        _, left = _agreeing(merge, settings, [each for each in layers if each.source != SETTINGS])
        instead = "what was in force there before stays"
        faults = [Fault(source=each.source, pool=pool, message=f"{why}; {instead}") for each, why in left]
    likely = [each for each in changed if each.source not in contradicting]
    if contradicting and (all_likely := _try(merge, _with(outcome, *likely))) is not None:
        outcome, changed = all_likely, [each for each in changed if each.source in contradicting]
    outcome, left = _agreeing(merge, outcome, changed)
    contradicting.update(each.source for each, _ in left)
    faults = [*(_fault(each, good.get(each.source), pool, why) for each, why in left), *faults]
    said = {fault.source: fault for fault in reversed(faults)}  # one per policy, its change before a removal
    return replace(outcome, faults=(*outcome.faults, *said.values()))


def _agreeing(merge: Merge, outcome: Outcome, changed: Sequence[PoolLayer]) -> tuple[Outcome, Left]:
    """Apply changes, the oldest first, and retry the ones that needed a later one; return the rest, and why."""
    waiting, left = sorted(changed, key=_age), list[tuple[PoolLayer, ConfigError]]()
    while waiting:
        left = []
        for layer in waiting:
            try:
                outcome = merge(_with(outcome, layer))
            except ConfigError as error:
                left.append((layer, error))
        if len(left) == len(waiting):
            break
        waiting = [layer for layer, _ in left]
    return outcome, left


def _with(outcome: Outcome, *layers: PoolLayer) -> Sequence[PoolLayer]:
    sources = {each.source for each in layers}
    return [*(each for each in outcome.layers if each.source not in sources), *layers]


def _try(merge: Merge, layers: Sequence[PoolLayer]) -> Outcome | None:
    try:
        return merge(layers)
    except ConfigError:
        return None


def merge_pool(pool: str, layers: Iterable[PoolLayer], extensions: Extensions) -> Outcome:
    """Merge and check as a whole. Raise ConfigError with the path of the contradiction."""
    ordered = tuple(sorted(layers, key=lambda each: precedence(each.layer), reverse=True))
    merged = merge_layers(with_profile([each.layer for each in ordered]), resets=resets_of)
    origins = {written_path(path): source for path, source in merged.origins.items()}
    policy, models = pick_policy(merged.fields)
    rewrites, faults = _agreeing_rewrites(pool, merged.fields, extensions.rewrites)
    if rewrites:
        policy, models = pick_policy(merged.fields, rewrites=model_rules_of(pool, rewrites))
    own = {rule["model"] for rule in merged.fields.get("models", {}).get("rules", ())}
    extended: dict[str, Any] = {
        f"spec.models.rules[{rule.model}]": {"model": rule.model, "targets": [asdict(each) for each in rule.targets]}
        for rule in models.rules
        if rule.model not in own
    }
    origins |= dict.fromkeys(extended, REWRITE)
    policy = _with_objectives(pool, policy, extensions.objectives, extended, origins)
    return Outcome(
        layers=ordered,
        merged=merged,
        policy=policy,
        models=models,
        origins=origins,
        extended=extended,
        warnings=tuple(merged_warnings(policy, models)),
        faults=faults,
    )


def _agreeing_rewrites(
    pool: str, fields: Mapping[str, Any], rewrites: Sequence[Held[ModelRewrite]]
) -> tuple[list[ModelRewrite], tuple[Fault, ...]]:
    """Return the rewrites that agree with the policies. Rules are by model, so each rewrite is checked separately."""
    good: list[ModelRewrite] = []
    faults: list[Fault] = []
    models = {"models": fields["models"]} if "models" in fields else {}
    for held in rewrites:
        if held.good is None:
            continue
        try:
            pick_policy(models, rewrites=model_rules_of(pool, [held.good]))
            good.append(held.good)
        except ConfigError as error:
            faults.append(Fault(source=f"{REWRITE} {held.source}", pool=pool, message=str(error)))
    return good, tuple(faults)


def _with_objectives(
    pool: str,
    policy: PickPolicy,
    objectives: Sequence[Held[Objective]],
    extended: dict[str, Any],
    origins: dict[str, str],
) -> PickPolicy:
    good = [held.good for held in objectives if held.good is not None]
    if not good:
        return policy
    priorities = policy.priorities
    found = {
        name: word
        for name, word in objectives_of(pool, good, priorities.classes).items()
        if name not in priorities.objectives
    }
    for name, word in found.items():
        path = written_path(("priorities", "objectives", name))
        extended[path] = word
        origins[path] = f"{OBJECTIVE} {pool.partition('/')[0]}/{name}"  # a pool's objectives are in its namespace
    return replace(policy, priorities=replace(priorities, objectives={**priorities.objectives, **found}))


def _fault(layer: PoolLayer, earlier: PoolLayer | None, pool: str, error: ConfigError) -> Fault:
    instead = f"generation {earlier.generation} of it stays in force there" if earlier else "it is left out there"
    return Fault(source=layer.source, pool=pool, message=f"{error}; {instead}")


def _age(layer: PoolLayer) -> tuple[str, int, str]:
    return (layer.layer.created_at or NO_AGE, layer.layer.level, layer.layer.source)
