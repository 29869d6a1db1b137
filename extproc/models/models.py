"""The models that a picker routes: what each is called, how its prompts become tokens, and what stands behind a name.

Values only; `models.model_rules` applies the rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ANY_MODEL = "*"  # a rule's model: every name that has no rule of its own


class TokensFrom(StrEnum):
    """Where a model's token ids come from."""

    AUTO = "auto"  # no folder is known: a pod's /render, else its /tokenize, which every vLLM has
    TOKENIZER = "tokenizer"  # the folder, in this process; what it cannot do, as RENDER
    RENDER = "render"  # a pod's /render endpoint alone, which knows media, harmony and Mistral formats too
    TEXT = "text"  # nowhere: routed on chunks of text, which only predict


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """One base model of the pods, under its first served name."""

    name: str
    aliases: frozenset[str] = frozenset()  # further served names (`--served-model-name a b`): same blocks, same pods
    adapters: frozenset[str] = frozenset()  # LoRA adapters known beforehand; others are learned from the pods
    tokens_from: TokensFrom = TokensFrom.AUTO
    tokenizer_folder: Path | None = None
    chat_template: Path | None = None  # in place of the folder's own, as vLLM's --chat-template
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # --default-chat-template-kwargs
    max_model_len: int | None = None  # tokens of prompt and output; None: as the pods report it


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTarget:
    """One arm of a rule: the name that the pod gets, and its share."""

    model: str
    weight: float = 1.0


class StickyBy(StrEnum):
    """What keeps a client on its arm."""

    NOTHING = "nothing"  # every request draws anew
    USER = "user"  # the body's user
    HEADER = "header"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    """How requests for one name are routed."""

    model: str  # as the client writes it, or ANY_MODEL
    targets: tuple[ModelTarget, ...]  # one: a rewrite; several: a split
    sticky_by: StickyBy = StickyBy.NOTHING
    sticky_header: str | None = None  # lowercase, with StickyBy.HEADER
    fallbacks: tuple[str, ...] = ()  # models tried in order when no endpoint of the arm is ready


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """All that is known of models. With `only_listed`, requests for any other name are answered 404."""

    served: tuple[ServedModel, ...] = ()
    rules: tuple[ModelRule, ...] = ()
    only_listed: bool = False
    _by_name: Mapping[str, ServedModel] = field(init=False, repr=False, compare=False)
    _by_adapter: Mapping[str, ServedModel] = field(init=False, repr=False, compare=False)
    _rule_for: Mapping[str, ModelRule] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # of models with one name the first counts; a policy with doubles is refused
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
        """Return the base model of an adapter that is listed."""
        return self._by_adapter.get(adapter)

    def rule_for(self, name: str) -> ModelRule | None:
        """Return the rule for requests for this name: its own, or the one for every other name."""
        rules = self._rule_for
        return rules.get(name) or rules.get(ANY_MODEL)

    def sticky_headers(self) -> frozenset[str]:
        """Return the headers that rules read; lowercase."""
        return frozenset(rule.sticky_header for rule in self.rules if rule.sticky_header is not None)

    def names(self) -> frozenset[str]:
        """Return every configured name: what clients may ask for, and what may be a metric's label."""
        return frozenset((*self._by_name, *self._by_adapter, *self._rule_for)) - {ANY_MODEL}
