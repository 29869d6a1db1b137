"""Encodes KV events as each generation of vLLM sends them (`vllm/distributed/kv_events.py`).

The publisher calls `encode_batch`. A batch is msgpack of `[ts, events, data_parallel_rank]`. Up to vLLM 0.23 events are
arrays whose length differs by generation; since 0.24 they are maps.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum

import msgspec

from podsim.core.block_hash import event_hash
from podsim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

_encoder = msgspec.msgpack.Encoder()
_MEDIUM, _GROUP, _KIND = "GPU", 0, "full_attention"


class EventGeneration(StrEnum):
    """The groups of vLLM releases that share one form of events."""

    G1 = "g1"  # 0.8.5 to 0.10.1: no medium, signed hashes
    G2 = "g2"  # 0.10.2 to 0.13: medium
    G3 = "g3"  # 0.14 to 0.16: lora_name
    G3B = "g3b"  # 0.17 to 0.19: extra_keys
    G4 = "g4"  # 0.20 and 0.21: group_idx
    G4B = "g4b"  # 0.22 and 0.23: kind and window of the group
    G5 = "g5"  # 0.24 and later: maps; here as 0.31 and later send them

    @property
    def replay_has_topic(self) -> bool:
        """Tell whether replay answers include the topic frame, as they do since 0.26."""
        return self is EventGeneration.G5


_STORED_LENGTH = {
    EventGeneration.G1: 6,
    EventGeneration.G2: 7,
    EventGeneration.G3: 8,
    EventGeneration.G3B: 9,
    EventGeneration.G4: 10,
    EventGeneration.G4B: 12,
}
_REMOVED_LENGTH = {
    EventGeneration.G1: 2,
    EventGeneration.G2: 3,
    EventGeneration.G3: 3,
    EventGeneration.G3B: 3,
    EventGeneration.G4: 4,
    EventGeneration.G4B: 4,
}


def encode_batch(
    events: Sequence[CacheEvent], *, generation: EventGeneration, timestamp: float, rank: int = 0
) -> bytes:
    """Return one engine step's payload frame; `timestamp` is unix seconds."""
    encode: Callable[[CacheEvent], object]
    if generation is EventGeneration.G5:
        encode = _as_map
    else:
        stored, removed = _STORED_LENGTH[generation], _REMOVED_LENGTH[generation]

        def encode(event: CacheEvent) -> object:
            return _as_array(event, stored=stored, removed=removed)

    return _encoder.encode([timestamp, [encode(event) for event in events], rank])


def _as_map(event: CacheEvent) -> dict[str, object]:
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": [event_hash(digest) for digest in event.block_hashes],
                "parent_block_hash": None if event.parent_hash is None else event_hash(event.parent_hash),
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
                "extra_keys": _extra_keys(event),
                "group_idx": _GROUP,
                "kv_cache_spec_kind": _KIND,
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": [event_hash(event.block_hash)],
                "medium": _MEDIUM,
                "group_idx": _GROUP,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def _as_array(event: CacheEvent, *, stored: int, removed: int) -> list[object]:
    number = _signed_hash if stored == _STORED_LENGTH[EventGeneration.G1] else event_hash
    match event:
        case BlockStored():
            fields: list[object] = [
                "BlockStored",
                [number(digest) for digest in event.block_hashes],
                None if event.parent_hash is None else number(event.parent_hash),
                event.token_ids,
                event.block_size,
                None,  # lora_id
                _MEDIUM,
                None,  # lora_name
                _extra_keys(event),
                _GROUP,
                _KIND,
                None,  # kv_cache_spec_sliding_window
            ]
            return fields[:stored]
        case BlockRemoved():
            return ["BlockRemoved", [number(event.block_hash)], _MEDIUM, _GROUP][:removed]
        case AllBlocksCleared():
            return ["AllBlocksCleared"]


def _extra_keys(event: BlockStored) -> list[list[str] | None]:
    """Return what entered each block's hash besides the tokens, without the hash's tags."""
    keys: list[list[str] | None] = [None] * len(event.block_hashes)
    if event.cache_salt:
        keys[0] = [event.cache_salt]
    return keys


def _signed_hash(digest: bytes) -> int:
    return int.from_bytes(digest[-8:], "big", signed=True)
