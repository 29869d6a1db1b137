"""The reports of `kvmesh index` (sources and rates, memory use in Redis), and streams cleared by hand.

`-o json` prints the field names of the reports, so they must not change. Everything but the clear only reads.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from kv_indexer.inspect.index_audit import BLOCKS, HELD, SlotOwner, read_holders, read_owner, slot_number
from kv_indexer.inspect.redis_inspect import RedisInspector
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry, SourceStatus
from kvmesh.errors import UnknownSourceError

# Bytes by the formula of docs/reference/redis.md: an entry of a source, a block key, and its value if it has several
# holders.
HELD_BYTES = 85
BLOCK_KEY_BYTES = 66
BITMAP_BYTES = 40
# MEMORY USAGE leaves out a key's share of Redis' table of all keys, 8 to 16 bytes. It counts the object of a slot's
# number, which Redis has anyway, and ignores the allocator's rounding: on Redis 6.2, 7.0 and Valkey 9.1 the sum was
# within a ninth of the memory really used.
BUCKET_BYTES = 12
SAMPLED_BLOCKS = 200  # per source
SAMPLED_FIELDS = 100  # of a source's hash


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """One source, or a stream without any claim yet (`tier` and `slot` None)."""

    endpoint: str
    dp_rank: int
    tier: str | None
    slot: int | None
    state: str
    reason: str
    epoch: int
    last_seq: int
    lag_seconds: float | None  # publisher's time of the last batch -> Redis' time when it was applied
    idle_seconds: float | None  # since that time; None before the first batch
    blocks: int
    block_size: int | None
    events: int  # of the stream, applied in total
    events_per_second: float | None  # of the stream; None after a single look
    owner: str  # the indexer that follows it, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesReport:
    """All sources."""

    sources: tuple[SourceLine, ...]
    indexer_alive: bool
    findings: tuple[Finding, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSize:
    """The memory use of one source. Blocks with several holders are divided among them."""

    endpoint: str
    dp_rank: int
    tier: str
    slot: int
    live: bool  # False while it waits for its sweep
    blocks: int
    holders: float  # average number of sources that hold one of its blocks
    bytes: int  # estimated from samples
    formula_bytes: int  # by the formula of docs/reference/redis.md


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """The memory use of the index."""

    sources: tuple[SlotSize, ...]
    bytes: int
    formula_bytes: int
    redis_bytes: int  # of this Redis in total, including other programs' data


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A stream to clear."""

    stream: str  # HOST:PORT#RANK
    blocks: int
    owner: str  # the indexer that will replay it, or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """A stream that was cleared."""

    stream: str
    epoch: int
    owner: str


async def inspect_sources(
    index: RedisInspector,
    *,
    findings: Callable[[], Awaitable[Sequence[Finding]]],
    interval_seconds: float,
    wait: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> SourcesReport:
    """Read twice, `interval_seconds` apart, to measure the event rate; once if 0. Raise IndexUnavailableError."""
    before, first_at = None, 0.0
    if interval_seconds > 0:
        first_at, before = await index.now(), await index.registry()
        await wait(interval_seconds)
    now, after = await index.now(), await index.registry()
    return sources_report(before, after, seconds=now - first_at, now=now, findings=await findings())


def sources_report(
    before: Registry | None, after: Registry, *, seconds: float, now: float, findings: Sequence[Finding]
) -> SourcesReport:
    """Return the state of every source; `before` was read `seconds` earlier, `now` is Redis' clock in unix seconds."""
    counted = {(stream.endpoint, stream.dp_rank): stream.events for stream in before.streams} if before else {}

    def line(source: SourceStatus) -> SourceLine:
        events_before = counted.get((source.endpoint, source.dp_rank))
        rate = None
        if events_before is not None and seconds > 0:
            rate = round(max(source.events - events_before, 0) / seconds, 3)  # a dropped stream counts from 0 again
        applied = source.applied_at > 0
        lag = source.applied_at - source.last_batch_at if applied and source.last_batch_at > 0 else None
        return SourceLine(
            endpoint=source.endpoint,
            dp_rank=source.dp_rank,
            tier=source.tier,
            slot=source.slot,
            state=source.state.value,
            reason=source.reason,
            epoch=source.epoch,
            last_seq=source.last_seq,
            lag_seconds=None if lag is None else round(lag, 3),
            idle_seconds=round(max(now - source.applied_at, 0.0), 3) if applied else None,
            blocks=source.cached_blocks,
            block_size=source.block_size,
            events=source.events,
            events_per_second=rate,
            owner=source.owner,
        )

    return SourcesReport(
        sources=tuple(map(line, after.sources())),
        indexer_alive=after.indexer_alive,
        findings=tuple(findings),
        unreadable=after.unreadable,
    )


async def inspect_sizes(index: RedisInspector) -> SizeReport:
    """Estimate the memory use of each source from samples, largest first. Raise IndexUnavailableError."""
    held = await index.held_slots()
    records = await index.slot_records()
    sources = []
    for text, record in records.items():
        slot, owner = slot_number(text), read_owner(record)
        if slot is not None and owner is not None and held.get(slot, 0) >= 0:
            sources.append(await _slot_size(index, slot, owner, blocks=held.get(slot, 0)))
    return SizeReport(
        sources=tuple(sorted(sources, key=lambda source: (-source.bytes, source.slot))),
        bytes=sum(source.bytes for source in sources),
        formula_bytes=sum(source.formula_bytes for source in sources),
        redis_bytes=await index.used_memory_bytes(),
    )


async def _slot_size(index: RedisInspector, slot: int, owner: SlotOwner, *, blocks: int) -> SlotSize:
    (held_bytes,) = await index.sizes([HELD + b"%d" % slot], samples=SAMPLED_FIELDS)
    names = [BLOCKS + key for key in await index.some_blocks(slot, count=SAMPLED_BLOCKS)] if blocks else []
    pairs = zip(await index.sizes(names), await index.values(names), strict=True)
    there = [(size, len(read_holders(value)[0])) for size, value in pairs if value is not None]
    key_bytes, counts = [size for size, _ in there], [count for _, count in there]
    measured, formula, holders = slot_bytes(blocks=blocks, held_bytes=held_bytes, key_bytes=key_bytes, holders=counts)
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


def slot_bytes(
    *, blocks: int, held_bytes: int, key_bytes: Sequence[int], holders: Sequence[int]
) -> tuple[int, int, float]:
    """Return (estimated bytes, bytes by the formula, holders per block) of one source.

    `held_bytes` is the size of its hash. `key_bytes` and `holders` are samples: the sizes of its blocks' keys, and how
    many sources share each block; without a sample a block counts as unshared.
    """
    counts = [max(count, 1) for count in holders] or [1]
    measured = [(size + BUCKET_BYTES) / count for size, count in zip(key_bytes, counts, strict=False)]
    formula = [(BLOCK_KEY_BYTES + (BITMAP_BYTES if count > 1 else 0)) / count for count in counts]
    return (
        round(held_bytes + blocks * (sum(measured) / len(measured) if measured else 0.0)),
        round(blocks * (HELD_BYTES + sum(formula) / len(formula))),
        round(len(counts) / sum(1 / count for count in counts), 2),
    )


async def find_targets(index: RedisInspector, source: str) -> list[Target]:
    """Return the streams named by `HOST:PORT#RANK` or `HOST:PORT`.

    Raise UnknownSourceError, which lists the known sources, or IndexUnavailableError.
    """
    registry = await index.registry()
    slots = registry.slots_by_stream()
    streams = {record.stream.name: record for record in registry.streams}
    found = [
        Target(stream=name, blocks=sum(slot.blocks for slot in slots.get(record.stream, ())), owner=record.owner)
        for name, record in sorted(streams.items())
        if source in (name, record.endpoint)
    ]
    if not found:
        known = ", ".join(sorted(streams)[:20]) or "none at all"
        raise UnknownSourceError(f"the index knows no source {source!r}; it knows {known}")
    return found


async def clear_sources(index: RedisInspector, targets: Sequence[Target]) -> list[Cleared]:
    """Void all claims of these streams; their owners notice and replay. Raise IndexUnavailableError.

    A stream that has vanished meanwhile is left out: there is nothing to clear.
    """
    cleared = []
    for target in targets:
        epoch = await index.clear(target.stream)
        if epoch is not None:
            cleared.append(Cleared(stream=target.stream, epoch=epoch, owner=target.owner))
    return cleared
