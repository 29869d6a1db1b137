"""What policies come to for each pool: merged, checked as a whole, and kept as last good where the whole is not valid.

Pools with the same layers share one outcome, so that a change costs what it touches.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from extproc.errors import ConfigError
from extproc.models.models import ModelTable
from extproc.policy.inference_extension import ModelRewrite, Objective, model_rules_of, objectives_of
from extproc.policy.inference_policy import RESETS, spec_path
from extproc.policy.intake import Held
from extproc.policy.merge import NO_AGE, Layer, Merged, merge_layers, precedence
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from extproc.policy.warnings import merged_warnings

logger = logging.getLogger(__name__)

OBJECTIVE, REWRITE = "InferenceObjective", "InferenceModelRewrite"
written_path = lru_cache(maxsize=1 << 14)(spec_path)  # the same few hundred paths again and again
SETTINGS = "settings"  # the source of the picker's own flags; never at fault here, they were checked at start-up
MOST_SUSPECTS = 8  # that are looked at one by one: with more changes at once, as after a start, what agrees is taken
MOST_PASSES = 4  # over what does not agree: each brings in what needed something of the pass before


class MergeDefectError(ConfigError):
    """A defect that some policy meets; it is held back like a contradiction, and the other pools go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayer:
    """A layer with the version of the policy behind it: what outcomes are remembered by."""

    layer: Layer
    version: int
    generation: int

    @property
    def source(self) -> str:
        """The policy: "namespace/name"."""
        return self.layer.source

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal keys: equal layers."""
        return (self.layer.source, self.layer.level, self.version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Extensions:
    """Objectives and model rewrites of the inference extension that name one pool."""

    objectives: tuple[Held[Objective], ...] = ()
    rewrites: tuple[Held[ModelRewrite], ...] = ()

    @property
    def key(self) -> tuple[tuple[str, int], ...]:
        """Equal keys: equal extensions."""
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
    """What is in force where these layers meet."""

    layers: tuple[PoolLayer, ...]
    merged: Merged
    policy: PickPolicy
    models: ModelTable
    origins: Mapping[str, str]  # by the path that people write
    extended: Mapping[str, Any]  # the same paths, for what objectives and model rewrites have added: its value
    warnings: tuple[str, ...]
    faults: tuple[Fault, ...] = ()


Merge = Callable[[Sequence[PoolLayer]], Outcome]  # of one pool; raises ConfigError
Left = list[tuple[PoolLayer, ConfigError]]  # layers that do not agree with the others, and why


@dataclass(slots=True)
class OutcomeBook:
    """Outcomes by pool, and the last good one of each."""

    _by_pool: dict[str, tuple[Any, Outcome]] = field(default_factory=dict)  # with the key of what was asked for
    _shared: dict[Any, Outcome] = field(default_factory=dict)
    merges: int = 0  # how many were computed, for tests and measurements

    def settle(self, wanted: Mapping[str, tuple[Sequence[PoolLayer], Extensions]]) -> dict[str, Outcome]:
        """Return the outcome of every pool; the same object where nothing has changed for it."""
        by_pool: dict[str, tuple[Any, Outcome]] = {}
        repair = _Repair()
        for pool, (layers, extensions) in wanted.items():
            key = (tuple(layer.key for layer in layers), extensions.key, pool if extensions.key else "")
            known, before = self._by_pool.get(pool, (None, None))
            if before is None or known != key:
                merge = partial(self._merge, pool, extensions)
                found = self._shared.get(key) or repair.known(key, before)
                before = found or self._new(pool, layers, merge, key, before, repair)
            by_pool[pool] = (key, before)
        self._by_pool = by_pool
        used = {key for key, _ in by_pool.values()}
        self._shared = {key: outcome for key, outcome in self._shared.items() if key in used}
        return {pool: outcome for pool, (_, outcome) in by_pool.items()}

    def _new(
        self, pool: str, layers: Sequence[PoolLayer], merge: Merge, key: Any, before: Outcome | None, repair: "_Repair"
    ) -> Outcome:
        try:
            self._shared[key] = outcome = merge(layers)
        except ConfigError as error:
            if isinstance(error, MergeDefectError):
                logger.exception("policies could not be merged", extra={"pool": pool})
            outcome = repair.repaired(pool, layers, merge, before, error)
            repair.keep(key, before, outcome)
        return outcome

    def _merge(self, pool: str, extensions: Extensions, layers: Sequence[PoolLayer]) -> Outcome:
        self.merges += 1
        try:
            return merge_pool(pool, layers, extensions)
        except ConfigError:
            raise
        except Exception as error:
            raise MergeDefectError(f"cannot be merged: {type(error).__name__}") from error


class _Repair:
    """Finds the best that is valid where the whole is not; remembers, for one `settle`, what it has found.

    A mesh-wide policy that contradicts does so at hundreds of pools: each search costs tens of merges without that.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, int], Outcome] = {}
        self._culprits: dict[str, str] = {}  # by the contradiction's message, which policy was held back for it last

    def known(self, key: Any, before: Outcome | None) -> Outcome | None:
        """Return what was found for a pool with the same layers and the same past."""
        return self._known.get((key, id(before)))

    def keep(self, key: Any, before: Outcome | None, outcome: Outcome) -> None:
        """Remember it for such a pool."""
        self._known[key, id(before)] = outcome

    def repaired(
        self, pool: str, layers: Sequence[PoolLayer], merge: Merge, before: Outcome | None, error: ConfigError
    ) -> Outcome:
        """Return the best that is valid: all but one as wanted, else what agrees; what is gone stays where needed."""
        good = {each.source: each for each in before.layers} if before else {}
        changed = [each for each in layers if good.get(each.source) != each and each.source != SETTINGS]
        # the youngest is the most likely to be wrong, but for one that the same message was the fault of elsewhere
        culprit, suspects = self._culprits.get(str(error)), sorted(changed, key=_age, reverse=True)
        suspects.sort(key=lambda each: each.source != culprit)
        for suspect in suspects[:MOST_SUSPECTS]:
            earlier = good.get(suspect.source)
            others = [each for each in layers if each.source != suspect.source]
            outcome = _try(merge, others if earlier is None else [*others, earlier])
            if outcome is not None:
                self._culprits[str(error)] = suspect.source
                return replace(outcome, faults=(*outcome.faults, _fault(suspect, earlier, pool, error)))
        untouched = [each for each in layers if each not in changed]
        faults: list[Fault] = []
        found = _try(merge, untouched + [good[each.source] for each in changed if each.source in good])
        if found is None:
            faults = _broken_by_a_removal(pool, layers, merge)
            kept = {each.source for each in layers}
            gone = [each for source, each in good.items() if source not in kept]
            found = _without(merge, merge(list(good.values())), gone)  # with what is gone: it was valid before
        outcome, left = _agreeing(merge, found, changed)
        if len(left) == 1:
            self._culprits[str(error)] = left[0][0].source
        faults = [*(_fault(each, good.get(each.source), pool, why) for each, why in left), *faults]
        said = {fault.source: fault for fault in reversed(faults)}  # one for each, the change before the removal
        return replace(outcome, faults=(*outcome.faults, *said.values()))


def _agreeing(merge: Merge, outcome: Outcome, changed: Sequence[PoolLayer]) -> tuple[Outcome, Left]:
    """Apply changes, the oldest first, and again those that needed a later one; return what is left, and why."""
    left: Left = []
    waiting = sorted(changed, key=_age)
    for _ in range(MOST_PASSES):
        if not waiting:
            return outcome, []
        outcome, left = _applied(merge, outcome, waiting)
        if len(left) == len(waiting):
            break
        waiting = [layer for layer, _ in left]
    return outcome, left


def _applied(merge: Merge, outcome: Outcome, changed: Sequence[PoolLayer]) -> tuple[Outcome, Left]:
    """Apply all at once, else one half after the other: few that are wrong are found in few merges."""
    try:
        return merge([*_others(outcome, changed), *changed]), []
    except ConfigError as error:
        if len(changed) == 1:
            return outcome, [(changed[0], error)]
    middle = len(changed) // 2
    outcome, older = _applied(merge, outcome, changed[:middle])
    outcome, younger = _applied(merge, outcome, changed[middle:])
    return outcome, older + younger


def _without(merge: Merge, outcome: Outcome, gone: Sequence[PoolLayer]) -> Outcome:
    """Take out the policies that are gone, but for those that others need."""
    if not gone:
        return outcome
    found = _try(merge, _others(outcome, gone))
    if found is not None:
        return found
    if len(gone) == 1:
        return outcome
    middle = len(gone) // 2
    return _without(merge, _without(merge, outcome, gone[:middle]), gone[middle:])


def _broken_by_a_removal(pool: str, layers: Sequence[PoolLayer], merge: Merge) -> list[Fault]:
    """Name the policies that need one that is gone: those that do not agree with what is left."""
    settings = merge([each for each in layers if each.source == SETTINGS])
    _, left = _agreeing(merge, settings, [each for each in layers if each.source != SETTINGS])
    return [
        Fault(source=layer.source, pool=pool, message=f"{error}; what was in force there before stays")
        for layer, error in left
    ]


def _others(outcome: Outcome, layers: Iterable[PoolLayer]) -> list[PoolLayer]:
    """Return an outcome's layers that are of none of these sources."""
    sources = {each.source for each in layers}
    return [each for each in outcome.layers if each.source not in sources]


def _try(merge: Merge, layers: Sequence[PoolLayer]) -> Outcome | None:
    try:
        return merge(layers)
    except ConfigError:
        return None


def merge_pool(pool: str, layers: Iterable[PoolLayer], extensions: Extensions) -> Outcome:
    """Merge and check as a whole. Raise ConfigError with the path of what contradicts."""
    ordered = tuple(sorted(layers, key=lambda each: precedence(each.layer), reverse=True))
    merged = merge_layers((each.layer for each in ordered), resets=RESETS)
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
    """Return the rewrites that agree with the policies. Rules are by model, so that each can be judged by itself."""
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
    """Add the objectives that no policy has given a class."""
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
        origins[path] = f"{OBJECTIVE} {pool.partition('/')[0]}/{name}"  # a pool's objectives are of its namespace
    return replace(policy, priorities=replace(priorities, objectives={**priorities.objectives, **found}))


def _fault(layer: PoolLayer, earlier: PoolLayer | None, pool: str, error: ConfigError) -> Fault:
    instead = f"generation {earlier.generation} of it stays in force there" if earlier else "it is left out there"
    return Fault(source=layer.source, pool=pool, message=f"{error}; {instead}")


def _age(layer: PoolLayer) -> tuple[str, int, str]:
    return (layer.layer.created_at or NO_AGE, layer.layer.level, layer.layer.source)
