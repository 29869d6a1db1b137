"""Which model serves a request: aliases, rewrites, weighted splits with sticky arms, fallbacks. Chance is passed in."""

from collections.abc import Mapping, Sequence
from math import log

import msgspec
import xxhash

from extproc.errors import UnknownModelError
from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, StickyBy


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A request's model after all rules."""

    requested: str | None  # as the client wrote it; None: it named none
    model: str | None  # what the pod gets
    base: ServedModel | None  # whose tokens and blocks it has; None: nothing is known of this name
    adapter: str | None = None  # the LoRA adapter that `model` names
    arm: str = ""  # the arm of a rule (its model), "" where no rule applies
    fallbacks: tuple[str, ...] = ()  # models to try in order when no endpoint of this one is ready: `fall_back`

    @property
    def is_rewritten(self) -> bool:
        """Tell whether the body's model must be changed, and the response's changed back."""
        return self.model != self.requested


def resolve(
    name: str | None,
    *,
    table: ModelTable,
    user: str | None,
    headers: Mapping[str, str],
    draw: float,
    learned: Mapping[str, str] | None = None,
) -> ResolvedModel:
    """Apply the rules to the name in the body.

    `headers`: lowercase names. `draw`: uniform in [0, 1), used where nothing sticks. `learned`: LoRA adapter -> its
    base model's first served name, as the pods report it. Raise UnknownModelError where only listed models are served.
    """
    if name is None:
        return ResolvedModel(requested=None, model=None, base=table.served[0] if len(table.served) == 1 else None)
    rule = table.rule_for(name) if table.rules else None
    if rule is None:
        base = table.served_as(name)
        if base is not None:  # nearly every request
            return ResolvedModel(requested=name, model=name, base=base)
        return _known(name, table=table, requested=name, learned=learned)
    target = _arm(rule, user=user, headers=headers, draw=draw)
    return _known(
        target.model, table=table, requested=name, learned=learned, arm=target.model, fallbacks=rule.fallbacks
    )


def fall_back(
    name: str, *, table: ModelTable, of: ResolvedModel, learned: Mapping[str, str] | None = None
) -> ResolvedModel:
    """Return one of `of.fallbacks` in place of `of`; rules do not apply to it again, and the arm stays the same."""
    rest = of.fallbacks[of.fallbacks.index(name) + 1 :]
    return _known(name, table=table, requested=of.requested, learned=learned, arm=of.arm, fallbacks=rest)


def stand_in(
    name: str, *, table: ModelTable, of: ResolvedModel, learned: Mapping[str, str] | None = None
) -> ResolvedModel:
    """Return the model that replaces `of` under load; the model asked for becomes its first fallback."""
    fallbacks = of.fallbacks if of.model is None else (of.model, *of.fallbacks)
    return _known(name, table=table, requested=of.requested, learned=learned, arm=of.arm, fallbacks=fallbacks)


def _known(
    name: str,
    *,
    table: ModelTable,
    requested: str | None,
    learned: Mapping[str, str] | None,
    arm: str = "",
    fallbacks: tuple[str, ...] = (),
) -> ResolvedModel:
    adapter = None
    base = table.served_as(name)
    if base is None:
        base = table.base_of(name)
        if base is None and learned is not None and (base_name := learned.get(name)) is not None:
            base = table.served_as(base_name)
        if base is not None:
            adapter = name
        elif table.only_listed:
            listed = ", ".join(sorted(table.names()))
            raise UnknownModelError(f"the model {name[:100]!r} is not served here; there are {listed}")
    return ResolvedModel(requested=requested, model=name, base=base, adapter=adapter, arm=arm, fallbacks=fallbacks)


def _arm(rule: ModelRule, *, user: str | None, headers: Mapping[str, str], draw: float) -> ModelTarget:
    targets = rule.targets
    if len(targets) == 1:
        return targets[0]
    sticks_to = user if rule.sticky_by is StickyBy.USER else None
    if rule.sticky_by is StickyBy.HEADER and rule.sticky_header is not None:
        sticks_to = headers.get(rule.sticky_header)
    return _sticky_arm(rule, sticks_to) if sticks_to else _drawn_arm(targets, draw)


def _drawn_arm(targets: Sequence[ModelTarget], draw: float) -> ModelTarget:
    left = draw * sum(target.weight for target in targets)
    for target in targets:
        left -= target.weight
        if left < 0 and target.weight > 0:
            return target
    return next(target for target in reversed(targets) if target.weight > 0)  # what rounding leaves over


def _sticky_arm(rule: ModelRule, sticks_to: str) -> ModelTarget:
    """Weighted rendezvous hashing: every picker finds the same arm, and a changed weight moves only its difference.

    An arm of weight w scores -w / ln(u) with u uniform in (0, 1) by (rule, client, arm): it wins w of all clients.
    (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005.)
    """
    best, best_score = rule.targets[0], -1.0
    for target in rule.targets:
        if target.weight <= 0:
            continue
        # the lengths keep "a" + "bc" apart from "ab" + "c"
        key = f"{len(rule.model)}:{len(target.model)}:{rule.model}{target.model}{sticks_to}"
        uniform = (xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) + 0.5) / 2**64
        score = -target.weight / log(uniform) if uniform < 1.0 else float("inf")
        if score > best_score:
            best, best_score = target, score
    return best
