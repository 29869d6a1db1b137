"""The events of a prefix cache. The block pool creates them; `wire.kv_events` encodes them for sending."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """Consecutive blocks of one sequence became full and cached."""

    block_hashes: Sequence[bytes]  # 32-byte digests
    parent_hash: bytes | None  # digest of the block before the first one, None at the start of a chain
    token_ids: Sequence[int]  # the tokens of all blocks, in order
    block_size: int  # tokens
    cache_salt: str | None = None  # given if it is part of the first block's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """A cached block was allocated again, and its content is gone."""

    block_hash: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared:
    """The whole prefix cache was reset."""


CacheEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
