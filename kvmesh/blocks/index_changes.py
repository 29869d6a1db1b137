"""One change of the index, the tiers of blocks, and the worth of a hit in each tier. Values only.

A change keeps the order of the events. References are counted where it is applied, because only the index knows the
counts. There are one or more changes per batch, so they are structs: a frozen dataclass takes ten times as long to
make.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from kvmesh.blocks.cache_groups import CacheGroup

# fraction of a GPU hit's worth; the rest is the cost of fetching the block
TIER_WEIGHTS: Mapping[str, float] = {
    "GPU": 1.0,
    "CPU": 0.8,
    "CPU_TIER1": 0.8,  # SGLang's host memory
    "CPU_TIER2": 0.6,  # SGLang's storage behind it, if it is distinguished
    "STORAGE": 0.5,
    "FS": 0.5,
    "OBJ": 0.4,
}
TIERS = frozenset(TIER_WEIGHTS)


def tier_weight(tier: str) -> float:
    """Return the worth of a hit in this tier, 0..1; an unknown tier counts as storage."""
    return TIER_WEIGHTS.get(tier, TIER_WEIGHTS["STORAGE"])


def weighted_blocks(blocks: Mapping[str, int]) -> float:
    """Sum up tier -> blocks in units of GPU blocks."""
    return sum(tier_weight(tier) * count for tier, count in blocks.items())


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that gained one reference each."""

    tier: str
    group: int
    block_size: int
    hashes: bytes  # 8 bytes each, big-endian
    keys: bytes  # 8 bytes each, same order
    set_only: bool = False  # reports held blocks: adds no reference to a block that has one


class Remove(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that lost one reference each."""

    tier: str
    group: int
    hashes: bytes


class Clear(msgspec.Struct, frozen=True, kw_only=True):
    """All of the stream's blocks are gone: a new epoch begins here."""


Operation = Store | Remove | Clear


class IndexChange(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of the batches `previous_seq + 1 … last_seq`, applied as a whole or not at all.

    A batch that is too long for one change is spread over several: all but the last of these are its parts, number 1,
    2, …, and leave `last_seq` unchanged.
    """

    epoch: int
    previous_seq: int
    last_seq: int
    previous_part: int = 0  # parts of the next batch that are in the index already
    part: int = 0  # number of this part of the next batch; 0 if the change completes its batches
    last_ts: float
    last_crc: int
    operations: tuple[Operation, ...] = ()
    events: int = 0  # number of events, for the stream's count
    groups: Mapping[int, CacheGroup] | None = None  # the whole catalogue if it has changed
    degraded: str = ""  # why the epoch is no longer exact, or ""; marked in the same atomic step


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The result of a change that is in the index."""

    epoch: int  # of the stream after the change: a clear begins a new one
    # reason (`no-free-slot`, `slot-share`, `source-full`) -> operations not applied, or applied in part
    left_out: Mapping[str, int]


def pack_hashes(hashes: Iterable[int]) -> bytes:
    """Pack unsigned 64-bit engine hashes, big-endian."""
    values = tuple(hashes)
    return struct.pack(f">{len(values)}Q", *values)
