"""The longest cached prefix of each endpoint, from the slots that hold each leading block. Pure.

A *value* is Redis' record of a block: one slot in decimal, or `B` and a bitmap of slots, bit 0 first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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

Run = tuple[bytes | None, int]  # a value, and how many consecutive blocks have it
NO_RUNS: Mapping[int, Sequence[HeldRun]] = MappingProxyType({})
NOT_HELD_BACK: Mapping[str, HeldBack] = MappingProxyType({})


class PrefixLookup(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a prompt's beginning each endpoint holds; a pod with several ranks as much as each of them."""

    matched_blocks: Mapping[str, int]  # endpoint -> consecutive cached blocks from the first; absent means 0
    block_size: Mapping[str, int]  # endpoint -> tokens per block of its match, or of its cache without a match
    endpoints: Mapping[str, EndpointCache]  # every endpoint known to the index, with its state
    registry: Registry  # the snapshot behind the answer
    indexer_alive: bool  # if False, no indexer updates the index: the states in `endpoints` are out of date
    # endpoint -> tier -> blocks of its match, each counted in its best tier; `TIER_WEIGHTS` has their worth
    tiers: Mapping[str, Mapping[str, int]] = {}
    keys: Mapping[int, bytes] = {}  # block size -> packed keys of all of the prompt's blocks
    held_back: Mapping[str, HeldBack] = {}  # endpoint -> why its match is shorter than full attention's
    ranked: Mapping[str, Sequence[str]] = {}  # endpoint with several ranks -> the endpoints of its ranks
    also: Sequence[Any] = ()  # Redis' replies to the commands passed through, including error replies


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMask:
    """The slots of one stream that share a block size: its tiers, whose blocks complement each other.

    These are full attention's slots, whose match bounds all others. A stream without full attention has the slots of
    its other groups, and a mask that every block matches.
    """

    endpoint: str  # its name with the rank if its pod has several
    mask: int  # of all slots
    tiers: tuple[tuple[str, int], ...]  # (tier, its slots), best first
    groups: tuple[GroupMask, ...] = ()  # its other groups: each must accept a hit
    step: int = 0  # tokens: if there are other groups, a hit ends at a multiple of it


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    """A registry, prepared for many lookups."""

    registry: Registry
    endpoints: Mapping[str, EndpointCache]
    block_sizes: Mapping[str, int]
    masks: Mapping[int, tuple[StreamMask, ...]]  # block size -> streams
    width: int  # relevant bytes of a bitmap
    grouped: frozenset[int] = frozenset()  # block sizes with streams that have other groups
    apart: frozenset[int] = frozenset()  # group block sizes that differ from their stream's
    ranked: Mapping[str, Sequence[str]] = field(default_factory=dict)  # as in PrefixLookup


@dataclass(slots=True, kw_only=True)
class Match:
    """How much of a prompt one stream holds, as far as it was followed."""

    stream: StreamMask
    blocks: int = 0
    counted: dict[str, int] | None = None  # tier -> blocks, for streams with several tiers
    held_back: HeldBack | None = None

    @property
    def tiers(self) -> Mapping[str, int]:
        """Return tier -> blocks, each in its best tier."""
        return self.counted or {self.stream.tiers[0][0]: self.blocks}


def match_table(registry: Registry) -> MatchTable:
    """Prepare a registry snapshot; once per registry version, not per lookup."""
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
    ranked = registry.ranked()

    def name(stream: Stream) -> str:
        return stream.name if stream.endpoint in ranked else stream.endpoint

    streams_of = {
        size: [_stream_mask(name(stream), size, tiers, groups.get(stream)) for stream, tiers in streams.items()]
        for size, streams in masks.items()
    }
    for stream, of_stream in groups.items():
        if stream not in dense:
            size = min(group.block_size for group in of_stream)
            streams_of.setdefault(size, []).append(_unbound_mask(name(stream), size, of_stream, width))
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
        ranked=ranked,
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
    """Return a bit beyond all slots' bits, set for every block."""
    return 1 << 8 * width


def runs_of(values: Sequence[bytes | None]) -> list[Run]:
    """Group consecutive equal values."""
    runs: list[Run] = []
    for _ in range(FEW_RUNS):
        if not values:
            return runs
        # Nearly always all blocks of a prompt have one value, or all up to its new part: counting is the fastest way.
        value = values[0]
        count = values.count(value)
        rest = values[count:]
        if value in rest:
            break
        runs.append((value, count))
        values = rest
    return runs + [(value, len(list(run))) for value, run in groupby(values)]


def held_mask(value: bytes, *, width: int) -> int:
    """Return the slots of a value; slots beyond the width and unreadable values are left out."""
    if value[:1] == b"B":
        return int.from_bytes(value[1 : width + 1].ljust(width, b"\0"), "big")
    if len(value) <= SLOT_DIGITS and value.isdigit() and (slot := int(value)) < 8 * width:
        return 1 << (8 * width - 1 - slot)
    return 0


class PrefixWalk:
    """Follows one prompt through the values of its blocks, batch by batch.

    A stream that lacks the first block never starts: vLLM can only reuse a prefix. The exception is a stream without
    full attention, which continues in any case: it may need only the last blocks. `has_groups` is true if any stream
    has other groups.
    """

    def __init__(self, streams: Sequence[StreamMask], *, width: int, has_groups: bool = False) -> None:
        self.blocks = 0  # up to the last held block of a match
        self.held: list[HeldRun] | None = [] if has_groups else None  # the holders of the blocks fed so far
        self._fed = 0  # blocks
        self._width = width
        self._streams = streams
        self._started: list[Match] | None = None  # the streams that hold the first block
        self._alive: list[Match] = []

    def feed(self, runs: Iterable[Run]) -> bool:
        """Process the values of the next blocks; tell whether any stream holds all blocks so far."""
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
        """Shorten the matches to hits that all groups of their streams accept. `held`: as for `group_match.shorten`."""
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
        """Return endpoint -> match."""
        return {match.stream.endpoint: match for match in self._started or ()}


def _count_tier(match: Match, held: int, *, count: int) -> None:
    tier = next(tier for tier, slots in match.stream.tiers if held & slots)
    if match.counted is None:
        match.counted = {}
    match.counted[tier] = match.counted.get(tier, 0) + count


def _count_tiers(match: Match, runs: Iterable[HeldRun]) -> None:
    """Recount the tiers of a match's blocks."""
    left = match.blocks
    for held, count in runs:
        if not left:
            return
        _count_tier(match, held, count=min(count, left))
        left -= min(count, left)


def held_runs(runs: Iterable[Run], *, width: int) -> list[HeldRun]:
    """Return the holders of these runs' blocks."""
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

    `apart`: for each size in the table's `apart`, the holders of the prompt's blocks.
    """
    matched: dict[str, int] = {}
    tiers: dict[str, Mapping[str, int]] = {}
    held_back: Mapping[str, HeldBack] = NOT_HELD_BACK
    sizes = table.block_sizes  # copied only if one differs, which is rare
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
    for pod, ranks in table.ranked.items():
        if all(rank in matched for rank in ranks):
            least = min(ranks, key=lambda rank: (matched[rank] * sizes[rank], weighted_blocks(tiers[rank])))
            matched[pod], tiers[pod] = matched[least], tiers[least]
            sizes = {**sizes, pod: sizes[least]}
    return PrefixLookup(
        matched_blocks=matched,
        block_size=sizes,
        endpoints=table.endpoints,
        registry=table.registry,
        indexer_alive=table.registry.indexer_alive,
        tiers=tiers,
        keys=keys,
        held_back=held_back,
        ranked=table.ranked,
        also=also,
    )


def whole_pods(lookup: PrefixLookup) -> PrefixLookup:
    """Return the lookup of a request that its pod gives to any of its ranks: only what each of them holds counts."""
    pods = {rank: pod for pod, ranks in lookup.ranked.items() for rank in ranks}
    if not pods:
        return lookup
    names = {endpoint: pods.get(endpoint, endpoint) for endpoint in lookup.block_size}
    return msgspec.structs.replace(
        lookup,
        matched_blocks={name: count for name, pod in names.items() if (count := lookup.matched_blocks.get(pod, 0))},
        block_size={name: lookup.block_size[pod] for name, pod in names.items()},
        tiers={name: lookup.tiers[pod] for name, pod in names.items() if pod in lookup.tiers},
        held_back={},
    )


def usable_tokens(tokens: bytes) -> int:
    """Return how many tokens of a prompt can be hit: vLLM always recomputes the last one."""
    return max(len(tokens) // 4 - 1, 0)
