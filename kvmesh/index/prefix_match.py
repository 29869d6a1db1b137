"""The longest cached prefix of each endpoint, from the slots that hold each leading block. Pure.

A *value* is what Redis has for a block: one slot in decimal, or `B` and a bitmap of slots, bit 0 first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec

from kvmesh.blocks.index_changes import tier_weight, weighted_blocks
from kvmesh.blocks.source import COUNTED, EndpointCache, Registry, Stream

SLOT_DIGITS = 4  # of the greatest slot, 4095

FEW_RUNS = 3

Run = tuple[bytes | None, int]  # a value, and how many blocks in a row have it


class PrefixLookup(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds how much of a prompt's beginning."""

    matched_blocks: Mapping[str, int]  # endpoint -> consecutive cached blocks from the first; absent means 0
    block_size: Mapping[str, int]  # endpoint -> tokens a block of its match; of its cache where nothing matched
    endpoints: Mapping[str, EndpointCache]  # every endpoint that the index knows, with its state
    registry: Registry  # the snapshot that the answer was read against
    indexer_alive: bool  # False: no indexer keeps the index true; the states in `endpoints` are out of date
    # endpoint -> tier -> blocks of its match, each counted in its best tier; `TIER_WEIGHTS` says what they are worth
    tiers: Mapping[str, Mapping[str, int]] = {}
    keys: Mapping[int, bytes] = {}  # block size -> packed keys of all of the prompt's blocks
    also: Sequence[Any] = ()  # Redis' replies to the commands that were passed through, error replies included


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMask:
    """The slots of one stream that share a block size: its tiers, whose blocks complete each other."""

    endpoint: str
    mask: int  # all of them
    tiers: tuple[tuple[str, int], ...]  # (tier, its slots), best first


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    """A registry, prepared for many lookups."""

    registry: Registry
    endpoints: Mapping[str, EndpointCache]
    block_sizes: Mapping[str, int]
    masks: Mapping[int, tuple[StreamMask, ...]]  # block size -> streams
    width: int  # bytes of a bitmap that can matter


@dataclass(slots=True, kw_only=True)
class Match:
    """How much of a prompt one stream holds, as far as it was followed."""

    stream: StreamMask
    blocks: int = 0
    counted: dict[str, int] | None = None  # tier -> blocks, of streams with several tiers

    @property
    def tiers(self) -> Mapping[str, int]:
        """Return tier -> blocks, each in its best tier."""
        return self.counted or {self.stream.tiers[0][0]: self.blocks}


def match_table(registry: Registry) -> MatchTable:
    """Prepare a registry snapshot; once a registry version, not once a lookup."""
    width = max((slot.slot // 8 + 1 for slot in registry.slots), default=0)
    counted = {record.stream for record in registry.streams if record.state in COUNTED}
    masks: dict[int, dict[Stream, dict[str, int]]] = {}
    for slot in registry.slots:
        stream = slot.stream
        if stream not in counted:
            continue  # later evictions are unknown; its blocks count again once they are known
        tiers = masks.setdefault(slot.block_size, {}).setdefault(stream, {})
        # bitmaps count from the most significant bit of the first byte, as SETBIT does
        tiers[slot.tier] = tiers.get(slot.tier, 0) | 1 << (8 * width - 1 - slot.slot)
    endpoints = registry.endpoints()
    return MatchTable(
        registry=registry,
        endpoints=endpoints,
        block_sizes={name: cache.block_size for name, cache in endpoints.items() if cache.block_size},
        masks={
            size: tuple(_stream_mask(stream.endpoint, tiers) for stream, tiers in streams.items())
            for size, streams in masks.items()
        },
        width=width,
    )


def _stream_mask(endpoint: str, tiers: Mapping[str, int]) -> StreamMask:
    best_first = sorted(tiers.items(), key=lambda tier: (-tier_weight(tier[0]), tier[0]))
    mask = 0
    for slots in tiers.values():
        mask |= slots
    return StreamMask(endpoint=endpoint, mask=mask, tiers=tuple(best_first))


def runs_of(values: Sequence[bytes | None]) -> list[Run]:
    """Put equal values in a row together."""
    runs: list[Run] = []
    for _ in range(FEW_RUNS):
        if not values:
            return runs
        # nearly always all blocks of a prompt have one value, or all up to where it is new: counting is the quickest
        value = values[0]
        count = values.count(value)
        rest = values[count:]
        if value in rest:
            break
        runs.append((value, count))
        values = rest
    return runs + [(value, len(list(run))) for value, run in groupby(values)]


def held_mask(value: bytes, *, width: int) -> int:
    """Return the slots of a value; slots beyond the width, and values that we cannot read, are left out."""
    if value[:1] == b"B":
        return int.from_bytes(value[1 : width + 1].ljust(width, b"\0"), "big")
    if len(value) <= SLOT_DIGITS and value.isdigit() and (slot := int(value)) < 8 * width:
        return 1 << (8 * width - 1 - slot)
    return 0


class PrefixWalk:
    """Follows one prompt through the values of its blocks, batch by batch.

    A stream that joins after the first block never starts: vLLM can only reuse a prefix.
    """

    def __init__(self, streams: Sequence[StreamMask], *, width: int) -> None:
        self.blocks = 0  # that the longest stream holds
        self._width = width
        self._streams = streams
        self._started: list[Match] | None = None  # who holds the first block
        self._alive: list[Match] = []

    def feed(self, runs: Iterable[Run]) -> bool:
        """Take the values of the next blocks; tell whether any stream holds all blocks so far."""
        for value, count in runs:
            held = held_mask(value, width=self._width) if value else 0
            if self._started is None:
                self._alive = self._started = [Match(stream=each) for each in self._streams if each.mask & held]
            else:
                self._alive = [match for match in self._alive if match.stream.mask & held]
            if not self._alive:
                return False
            self.blocks += count
            for match in self._alive:
                match.blocks = self.blocks
                if len(match.stream.tiers) > 1:
                    _count_tier(match, held, count=count)
        return bool(self._alive)

    def matches(self) -> dict[str, Match]:
        """Return endpoint -> match; over an endpoint's ranks the longest counts, of equals the better tiers."""
        best: dict[str, Match] = {}
        for match in self._started or ():
            endpoint = match.stream.endpoint
            if endpoint not in best or _worth(match) > _worth(best[endpoint]):
                best[endpoint] = match
        return best


def _count_tier(match: Match, held: int, *, count: int) -> None:
    tier = next(tier for tier, slots in match.stream.tiers if held & slots)
    if match.counted is None:
        match.counted = {}
    match.counted[tier] = match.counted.get(tier, 0) + count


def _worth(match: Match) -> tuple[int, float]:
    return match.blocks, weighted_blocks(match.tiers)


def match_prompt(
    table: MatchTable, values: Mapping[int, Sequence[bytes | None]], *, keys: Mapping[int, bytes] | None = None
) -> PrefixLookup:
    """Match a prompt whose values are all at hand (`values`: block size -> values)."""
    walks = {size: PrefixWalk(streams, width=table.width) for size, streams in table.masks.items()}
    for size, walk in walks.items():
        walk.feed(runs_of(values.get(size, ())))
    return prefix_lookup(table, walks, keys=keys or {})


def prefix_lookup(
    table: MatchTable, walks: Mapping[int, PrefixWalk], *, keys: Mapping[int, bytes], also: Sequence[Any] = ()
) -> PrefixLookup:
    """Combine the walks of all block sizes (`walks`: block size -> walk); most matched tokens win."""
    matched: dict[str, int] = {}
    tiers: dict[str, Mapping[str, int]] = {}
    sizes = table.block_sizes  # copied where one differs, which is seldom
    for size, walk in walks.items():
        for endpoint, match in walk.matches().items():
            known_size = sizes[endpoint]
            if match.blocks * size > matched.get(endpoint, 0) * known_size:
                matched[endpoint], tiers[endpoint] = match.blocks, match.tiers
                if size != known_size:
                    sizes = {**sizes, endpoint: size}
    return PrefixLookup(
        matched_blocks=matched,
        block_size=sizes,
        endpoints=table.endpoints,
        registry=table.registry,
        indexer_alive=table.registry.indexer_alive,
        tiers=tiers,
        keys=keys,
        also=also,
    )


def usable_tokens(tokens: bytes) -> int:
    """Return how many tokens of a prompt can be hit: vLLM always computes the last one anew."""
    return max(len(tokens) // 4 - 1, 0)
