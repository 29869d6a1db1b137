"""A pod's GET /v1/models -> which models and LoRA adapters it serves. No I/O.

vLLM lists a card for each served name of its base model (parent null) and one for each adapter (parent: its base).
"""

import msgspec

from extproc.pods.endpoint import EndpointModels


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None
    max_model_len: int | None = None


class _Page(msgspec.Struct):
    data: list[_Card]


_DECODER = msgspec.json.Decoder(_Page)


def parse_served_models(body: bytes) -> EndpointModels | None:
    """Read the page, or return None where it is none or lists nothing: then every model may be there."""
    try:
        cards = _DECODER.decode(body).data
    except (msgspec.MsgspecError, RecursionError):
        return None
    lengths = [card.max_model_len for card in cards if card.max_model_len is not None and card.max_model_len > 0]
    names = [card.id for card in cards if card.parent is None]
    if not names:
        return None
    return EndpointModels(
        models=frozenset(names),
        adapters={card.id: card.parent for card in cards if card.parent is not None},
        max_model_len=min(lengths, default=None),
        first=next((card.id for card in cards if not card.parent), ""),
    )
