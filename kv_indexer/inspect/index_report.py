"""What the index has, as numbers for people and scripts: how fast, how far behind, how large. Pure.

Made by `inspect_index`, shown by `index_pages`; the field names are what `--json` prints and stay as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry, SourceStatus

# Bytes by the formula of docs/redis.md: an entry of a source, a block key, and its value once it has several holders.
HELD_BYTES = 85
BLOCK_KEY_BYTES = 66
BITMAP_BYTES = 40
# What MEMORY USAGE leaves out: a key's share of Redis' table of all keys, 8 to 16 bytes. It counts a slot's number too,
# which is an object that Redis has anyway, and no allocator's rounding: on Redis 6.2, 7.0 and Valkey 9.1 the sum was
# within a ninth of what Redis really used.
BUCKET_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """One source, or a stream that has claimed nothing yet (`tier` and `slot` None)."""

    endpoint: str
    dp_rank: int
    tier: str | None
    slot: int | None
    state: str
    reason: str
    epoch: int
    last_seq: int
    lag_seconds: float | None  # from the publisher's time of the last batch to Redis' time when it was applied
    idle_seconds: float | None  # since then; None before the first batch
    blocks: int
    block_size: int | None
    events: int  # of the stream, applied in all
    events_per_second: float | None  # of the stream; None if only one look was taken
    owner: str  # the indexer that follows it; "" when nobody does


@dataclass(frozen=True, slots=True, kw_only=True)
class SourcesReport:
    """All sources."""

    sources: tuple[SourceLine, ...]
    indexer_alive: bool
    findings: tuple[Finding, ...]
    unreadable: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSize:
    """What one source takes. Blocks that several sources hold are shared out among them."""

    endpoint: str
    dp_rank: int
    tier: str
    slot: int
    live: bool  # False: waits for its sweep
    blocks: int
    holders: float  # sources that hold one of its blocks, on average
    bytes: int  # estimated from samples
    formula_bytes: int  # by the formula of docs/redis.md


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeReport:
    """What the index takes."""

    sources: tuple[SlotSize, ...]
    bytes: int
    formula_bytes: int
    redis_bytes: int  # what this Redis uses in all, for data of anyone


def sources_report(
    before: Registry | None, after: Registry, *, seconds: float, now: float, findings: Sequence[Finding]
) -> SourcesReport:
    """Return how every source stands; `before` was read `seconds` earlier, `now` is Redis' clock in unix seconds."""
    counted = {} if before is None else {(stream.endpoint, stream.dp_rank): stream.events for stream in before.streams}
    lines = [
        _source_line(source, events_before=counted.get((source.endpoint, source.dp_rank)), seconds=seconds, now=now)
        for source in after.sources()
    ]
    return SourcesReport(
        sources=tuple(lines),
        indexer_alive=after.indexer_alive,
        findings=tuple(findings),
        unreadable=after.unreadable,
    )


def _source_line(source: SourceStatus, *, events_before: int | None, seconds: float, now: float) -> SourceLine:
    rate = None
    if events_before is not None and seconds > 0:
        rate = max(source.events - events_before, 0) / seconds  # a dropped stream counts from 0 again
    applied = source.applied_at > 0
    return SourceLine(
        endpoint=source.endpoint,
        dp_rank=source.dp_rank,
        tier=source.tier,
        slot=source.slot,
        state=source.state.value,
        reason=source.reason,
        epoch=source.epoch,
        last_seq=source.last_seq,
        lag_seconds=round(source.applied_at - source.last_batch_at, 3)
        if applied and source.last_batch_at > 0
        else None,
        idle_seconds=round(max(now - source.applied_at, 0.0), 3) if applied else None,
        blocks=source.cached_blocks,
        block_size=source.block_size,
        events=source.events,
        events_per_second=None if rate is None else round(rate, 3),
        owner=source.owner,
    )


def slot_bytes(
    *, blocks: int, held_bytes: int, key_bytes: Sequence[int], holders: Sequence[int]
) -> tuple[int, int, float]:
    """Return (estimated bytes, bytes by the formula, holders a block) of one source.

    `held_bytes` is what its hash takes, `key_bytes` and `holders` are samples of its blocks' keys and of how many
    sources share each; without a sample a block counts as its own.
    """
    counts = [max(count, 1) for count in holders] or [1]
    measured = [(size + BUCKET_BYTES) / count for size, count in zip(key_bytes, counts, strict=False)]
    formula = [(BLOCK_KEY_BYTES + (BITMAP_BYTES if count > 1 else 0)) / count for count in counts]
    return (
        round(held_bytes + blocks * (sum(measured) / len(measured) if measured else 0.0)),
        round(blocks * (HELD_BYTES + sum(formula) / len(formula))),
        round(len(counts) / sum(1 / count for count in counts), 2),
    )


def size_report(sources: Sequence[SlotSize], *, redis_bytes: int) -> SizeReport:
    """Sum the sources up, the largest first."""
    return SizeReport(
        sources=tuple(sorted(sources, key=lambda source: (-source.bytes, source.slot))),
        bytes=sum(source.bytes for source in sources),
        formula_bytes=sum(source.formula_bytes for source in sources),
        redis_bytes=redis_bytes,
    )


def streams_named(source: str, streams: Mapping[str, str]) -> list[str]:
    """Return which of the streams (name -> endpoint) `HOST:PORT#RANK` or `HOST:PORT` means."""
    return sorted(name for name, endpoint in streams.items() if source in {name, endpoint})
