"""Use cases of `kvmesh index`: how the sources stand, what they take in Redis, and one begun anew by hand.

`verify_index` is the fourth, and the picker's side has the look-up of a prompt. All but the clear only read.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_indexer.inspect.index_audit import SlotOwner, read_owner
from kv_indexer.inspect.index_report import (
    SizeReport,
    SlotSize,
    SourcesReport,
    size_report,
    slot_bytes,
    sources_report,
    streams_named,
)
from kv_indexer.inspect.redis_raw import BLOCKS, HELD, read_holders, slot_number
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry
from kvmesh.errors import UnknownSourceError

SAMPLED_BLOCKS = 200  # a source
SAMPLED_FIELDS = 100  # of a source's hash


class SourcesReader(Protocol):
    """The registry of the index. Every method raises IndexUnavailableError."""

    async def registry(self) -> Registry:
        """Return what the index says of itself."""

    async def now(self) -> float:
        """Return Redis' clock, in unix seconds."""


class SizeReader(Protocol):
    """Sizes in Redis. Every method raises IndexUnavailableError."""

    async def slot_records(self) -> Mapping[bytes, bytes]:
        """Return the raw records of all slots."""

    async def held_slots(self) -> Mapping[int, int]:
        """Return the slots that hold anything, with the number of fields; -1 where the key is no hash."""

    async def some_blocks(self, slot: int, *, count: int) -> list[bytes]:
        """Return block keys of a source, picked at random; fewer where it has fewer."""

    async def values(self, names: Sequence[bytes]) -> list[bytes | None]:
        """Return the strings at these keys; None for a key that is none."""

    async def sizes(self, names: Sequence[bytes], *, samples: int = 0) -> list[int]:
        """Return the bytes that each key takes; 0 where it is gone."""

    async def used_memory_bytes(self) -> int:
        """Return what Redis uses in all, for data of anyone."""


class Clearer(Protocol):
    """Begins streams anew. Every method raises IndexUnavailableError."""

    async def registry(self) -> Registry:
        """Return what the index says of itself."""

    async def clear(self, stream: str) -> int | None:
        """Begin a new epoch of a stream, whoever follows it; return the epoch, None for an unknown stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stream that is to be cleared."""

    stream: str  # HOST:PORT#RANK
    blocks: int
    owner: str  # the indexer that will replay it; "": nobody


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """A stream that was begun anew."""

    stream: str
    epoch: int
    owner: str


async def inspect_sources(
    index: SourcesReader,
    *,
    findings: Callable[[], Awaitable[Sequence[Finding]]],
    interval_seconds: float,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> SourcesReport:
    """Look twice, `interval_seconds` apart, to tell how fast events come; 0: once. Raise IndexUnavailableError."""
    if interval_seconds <= 0:
        return sources_report(
            None, await index.registry(), seconds=0.0, now=await index.now(), findings=await findings()
        )
    first_at, before = await index.now(), await index.registry()
    await wait(interval_seconds)
    now, after = await index.now(), await index.registry()
    return sources_report(before, after, seconds=now - first_at, now=now, findings=await findings())


async def inspect_sizes(index: SizeReader) -> SizeReport:
    """Estimate what each source takes, from samples. Raise IndexUnavailableError."""
    held = await index.held_slots()
    records = await index.slot_records()
    sources = []
    for text, record in records.items():
        slot, owner = slot_number(text), read_owner(record)
        if slot is not None and owner is not None and held.get(slot, 0) >= 0:
            sources.append(await _slot_size(index, slot, owner, blocks=held.get(slot, 0)))
    return size_report(sources, redis_bytes=await index.used_memory_bytes())


async def _slot_size(index: SizeReader, slot: int, owner: SlotOwner, *, blocks: int) -> SlotSize:
    (held_bytes,) = await index.sizes([HELD + b"%d" % slot], samples=SAMPLED_FIELDS)
    names = [BLOCKS + key for key in await index.some_blocks(slot, count=SAMPLED_BLOCKS)] if blocks else []
    pairs = zip(await index.sizes(names), await index.values(names), strict=True)
    there = [(size, len(read_holders(value)[0])) for size, value in pairs if value is not None]
    measured, formula, holders = slot_bytes(
        blocks=blocks,
        held_bytes=held_bytes,
        key_bytes=[size for size, _ in there],
        holders=[count for _, count in there],
    )
    endpoint, _, rank = owner.stream.rpartition("#")
    return SlotSize(
        endpoint=endpoint,
        dp_rank=int(rank),
        tier=owner.tier,
        slot=slot,
        live=owner.live,
        blocks=blocks,
        holders=holders,
        bytes=measured,
        formula_bytes=formula,
    )


async def find_targets(index: Clearer, source: str) -> list[Target]:
    """Return the streams that `HOST:PORT#RANK` or `HOST:PORT` means.

    Raise UnknownSourceError, which names those that there are, or IndexUnavailableError.
    """
    registry = await index.registry()
    names = {f"{stream.endpoint}#{stream.dp_rank}": stream for stream in registry.streams}
    found = streams_named(source, {name: stream.endpoint for name, stream in names.items()})
    if not found:
        known = ", ".join(sorted(names)[:20]) or "none at all"
        raise UnknownSourceError(f"the index knows no source {source!r}; it knows {known}")
    blocks: dict[str, int] = {}
    for slot in registry.slots:
        name = f"{slot.endpoint}#{slot.dp_rank}"
        blocks[name] = blocks.get(name, 0) + slot.blocks
    return [Target(stream=name, blocks=blocks.get(name, 0), owner=names[name].owner) for name in found]


async def clear_sources(index: Clearer, targets: Sequence[Target]) -> list[Cleared]:
    """Void what these streams claim; their owners notice and replay. Raise IndexUnavailableError.

    A stream that has vanished meanwhile is left out: there is nothing to clear.
    """
    cleared = []
    for target in targets:
        epoch = await index.clear(target.stream)
        if epoch is not None:
            cleared.append(Cleared(stream=target.stream, epoch=epoch, owner=target.owner))
    return cleared
