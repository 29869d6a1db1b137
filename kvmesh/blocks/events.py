"""What a vLLM pod says about its KV cache, in one normal form for all wire generations.

Made by `events.vllm_events`, read by `blocks.index_changes`. Holds values only.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class BlockStored(msgspec.Struct, frozen=True, kw_only=True):
    """Consecutive blocks of one chain became resident."""

    block_hashes: tuple[int, ...]  # the engine's, unsigned 64 bit
    parent_block_hash: int | None  # None: the first block is the start of a prompt
    tokens: bytes  # little-endian uint32, all blocks concatenated
    block_size: int  # tokens a block; 0 for an offload placeholder
    lora_id: int | None = None
    medium: str = "GPU"  # upper case
    lora_name: str | None = None
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None  # one entry a block, untagged
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None  # LOCAL or REMOTE, relative to the publisher
    ownership: str | None = None
    session_id: str | None = None
    cache_salt: str | None = None  # SGLang names it; vLLM hides it in extra_keys


class BlockRemoved(msgspec.Struct, frozen=True, kw_only=True):
    """One physical copy of each of these blocks is gone."""

    block_hashes: tuple[int, ...]
    medium: str = "GPU"
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, kw_only=True):
    """The publisher's cache was reset; which of its pools is not said."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True, kw_only=True):
    """The events of one engine step, in order."""

    ts: float  # unix seconds, the publisher's clock
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    skipped: Mapping[str, int] = {}  # reason -> events of this batch that could not be read
