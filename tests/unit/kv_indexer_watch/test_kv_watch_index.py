"""Watching the shared index: what is known, what is said once, what is swept."""

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import cast

import pytest

from kv_indexer.ports import IndexWriter
from kv_indexer.watch.watch_index import LEAST_PAUSE_SECONDS, SWEEP_FIELDS, WATCH_SECONDS, IndexWatch
from kvmesh.blocks.source import Registry, SourceState, Stream, StreamRecord
from kvmesh.errors import IndexUnavailableError

A, A1 = Stream(endpoint="a:1"), Stream(endpoint="a:1", dp_rank=1)
RECORD = StreamRecord(
    endpoint="a:1", dp_rank=0, epoch=1, last_seq=0, last_ts=0.0, state=SourceState.LIVE, reason="", owner="me"
)
REGISTRY = Registry(version=b"1", streams=(RECORD, replace(RECORD, dp_rank=1, owner="")))


class FakeIndex:
    """The few methods that are watched."""

    def __init__(self) -> None:
        self.registry = REGISTRY
        self.fails = False
        self.void_slices = 0
        self.seen: list[Collection[Stream]] = []
        self.now = 0.0
        self.slice_seconds = 0.0

    def watch(self) -> IndexWatch:
        return IndexWatch(writer=cast("IndexWriter", self), seen=self.seen.append, clock=lambda: self.now)

    async def read_registry(self) -> Registry:
        self._maybe_fail()
        return self.registry

    async def sweep(self, *, fields: int) -> bool:
        assert fields == SWEEP_FIELDS
        self._maybe_fail()
        self.void_slices -= 1
        self.now += self.slice_seconds
        return self.void_slices >= 0

    def _maybe_fail(self) -> None:
        if self.fails:
            raise IndexUnavailableError("Redis is away")


async def test_a_look_tells_which_streams_there_are_and_who_follows_them() -> None:
    index = FakeIndex()
    watch = index.watch()
    assert watch.trouble == "not asked yet"

    assert await watch.look() == WATCH_SECONDS
    assert (watch.trouble, index.seen) == ("", [[A, A1]])
    owners = {stream: watch.owner(stream) for stream in (A, A1, Stream(endpoint="b:1"))}
    assert owners == {A: "me", A1: "", Stream(endpoint="b:1"): ""}


async def test_what_the_registry_says_of_a_stream_counts_while_it_was_read_recently() -> None:
    index = FakeIndex()
    watch = index.watch()
    assert watch.record(A, max_age_seconds=1.0) is None
    index.now = 10.0
    await watch.look()

    index.now = 11.0
    assert watch.record(A, max_age_seconds=1.0) == RECORD
    assert watch.record(Stream(endpoint="b:1"), max_age_seconds=1.0) is None
    index.now = 11.1
    assert watch.record(A, max_age_seconds=1.0) is None

    index.fails = True
    await watch.look()
    assert watch.record(A, max_age_seconds=1.0) is None


async def test_an_index_out_of_reach_is_said_once_and_so_is_its_return(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    index = FakeIndex()
    index.fails = True
    watch = index.watch()
    for _ in range(3):
        await watch.look()
    assert (watch.trouble, index.seen) == ("Redis is away", [])
    assert caplog.text.count("Redis is unavailable, the index stands still: Redis is away") == 1

    index.fails = False
    for _ in range(3):
        await watch.look()
    assert watch.trouble == ""
    assert caplog.text.count("Redis answers") == 1


async def test_what_cannot_be_read_is_said_once_a_record_and_when_it_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    index = FakeIndex()
    watch = index.watch()
    for unreadable in (("slot 9: odd",), ("slot 9: odd", "slot 8: odd"), ("slot 9: odd", "slot 8: odd"), (), ()):
        index.registry = replace(REGISTRY, unreadable=unreadable)
        await watch.look()

    messages = [record.getMessage() for record in caplog.records if "records in Redis" in record.getMessage()]
    assert messages == [
        "1 records in Redis cannot be read and are not believed: slot 9: odd",
        "1 records in Redis cannot be read and are not believed: slot 8: odd",
        "all records in Redis can be read again",
    ]


async def test_sweeping_leaves_redis_four_fifths_of_the_time_while_something_is_void_and_waits_for_redis() -> None:
    index = FakeIndex()
    index.void_slices = 2
    index.slice_seconds = 0.25
    watch = index.watch()
    pauses = [await watch.sweep() for _ in range(3)]
    index.fails = True
    pauses.append(await watch.sweep())

    assert pauses == [1.0, 1.0, WATCH_SECONDS, WATCH_SECONDS]
    index.fails, index.void_slices, index.slice_seconds = False, 1, 0.0
    assert await watch.sweep() == LEAST_PAUSE_SECONDS


async def test_a_subscriber_is_told_of_each_new_registry_and_of_none_that_is_the_same() -> None:
    index = FakeIndex()
    told: list[tuple[StreamRecord | None, float]] = []
    watch = index.watch()

    def agree(record: StreamRecord | None, asked_at: float) -> bool:
        told.append((record, asked_at))
        return True

    with watch.subscribe(A, agree):
        for index.now in (1.0, 2.0, 3.0):
            if index.now == 3.0:
                index.registry = replace(REGISTRY, streams=())
            await watch.look()
    index.registry = REGISTRY
    await watch.look()
    assert told == [(RECORD, 1.0), (None, 3.0)]


async def test_whoever_disagrees_is_told_again_with_each_reading_until_it_is_so() -> None:
    index = FakeIndex()
    told: dict[Stream, list[float]] = {A: [], A1: []}
    watch = index.watch()

    def check(stream: Stream, agrees_from: float) -> Callable[[StreamRecord | None, float], bool]:
        def note(record: StreamRecord | None, asked_at: float) -> bool:
            told[stream].append(asked_at)
            return asked_at >= agrees_from

        return note

    with watch.subscribe(A1, check(A1, 9.0)):
        with watch.subscribe(A, check(A, 3.0)):
            for index.now in (1.0, 2.0, 3.0, 4.0):  # the registry stays the same object
                await watch.look()
        assert told == {A: [1.0, 2.0, 3.0], A1: [1.0, 2.0, 3.0, 4.0]}
    await watch.look()
    assert told[A1] == [1.0, 2.0, 3.0, 4.0]
