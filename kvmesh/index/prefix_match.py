"""The longest cached prefix of each endpoint, from the slots that hold each leading block. Pure.

A *value* is what Redis has for a block: one slot in decimal, or `B` and a bitmap of slots, bit 0 first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import lcm
from types import MappingProxyType
from typing import Any

import msgspec

from kvmesh.blocks.cache_groups import CacheGroup, read_tier
from kvmesh.blocks.index_changes import tier_weight, weighted_blocks
from kvmesh.blocks.source import COUNTED, EndpointCache, Registry, Stream
from kvmesh.index.group_match import GroupMask, HeldBack, HeldRun, shorten

SLOT_DIGITS = 4  # of the greatest slot, 4095

FEW_RUNS = 3
GPU = "GPU"

Run = tuple[bytes | None, int]  # a value, and how many blocks in a row have it
NO_RUNS: Mapping[int, Sequence[HeldRun]] = MappingProxyType({})
NOT_HELD_BACK: Mapping[str, HeldBack] = MappingProxyType({})


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
    held_back: Mapping[str, HeldBack] = {}  # endpoint -> why its match is shorter than what full attention holds
    also: Sequence[Any] = ()  # Redis' replies to the commands that were passed through, error replies included


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMask:
    """The slots of one stream that share a block size: its tiers, whose blocks complete each other.

    Those of full attention, whose match bounds all others. A stream without full attention has the slots of its other
    groups, and a mask that every block has.
    """

    endpoint: str
    mask: int  # all of them
    tiers: tuple[tuple[str, int], ...]  # (tier, its slots), best first
    groups: tuple[GroupMask, ...] = ()  # its other groups, each of which must accept a hit
    step: int = 0  # tokens: where there are other groups, a hit ends at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    """A registry, prepared for many lookups."""

    registry: Registry
    endpoints: Mapping[str, EndpointCache]
    block_sizes: Mapping[str, int]
    masks: Mapping[int, tuple[StreamMask, ...]]  # block size -> streams
    width: int  # bytes of a bitmap that can matter
    grouped: frozenset[int] = frozenset()  # block sizes with streams that have other groups
    apart: frozenset[int] = frozenset()  # block sizes of groups that are not their stream's


@dataclass(slots=True, kw_only=True)
class Match:
    """How much of a prompt one stream holds, as far as it was followed."""

    stream: StreamMask
    blocks: int = 0
    counted: dict[str, int] | None = None  # tier -> blocks, of streams with several tiers
    held_back: HeldBack | None = None

    @property
    def tiers(self) -> Mapping[str, int]:
        """Return tier -> blocks, each in its best tier."""
        return self.counted or {self.stream.tiers[0][0]: self.blocks}


def match_table(registry: Registry) -> MatchTable:
    """Prepare a registry snapshot; once a registry version, not once a lookup."""
    width = max((slot.slot // 8 + 1 for slot in registry.slots), default=0)
    counted = {record.stream for record in registry.streams if record.state in COUNTED}
    masks: dict[int, dict[Stream, dict[str, int]]] = {}
    groups: dict[Stream, dict[CacheGroup, int]] = {}
    for slot in registry.slots:
        stream = slot.stream
        if stream not in counted:
            continue  # later evictions are unknown; its blocks count again once they are known
        medium, group = read_tier(slot.tier)
        # bitmaps count from the most significant bit of the first byte, as SETBIT does
        bit = 1 << (8 * width - 1 - slot.slot)
        if group is None:
            tiers = masks.setdefault(slot.block_size, {}).setdefault(stream, {})
            tiers[medium] = tiers.get(medium, 0) | bit
        else:
            of_stream = groups.setdefault(stream, {})
            of_stream[group] = of_stream.get(group, 0) | bit
    dense = {stream for streams in masks.values() for stream in streams}
    streams_of = {
        size: [_stream_mask(stream.endpoint, size, tiers, groups.get(stream)) for stream, tiers in streams.items()]
        for size, streams in masks.items()
    }
    for stream, of_stream in groups.items():
        if stream not in dense:
            size = min(group.block_size for group in of_stream)
            streams_of.setdefault(size, []).append(_unbound_mask(stream.endpoint, size, of_stream, width))
    endpoints = registry.endpoints()
    return MatchTable(
        registry=registry,
        endpoints=endpoints,
        block_sizes={name: cache.block_size for name, cache in endpoints.items() if cache.block_size},
        masks={size: tuple(streams) for size, streams in streams_of.items()},
        width=width,
        grouped=frozenset(size for size, streams in streams_of.items() if any(each.groups for each in streams)),
        apart=frozenset(
            each.group.block_size
            for size, streams in streams_of.items()
            for stream in streams
            for each in stream.groups
            if each.group.block_size != size
        ),
    )


def _stream_mask(
    endpoint: str, block_size: int, tiers: Mapping[str, int], groups: Mapping[CacheGroup, int] | None
) -> StreamMask:
    best_first = sorted(tiers.items(), key=lambda tier: (-tier_weight(tier[0]), tier[0]))
    mask = 0
    for slots in tiers.values():
        mask |= slots
    return StreamMask(endpoint=endpoint, mask=mask, tiers=tuple(best_first), **_rules(block_size, groups or {}))


def _unbound_mask(endpoint: str, block_size: int, groups: Mapping[CacheGroup, int], width: int) -> StreamMask:
    slots = 0
    for mask in groups.values():
        slots |= mask
    return StreamMask(endpoint=endpoint, mask=_every_block(width), tiers=((GPU, slots),), **_rules(block_size, groups))


def _rules(block_size: int, groups: Mapping[CacheGroup, int]) -> dict[str, Any]:
    if not groups:
        return {}
    masks = tuple(GroupMask(group=group, mask=mask) for group, mask in groups.items())
    return {"groups": masks, "step": lcm(block_size, *(group.block_size for group in groups))}


def _every_block(width: int) -> int:
    """Return a bit beyond those of all slots, which stands for "whoever holds the block"."""
    return 1 << 8 * width


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

    A stream that joins after the first block never starts: vLLM can only reuse a prefix. Only a stream without full
    attention, `has_groups` being true where there are any, goes on in any case: it may need no more than the last
    blocks.
    """

    def __init__(self, streams: Sequence[StreamMask], *, width: int, has_groups: bool = False) -> None:
        self.blocks = 0  # up to the last one that is held in a match
        self.held: list[HeldRun] | None = [] if has_groups else None  # who holds the blocks, as far as they were fed
        self._fed = 0  # blocks
        self._width = width
        self._streams = streams
        self._started: list[Match] | None = None  # who holds the first block
        self._alive: list[Match] = []

    def feed(self, runs: Iterable[Run]) -> bool:
        """Take the values of the next blocks; tell whether any stream holds all blocks so far."""
        for value, count in runs:
            held = held_mask(value, width=self._width) if value else 0
            if self.held is not None:
                self.held.append((held, count))
                held |= _every_block(self._width)
            if self._started is None:
                self._alive = self._started = [Match(stream=each) for each in self._streams if each.mask & held]
            else:
                self._alive = [match for match in self._alive if match.stream.mask & held]
            if not self._alive:
                return False
            self._fed += count
            if value:
                self.blocks = self._fed
            for match in self._alive:
                match.blocks = self._fed
                if len(match.stream.tiers) > 1:
                    _count_tier(match, held, count=count)
        return bool(self._alive)

    def longest_with(self, block_size: int) -> int:
        """Return the blocks of the longest match of a stream that has a group of this block size."""
        return max(
            (
                match.blocks
                for match in self._started or ()
                if any(each.group.block_size == block_size for each in match.stream.groups)
            ),
            default=0,
        )

    def apply_groups(self, held: Mapping[int, Sequence[HeldRun]], *, block_size: int) -> None:
        """Shorten the matches to what all groups of their streams accept. `held`: as of `group_match.shorten`."""
        for match in self._started or ():
            stream = match.stream
            if not stream.groups:
                continue
            tokens = match.blocks * block_size
            hit, by = shorten(stream.groups, held, tokens=tokens, step=stream.step)
            if hit == tokens:
                continue
            match.blocks = hit // block_size
            if match.counted is not None:
                match.counted = None
                _count_tiers(match, self.held or ())
            if by is not None and stream.mask != _every_block(self._width):
                match.held_back = HeldBack(tokens=tokens, by=by)

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


def _count_tiers(match: Match, runs: Iterable[HeldRun]) -> None:
    """Count the tiers of a match's blocks anew."""
    left = match.blocks
    for held, count in runs:
        if not left:
            return
        _count_tier(match, held, count=min(count, left))
        left -= min(count, left)


def _worth(match: Match) -> tuple[int, float]:
    return match.blocks, weighted_blocks(match.tiers)


def match_prompt(
    table: MatchTable, values: Mapping[int, Sequence[bytes | None]], *, keys: Mapping[int, bytes] | None = None
) -> PrefixLookup:
    """Match a prompt whose values are all at hand (`values`: block size -> values)."""
    walks = {
        size: PrefixWalk(streams, width=table.width, has_groups=size in table.grouped)
        for size, streams in table.masks.items()
    }
    for size, walk in walks.items():
        walk.feed(runs_of(values.get(size, ())))
    apart = {size: held_runs(runs_of(values.get(size, ())), width=table.width) for size in table.apart}
    return prefix_lookup(table, walks, keys=keys or {}, apart=apart)


def held_runs(runs: Iterable[Run], *, width: int) -> list[HeldRun]:
    """Return who holds the blocks of these runs."""
    return [(held_mask(value, width=width) if value else 0, count) for value, count in runs]


def prefix_lookup(
    table: MatchTable,
    walks: Mapping[int, PrefixWalk],
    *,
    keys: Mapping[int, bytes],
    apart: Mapping[int, Sequence[HeldRun]] = NO_RUNS,
    also: Sequence[Any] = (),
) -> PrefixLookup:
    """Combine the walks of all block sizes (`walks`: block size -> walk); most matched tokens win.

    `apart`: for the sizes that are apart in the table, who holds the blocks of the prompt.
    """
    matched: dict[str, int] = {}
    tiers: dict[str, Mapping[str, int]] = {}
    held_back: Mapping[str, HeldBack] = NOT_HELD_BACK
    sizes = table.block_sizes  # copied where one differs, which is seldom
    for size in table.grouped:
        walk = walks[size]
        walk.apply_groups({**apart, size: walk.held or ()}, block_size=size)
    for size, walk in walks.items():
        for endpoint, match in walk.matches().items():
            known_size = sizes[endpoint]
            is_longest = match.blocks * size > matched.get(endpoint, 0) * known_size
            if is_longest:
                matched[endpoint], tiers[endpoint] = match.blocks, match.tiers
                if size != known_size:
                    sizes = {**sizes, endpoint: size}
            if match.held_back is not None and (is_longest or endpoint not in matched):
                held_back = {**held_back, endpoint: match.held_back}
    return PrefixLookup(
        matched_blocks=matched,
        block_size=sizes,
        endpoints=table.endpoints,
        registry=table.registry,
        indexer_alive=table.registry.indexer_alive,
        tiers=tiers,
        keys=keys,
        held_back=held_back,
        also=also,
    )


def usable_tokens(tokens: bytes) -> int:
    """Return how many tokens of a prompt can be hit: vLLM always computes the last one anew."""
    return max(len(tokens) // 4 - 1, 0)
