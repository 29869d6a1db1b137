"""The longest cached prefix of each endpoint, from the slots that hold each leading block. Pure; used by readers."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from kv_indexer.core.source import EndpointCache, Registry, SlotRecord

Run = tuple[bytes, int]  # (bitmap of slots, number of consecutive blocks that have it)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixLookup:
    """Who holds how much of a prompt's beginning."""

    matched_blocks: Mapping[str, int]  # endpoint -> consecutive cached blocks from the first; absent means 0
    block_size: Mapping[str, int]  # endpoint -> tokens a block of its match; of its cache where nothing matched
    endpoints: Mapping[str, EndpointCache]  # every endpoint that the index knows
    registry: Registry  # the snapshot that the answer was read against
    indexer_alive: bool  # False: nobody keeps the index true, and the states in `endpoints` are what was true once


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotMask:
    """The slots of one stream that share a block size: its tiers, whose blocks complete each other."""

    endpoint: str
    mask: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchTable:
    """A registry, prepared for many lookups."""

    registry: Registry
    endpoints: Mapping[str, EndpointCache]
    block_sizes: Mapping[str, int]
    masks: Mapping[int, tuple[SlotMask, ...]]  # block size -> streams
    width: int  # bytes of a bitmap that can matter


def match_table(registry: Registry) -> MatchTable:
    """Prepare a registry snapshot; once a registry version, not once a lookup."""
    width = max((slot.slot // 8 + 1 for slot in registry.slots), default=0)
    masks: dict[int, dict[tuple[str, int], int]] = {}
    for slot in registry.slots:
        streams = masks.setdefault(slot.block_size, {})
        stream = (slot.endpoint, slot.dp_rank)
        streams[stream] = streams.get(stream, 0) | _bit(slot, width=width)
    endpoints = registry.endpoints()
    return MatchTable(
        registry=registry,
        endpoints=endpoints,
        block_sizes={name: cache.block_size for name, cache in endpoints.items() if cache.block_size},
        masks={
            size: tuple(SlotMask(endpoint=endpoint, mask=mask) for (endpoint, _), mask in streams.items())
            for size, streams in masks.items()
        },
        width=width,
    )


def _bit(slot: SlotRecord, *, width: int) -> int:
    # SETBIT counts from the most significant bit of the first byte
    return 1 << (8 * width - 1 - slot.slot)


def runs_of(bitmaps: Iterable[bytes | None]) -> list[Run]:
    """Compress the bitmaps of consecutive blocks, up to the first block that nobody holds."""
    runs: list[Run] = []
    for bitmap, blocks in groupby(bitmaps):
        if not bitmap:
            break
        runs.append((bitmap, len(list(blocks))))
    return runs


def longest_prefixes(runs: Sequence[Run], *, streams: Sequence[SlotMask], width: int) -> dict[str, int]:
    """Return endpoint -> leading blocks held without a hole; over an endpoint's ranks the longest counts.

    A stream that joins after the first block never starts: vLLM can only reuse a prefix.
    """
    matched: dict[str, int] = {}
    alive = list(streams)
    total = 0
    for bitmap, count in runs:
        held = int.from_bytes(bitmap[:width].ljust(width, b"\0"), "big")
        alive = [stream for stream in alive if held & stream.mask]
        if not alive:
            break
        total += count
        for stream in alive:
            # totals only grow, so the last stream of an endpoint to survive decides
            matched[stream.endpoint] = total
    return matched


def prefix_lookup(table: MatchTable, runs: Mapping[int, Sequence[Run]]) -> PrefixLookup:
    """Combine the walks of all block sizes (`runs`: block size -> runs); most matched tokens win."""
    matched: dict[str, int] = {}
    sizes = dict(table.block_sizes)
    for size, of_size in runs.items():
        found = longest_prefixes(of_size, streams=table.masks.get(size, ()), width=table.width)
        for endpoint, blocks in found.items():
            if blocks * size > matched.get(endpoint, 0) * sizes[endpoint]:
                matched[endpoint], sizes[endpoint] = blocks, size
    return PrefixLookup(
        matched_blocks=matched,
        block_size=sizes,
        endpoints=table.endpoints,
        registry=table.registry,
        indexer_alive=table.registry.indexer_alive,
    )


def usable_tokens(tokens: bytes) -> int:
    """Return how many tokens of a prompt can be hit: vLLM always computes the last one anew."""
    return max(len(tokens) // 4 - 1, 0)
