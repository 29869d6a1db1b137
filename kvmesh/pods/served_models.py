"""Which models a pod serves, by its own `GET /v1/models`. Pure; picker and indexer must read it in the same way.

The first base model's name is part of every block key of a pool that declares no model (`kvmesh.io/model`).
"""

from collections.abc import Sequence

import msgspec


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One entry; vLLM lists one for each served name of its base model, then one for each LoRA adapter."""

    id: str
    parent: str | None = None  # of an adapter: its base model
    max_model_len: int | None = None  # tokens of prompt and output


class _Models(msgspec.Struct):
    data: tuple[ModelCard, ...]


_models = msgspec.json.Decoder(_Models)


def model_cards(body: bytes) -> Sequence[ModelCard]:
    """Read the page. Raise ValueError if this is not what vLLM answers."""
    try:
        return _models.decode(body).data
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not a list of models: {error}") from error


def first_base_model(cards: Sequence[ModelCard]) -> str | None:
    """Return the first model that is no adapter: vLLM's first `--served-model-name`; None if there is none.

    Other names of the base model are aliases of the first.
    """
    return next((card.id for card in cards if not card.parent), None)
