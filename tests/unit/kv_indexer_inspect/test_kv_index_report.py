"""Numbers about sources: how fast, how far behind, how large; and which streams a name means."""

from dataclasses import replace

import pytest

from kv_indexer.inspect.inspect_index import (
    BITMAP_BYTES,
    BLOCK_KEY_BYTES,
    BUCKET_BYTES,
    HELD_BYTES,
    Cleared,
    SourceLine,
    Target,
    clear_sources,
    find_targets,
    inspect_sources,
    slot_bytes,
    sources_report,
)
from kv_indexer.inspect.redis_inspect import RedisInspector
from kvmesh.blocks.source import Registry, SlotRecord, SourceState, StreamRecord
from kvmesh.errors import UnknownSourceError

STREAM = StreamRecord(
    endpoint="10.0.0.1:8000",
    dp_rank=0,
    epoch=3,
    last_seq=41,
    last_ts=1000.0,
    state=SourceState.LIVE,
    reason="",
    owner="one",
    fence=7,
    applied_at=1000.25,
    events=500,
)
SLOT = SlotRecord(slot=4, endpoint="10.0.0.1:8000", dp_rank=0, tier="GPU", epoch=3, block_size=16, blocks=90)
REGISTRY = Registry(version=b"1", streams=(STREAM,), slots=(SLOT,), indexer_alive=True)
LINE = SourceLine(
    endpoint="10.0.0.1:8000",
    dp_rank=0,
    tier="GPU",
    slot=4,
    state="live",
    reason="",
    epoch=3,
    last_seq=41,
    lag_seconds=0.25,
    idle_seconds=2.0,
    blocks=90,
    block_size=16,
    events=500,
    events_per_second=None,
    owner="one",
)


def test_one_look_tells_all_but_the_rate() -> None:
    report = sources_report(None, REGISTRY, seconds=0.0, now=1002.25, findings=())

    assert (report.sources, report.indexer_alive, report.unreadable) == ((LINE,), True, ())


def test_two_looks_tell_how_fast_events_come() -> None:
    before = replace(REGISTRY, streams=(replace(STREAM, events=440),))

    report = sources_report(before, REGISTRY, seconds=2.0, now=1002.25, findings=())

    assert report.sources == (replace(LINE, events_per_second=30.0),)


def test_a_stream_that_was_not_there_before_or_began_anew_has_no_negative_rate() -> None:
    new = sources_report(replace(REGISTRY, streams=()), REGISTRY, seconds=1.0, now=1002.25, findings=())
    anew = sources_report(
        replace(REGISTRY, streams=(replace(STREAM, events=900),)), REGISTRY, seconds=1.0, now=1002.25, findings=()
    )

    assert [report.sources[0].events_per_second for report in (new, anew)] == [None, 0.0]


def test_a_stream_without_a_batch_is_neither_late_nor_idle() -> None:
    silent = replace(STREAM, last_seq=-1, last_ts=0.0, applied_at=0.0, events=0)

    (line,) = sources_report(None, Registry(version=b"1", streams=(silent,)), seconds=0, now=5.0, findings=()).sources

    assert (line.tier, line.lag_seconds, line.idle_seconds) == (None, None, None)


def test_blocks_are_shared_out_among_their_holders() -> None:
    alone = slot_bytes(blocks=100, held_bytes=8000, key_bytes=[64, 64], holders=[1, 1])
    shared = slot_bytes(blocks=100, held_bytes=8000, key_bytes=[68, 68], holders=[2, 2])

    assert alone == (
        8000 + 100 * (64 + BUCKET_BYTES),
        100 * (HELD_BYTES + BLOCK_KEY_BYTES),
        1.0,
    )
    assert shared == (
        8000 + 100 * (68 + BUCKET_BYTES) // 2,
        100 * HELD_BYTES + 100 * (BLOCK_KEY_BYTES + BITMAP_BYTES) // 2,
        2.0,
    )


def test_a_source_that_holds_nothing_takes_nothing() -> None:
    assert slot_bytes(blocks=0, held_bytes=0, key_bytes=[], holders=[]) == (0, 0, 1.0)


class FakeIndex(RedisInspector):
    """A registry, a clock that goes on by a second a look, and what was cleared."""

    def __init__(self, *registries: Registry) -> None:
        self.registries = list(registries)
        self.clock = 1001.25
        self.cleared: list[str] = []

    async def registry(self) -> Registry:
        return self.registries.pop(0) if len(self.registries) > 1 else self.registries[0]

    async def now(self) -> float:
        self.clock += 1
        return self.clock

    async def clear(self, stream: str) -> int | None:
        self.cleared.append(stream)
        return 9 if stream == "10.0.0.1:8000#0" else None


async def no_findings() -> tuple[()]:
    return ()


async def test_sources_are_looked_at_twice_and_the_rate_is_by_redis_own_clock() -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    index = FakeIndex(replace(REGISTRY, streams=(replace(STREAM, events=440),)), REGISTRY)
    report = await inspect_sources(index, findings=no_findings, interval_seconds=1.5, wait=wait)

    assert (waits, report.sources[0].events_per_second) == ([1.5], 60.0)


async def test_with_no_interval_one_look_is_taken() -> None:
    report = await inspect_sources(FakeIndex(REGISTRY), findings=no_findings, interval_seconds=0)

    assert report.sources == (LINE,)


async def test_a_source_is_found_with_what_a_clear_will_hide_and_who_replays_it() -> None:
    assert await find_targets(FakeIndex(REGISTRY), "10.0.0.1:8000") == [
        Target(stream="10.0.0.1:8000#0", blocks=90, owner="one")
    ]


async def test_a_name_means_a_stream_or_all_of_an_endpoint() -> None:
    names = [("b:1", 0), ("a:1", 1), ("a:1", 0)]
    streams = tuple(replace(STREAM, endpoint=endpoint, dp_rank=rank) for endpoint, rank in names)
    index = FakeIndex(Registry(version=b"", streams=streams))

    assert [target.stream for target in await find_targets(index, "a:1")] == ["a:1#0", "a:1#1"]
    assert [target.stream for target in await find_targets(index, "a:1#1")] == ["a:1#1"]


async def test_an_unknown_source_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(UnknownSourceError, match=r"'nobody:1'; it knows 10\.0\.0\.1:8000#0"):
        await find_targets(FakeIndex(REGISTRY), "nobody:1")
    with pytest.raises(UnknownSourceError, match="none at all"):
        await find_targets(FakeIndex(Registry(version=b"")), "nobody:1")


async def test_a_stream_that_has_vanished_meanwhile_is_not_told_as_cleared() -> None:
    index = FakeIndex(REGISTRY)
    targets = [Target(stream=stream, blocks=1, owner="one") for stream in ("10.0.0.1:8000#0", "gone:1#0")]

    assert await clear_sources(index, targets) == [Cleared(stream="10.0.0.1:8000#0", epoch=9, owner="one")]
    assert index.cleared == ["10.0.0.1:8000#0", "gone:1#0"]
