"""Much at once, in many batches or in one: others get their turn between changes, and a crash between them is safe."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_indexer.apply.apply_events import EventApplier, root_keys
from kv_indexer.apply.batches import BLOCKS_A_CHANGE, LONG_BATCH_BYTES, TURN_BLOCKS
from kv_indexer.apply.change_plan import OPERATION_BLOCKS
from kv_indexer.events.sequence import Frame
from kvmesh.blocks.index_changes import Applied, Clear, IndexChange
from kvmesh.blocks.source import Claim
from kvmesh.errors import IndexUnavailableError
from tests.integration.kv_index import A, Index, memory_index, redis_index
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry, frame, removed, stored

LONG = BLOCKS_A_CHANGE * 2 // 5  # blocks of a batch: two fit into a change, three do not
BATCHES = 5
PROMPT = BATCHES * LONG
FRAMES = [
    frame(seq, stored(*range(seq * LONG + 1, (seq + 1) * LONG + 1), parent=seq * LONG or None))
    for seq in range(BATCHES)
]
EMPTYING = frame(BATCHES, removed(*range(1, PROMPT + 1)))


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


@dataclass
class WatchedWriter:
    """The index's writer, which notes each change and may break down at one of them."""

    writer: Any
    breaks_at: int | None = None  # the change at which it does
    is_applied: bool = False  # whether that change comes through before
    changes: list[IndexChange] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        breaks = len(self.changes) == self.breaks_at
        self.changes.append(change)
        if breaks and not self.is_applied:
            raise IndexUnavailableError("broken down")
        applied: Applied | None = await self.writer.apply(claim, change)
        if breaks:
            raise IndexUnavailableError("broken down, and the answer is lost")
        return applied


async def applier(index: Index, writer: WatchedWriter) -> EventApplier:
    taken = EventApplier(
        claim=await index.claim(A),
        roots=root_keys(hash_seed="kvmesh", model="tiny"),
        writer=writer,
        telemetry=CountingTelemetry(),
    )
    await taken.resume()
    return taken


def blocks_of(change: IndexChange) -> int:
    return sum(len(each.hashes) // 8 for each in change.operations if not isinstance(each, Clear))


async def test_long_batches_are_spread_over_short_changes_that_follow_each_other(index: Index) -> None:
    writer = WatchedWriter(index.writer)
    assert await (await applier(index, writer)).apply([*FRAMES, EMPTYING]) is None

    changes = [(each.previous_seq, each.last_seq, each.part, blocks_of(each)) for each in writer.changes]
    assert changes[:3] == [(-1, 1, 0, 2 * LONG), (1, 3, 0, 2 * LONG), (3, 4, 0, LONG)]
    # one batch advances the position with its last part alone
    assert [each[:3] for each in changes[3:]] == [(4, 4, 1), (4, 4, 2), (4, 4, 3), (4, 5, 0)][-len(changes[3:]) :]
    assert sum(each[3] for each in changes[3:]) == PROMPT
    assert max(each[3] for each in changes) <= BLOCKS_A_CHANGE
    position = await index.position(A)
    assert (position.last_seq, position.part) == (BATCHES, 0)
    assert await index.matched(PROMPT) == {}


@pytest.mark.parametrize("is_applied", [False, True], ids=["not-applied", "answer-lost"])
@pytest.mark.parametrize("breaks_at", [0, 1, 2])
async def test_a_crash_at_any_change_neither_loses_nor_doubles_a_block(
    index: Index, breaks_at: int, is_applied: bool
) -> None:
    with pytest.raises(IndexUnavailableError):
        await (await applier(index, WatchedWriter(index.writer, breaks_at, is_applied))).apply(FRAMES)
    reached = min(2 * (breaks_at + is_applied), BATCHES)
    assert (await index.position(A)).last_seq == reached - 1
    assert await index.matched(PROMPT) == ({A.endpoint: reached * LONG} if reached else {})

    successor = await applier(index, WatchedWriter(index.writer))
    assert await successor.apply(FRAMES) is None
    assert await index.matched(PROMPT) == {A.endpoint: PROMPT}

    assert await successor.apply([EMPTYING]) is None  # one removal each: none was counted twice
    assert await index.matched(PROMPT) == {}


async def test_who_is_overtaken_between_two_changes_goes_on_from_where_the_index_stands(index: Index) -> None:
    overtaken, writer = WatchedWriter(index.writer), WatchedWriter(index.writer)
    first, other = await applier(index, overtaken), await applier(index, writer)
    assert await other.apply(FRAMES[:3]) is None  # behind the back of the first

    assert await first.apply(FRAMES) is None
    assert [(each.previous_seq, each.last_seq) for each in overtaken.changes] == [(-1, 1), (2, 4)]
    assert await first.apply([EMPTYING]) is None
    assert await index.matched(PROMPT) == {}


MANY = 5 * TURN_BLOCKS
REPORT = frame(0, stored(*range(1, MANY + 1)))  # one event of many blocks
ONE_BY_ONE = frame(0, *(stored(each, parent=each - 1 or None) for each in range(1, MANY + 1)))
TIERS = frame(0, *(stored(1, medium=("GPU", "CPU")[each % 2]) for each in range(MANY)))  # nothing can be put together


@pytest.mark.parametrize("batch", [REPORT, ONE_BY_ONE, TIERS], ids=["one-event", "many-events", "many-operations"])
async def test_a_long_batch_is_as_good_as_its_blocks_in_short_ones(index: Index, batch: Frame) -> None:
    writer = WatchedWriter(index.writer)
    longer = frame(1, stored(MANY + 1, parent=MANY), *(removed(1) for _ in range(LONG_BATCH_BYTES // 32)))
    assert await (await applier(index, writer)).apply([batch, longer]) is None

    assert max(blocks_of(each) + OPERATION_BLOCKS * len(each.operations) for each in writer.changes) <= BLOCKS_A_CHANGE
    assert len(writer.changes) > 5
    assert (await index.position(A)).last_seq == 1
    assert await index.matched(2) == ({A.endpoint: 1} if batch is TIERS else {})  # the CPU has it still
    held = sum(line.cached_blocks for line in await index.reader.sources())
    assert held == (1 if batch is TIERS else MANY)


async def test_a_long_report_of_what_is_held_counts_no_block_twice(index: Index) -> None:
    follower = await applier(index, WatchedWriter(index.writer))
    await follower.apply([REPORT, Frame(seq=1, payload=REPORT.payload)])
    await follower.apply([frame(2, removed(*range(1, MANY + 1)))])

    assert await index.matched(MANY) == {}


@pytest.mark.parametrize("is_applied", [False, True], ids=["not-applied", "answer-lost"])
@pytest.mark.parametrize("breaks_at", [1, 2])
async def test_a_crash_within_a_long_batch_lets_the_stream_begin_anew(
    index: Index, breaks_at: int, is_applied: bool
) -> None:
    before = frame(0, stored(MANY + 1, first_block=1))
    batch = Frame(seq=1, payload=REPORT.payload)
    with pytest.raises(IndexUnavailableError):
        await (await applier(index, WatchedWriter(index.writer, breaks_at, is_applied))).apply([before, batch])
    position = await index.position(A)
    assert (position.last_seq, position.part) == (0, breaks_at - 1 + is_applied)

    successor = await applier(index, WatchedWriter(index.writer))
    begins_anew = position.part > 0
    assert successor.position.last_seq == (-1 if begins_anew else 0)
    assert await successor.apply([before, batch, frame(2, removed(*range(1, MANY + 2)))]) is None
    assert await index.matched(MANY) == {}
    assert (await index.position(A)).last_seq == 2
