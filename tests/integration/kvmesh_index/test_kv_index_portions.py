"""Many long batches at once: the index stays open to others between changes, and a crash between them costs nothing."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from kv_indexer.apply.apply_events import BLOCKS_A_CHANGE, EventApplier, root_keys
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

    assert [(each.previous_seq, each.last_seq, blocks_of(each)) for each in writer.changes] == [
        (-1, 1, 2 * LONG),
        (1, 3, 2 * LONG),
        (3, 4, LONG),
        (4, 5, PROMPT),  # one batch is never cut
    ]
    assert (await index.position(A)).last_seq == BATCHES
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
