"""The models that a pod serves, by its `GET /v1/models`. Pure; picker and indexer must read it in the same way.

The first base model's name is part of every block key of a pool that declares no model (`kvmesh.io/model`).
"""

from collections.abc import Sequence
from typing import Any

import msgspec

MOST_PARTS = 1 << 13  # objects of the page; vLLM's cards have two each
LONGEST_PROMPTS = 1 << 31  # tokens: no context length is greater


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry; vLLM lists one for each served name of its base model, then one for each LoRA adapter."""

    id: str
    parent: str | None = None  # of an adapter: its base model
    owned_by: Any = None  # the engine
    # tokens of prompt and output; a float, because a pod may write a thousand digits, which would be slow as an int
    max_model_len: float | None = None

    @property
    def context_tokens(self) -> int | None:
        """The context length, or None if the pod gives no plausible one."""
        length = self.max_model_len
        return int(length) if length is not None and 1 <= length <= LONGEST_PROMPTS else None


class _Models(msgspec.Struct):
    data: tuple[ModelCard, ...]


_models = msgspec.json.Decoder(_Models)


def model_cards(body: bytes) -> Sequence[ModelCard]:
    """Read the page. Raise ValueError if it is not a list of models in vLLM's form."""
    if body.count(b"{") > MOST_PARTS:
        raise ValueError(f"a list of models with more than {MOST_PARTS} parts is not read")
    try:
        return _models.decode(body).data
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a list of models: {error}") from error


def first_base_model(cards: Sequence[ModelCard]) -> str | None:
    """Return the first model that is no adapter, which is vLLM's first `--served-model-name`; None if there is none.

    Other names of the base model are aliases of the first.
    """
    return next((card.id for card in cards if not card.parent), None)
