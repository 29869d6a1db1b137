"""The models that a picker routes: names, sources of their tokens, the rules for requested names, and their list.

`resolve` applies aliases, rewrites, weighted splits with sticky arms, and fallbacks. Pure; `draw` is random.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import log
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from extproc.errors import UnknownModelError

MODELS_PATH = "/v1/models"
ANY_MODEL = "*"  # a rule's model: all names without a specific rule


class TokensFrom(StrEnum):
    """The source of a model's token ids."""

    AUTO = "auto"  # without a folder: a pod's /render, else its /tokenize, which every vLLM has
    TOKENIZER = "tokenizer"  # the folder, in this process; for prompts that it cannot tokenize, as RENDER
    RENDER = "render"  # only a pod's /render endpoint, which also knows media, harmony and Mistral formats
    TEXT = "text"  # none: routed on text chunks, which only predict hits from recent routing


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model of the pods, under its first served name."""

    name: str
    aliases: frozenset[str] = frozenset()  # further served names (`--served-model-name a b`): same blocks, same pods
    adapters: frozenset[str] = frozenset()  # configured LoRA adapters; others are learned from the pods
    tokens_from: TokensFrom = TokensFrom.AUTO
    tokenizer_folder: Path | None = None
    chat_template: Path | None = None  # replaces the folder's own, as vLLM's --chat-template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # --default-chat-template-kwargs
    max_model_len: int | None = None  # tokens of prompt and output; None uses the pods' own value


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """One arm of a rule: the name sent to the pod, and its weight."""

    model: str
    weight: float = 1.0


class StickyBy(StrEnum):
    """What keeps a client on its arm."""

    NOTHING = "nothing"  # each request draws its arm
    USER = "user"  # the body's `user`
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """How requests for one name are routed."""

    model: str  # as the client writes it, or ANY_MODEL
    targets: tuple[ModelTarget, ...]  # one for a rewrite, several for a split
    sticky_by: StickyBy = StickyBy.NOTHING
    sticky_header: str | None = None  # lowercase, with StickyBy.HEADER
    fallbacks: tuple[str, ...] = ()  # models tried in order if no endpoint of the arm is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """All configured models and rules. With `only_listed`, requests for any other name are answered with 404."""

    served: tuple[ServedModel, ...] = ()
    rules: tuple[ModelRule, ...] = ()
    only_listed: bool = False
    _by_name: Mapping[str, ServedModel] = field(init=False, repr=False, compare=False)
    _by_adapter: Mapping[str, ServedModel] = field(init=False, repr=False, compare=False)
    _rule_for: Mapping[str, ModelRule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # for duplicate names the first model counts; a policy with duplicates is rejected
        models = self.served[::-1]
        by_name = {name: model for model in models for name in (*model.aliases, model.name)}
        by_adapter = {adapter: model for model in models for adapter in model.adapters}
        object.__setattr__(self, "_by_name", by_name)
        object.__setattr__(self, "_by_adapter", by_adapter)
        object.__setattr__(self, "_rule_for", {rule.model: rule for rule in self.rules[::-1]})

    def served_as(self, name: str) -> ServedModel | None:
        """Return the base model that pods serve under this name."""
        return self._by_name.get(name)

    def base_of(self, adapter: str) -> ServedModel | None:
        """Return the base model of a configured adapter."""
        return self._by_adapter.get(adapter)

    def rule_for(self, name: str) -> ModelRule | None:
        """Return the rule for this requested name: its own, or the one for ANY_MODEL."""
        rules = self._rule_for
        return rules.get(name) or rules.get(ANY_MODEL)

    def sticky_headers(self) -> frozenset[str]:
        """Return the headers used by sticky rules, in lowercase."""
        return frozenset(rule.sticky_header for rule in self.rules if rule.sticky_header is not None)

    def names(self) -> frozenset[str]:
        """Return every configured name: clients may request it, and it may be a metric's label."""
        return frozenset((*self._by_name, *self._by_adapter, *self._rule_for)) - {ANY_MODEL}


class ResolvedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A request's model after all rules."""

    requested: str | None  # as the client wrote it, or None if it named none
    model: str | None  # the name sent to the pod
    base: ServedModel | None  # gives the tokenizer and the block keys; None for an unknown name
    adapter: str | None = None  # `model` again if it is a LoRA adapter
    arm: str = ""  # the arm of a rule (its model), "" if no rule applies
    fallbacks: tuple[str, ...] = ()  # models to try in order if no endpoint of this one is ready: `fall_back`

    @property
    def is_rewritten(self) -> bool:
        """Tell whether the model must be changed in the request body and restored in the response."""
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
    """Apply the rules to the model name in the body.

    `headers`: lowercase names. `draw`: uniform in [0, 1), for arms that are not sticky. `learned`: LoRA adapter -> its
    base model's first served name, from the pods. Raise UnknownModelError for an unlisted model if only listed ones
    are served.
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
    """Replace `of` by one of its fallbacks; no rules apply to the fallback, and the arm stays the same."""
    rest = of.fallbacks[of.fallbacks.index(name) + 1 :]
    return _known(name, table=table, requested=of.requested, learned=learned, arm=of.arm, fallbacks=rest)


def stand_in(
    name: str, *, table: ModelTable, of: ResolvedModel, learned: Mapping[str, str] | None = None
) -> ResolvedModel:
    """Replace `of` by model `name` under load; the original model becomes its first fallback."""
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
    return next(target for target in reversed(targets) if target.weight > 0)  # rounding left a rest


def _sticky_arm(rule: ModelRule, sticks_to: str) -> ModelTarget:
    """Weighted rendezvous hashing: all pickers find the same arm, and a new weight moves as few clients as possible.

    An arm of weight w scores -w / ln(u), with u uniform in (0, 1) by (rule, arm, client): it wins a share of clients
    in proportion to w. (Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005.)
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


def models_document(table: ModelTable, adapters: Mapping[str, str], *, created: int) -> bytes | None:
    """Return the answer to `GET /v1/models` for a whole pool, in vLLM's form, or None if no model is known.

    A single pod would list its own models only, and a pool without pods none. `adapters`: reported LoRA adapter -> base
    model. `created`: unix seconds, as every card has some.
    """
    if not table.served:
        return None
    cards: dict[str, dict[str, Any]] = {}
    for card in _cards(table, adapters):
        cards.setdefault(card["id"], card | {"created": created})
    return msgspec.json.encode({"object": "list", "data": list(cards.values())})


def _cards(table: ModelTable, adapters: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    lengths = {model.name: model.max_model_len for model in table.served}
    for model in table.served:
        for name in (model.name, *sorted(model.aliases)):
            yield _card(name, root=model.name, length=model.max_model_len)
        for name in sorted(model.adapters):
            yield _card(name, root=name, parent=model.name, length=model.max_model_len)
    for name, base in sorted(adapters.items()):
        yield _card(name, root=name, parent=base, length=lengths.get(base))
    for name in sorted(table.names()):  # of rules, the others are there already
        if table.served_as(name) is None and table.base_of(name) is None and name not in adapters:
            rule = table.rule_for(name)
            yield _card(name, root=rule.targets[0].model if rule is not None else name)


def _card(name: str, *, root: str, parent: str | None = None, length: int | None = None) -> dict[str, Any]:
    card = {"id": name, "object": "model", "owned_by": "kvmesh", "root": root, "parent": parent}
    return card if length is None else card | {"max_model_len": length}
