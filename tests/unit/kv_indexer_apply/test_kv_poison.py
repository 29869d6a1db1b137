"""A batch that cannot be applied costs its own stream its blocks, once; an outage of the index costs nothing."""

import asyncio
from collections import Counter

import pytest

from kv_indexer.apply.apply_events import BATCH_SKIPPED, EventApplier, root_keys
from kv_indexer.apply.batches import FRAME_BYTES, LONG_BATCH_BYTES
from kv_indexer.apply.pod_shares import PodShares
from kv_indexer.events.sequence import BatchAction, Frame
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.index_changes import Applied, IndexChange, pack_hashes
from kvmesh.blocks.source import Claim, Stream, StreamPosition
from kvmesh.errors import IndexRefusesError, IndexUnavailableError
from tests.unit.kv_indexer_follow.kv_fakes import CountingTelemetry, frame, prompt, removed, stored
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")
ROOT = root_key(hash_seed="kvmesh", model="tiny")
POISON = 77  # an engine hash


class Poisoned(MemoryPrefixIndex):
    """Fails whatever change names one hash."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.is_away = False
        self.tried: list[tuple[int, int]] = []

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        names = b"".join(getattr(each, "hashes", b"") for each in change.operations)
        if pack_hashes([POISON]) in names:
            self.tried.append((change.previous_seq, change.last_seq))
            raise self.error
        return await super().apply(claim, change)

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        if self.is_away:
            raise IndexUnavailableError("away")
        return await super().read_position(stream)


class Counting(MemoryPrefixIndex):
    """Counts the changes that are under way at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Counter[str] = Counter()
        self.most: Counter[str] = Counter()  # of one pod
        self.together = 0

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        pod = claim.stream.endpoint
        self.running[pod] += 1
        self.most[pod] = max(self.most[pod], self.running[pod])
        self.together = max(self.together, self.running.total())
        await asyncio.sleep(0)
        self.running[pod] -= 1
        return await super().apply(claim, change)


async def follow(index: MemoryPrefixIndex, shares: PodShares | None = None) -> tuple[EventApplier, CountingTelemetry]:
    telemetry = CountingTelemetry()
    applier = EventApplier(
        claim=await index.claim(POD),
        roots=root_keys(hash_seed="kvmesh", model="tiny"),
        writer=index,
        telemetry=telemetry,
        shares=shares,
    )
    await applier.resume()
    return applier, telemetry


async def held(index: MemoryPrefixIndex, blocks: int = 9) -> int:
    return (await index.lookup(prompt(blocks), root=ROOT)).matched_blocks.get(POD.endpoint, 0)


FRAMES = [frame(0, stored(1)), frame(1, removed(POISON)), frame(2, stored(1)), frame(3, stored(2, parent=1))]


async def attempts(applier: EventApplier, index: MemoryPrefixIndex, error: type[Exception], count: int) -> None:
    """Try what a follower tries: after each failure, from where the index has the stream."""
    for _ in range(count):
        await applier.resume()
        with pytest.raises(error):
            await applier.apply(FRAMES[applier.position.last_seq + 1 :])


@pytest.mark.parametrize("error", [IndexUnavailableError("no answer"), OverflowError("a defect")])
async def test_a_batch_that_fails_twice_is_skipped_and_the_stream_goes_on(error: Exception) -> None:
    index = Poisoned(error)
    applier, telemetry = await follow(index)
    await attempts(applier, index, type(error), 1)  # together with its neighbours
    await applier.resume()
    assert await applier.apply(FRAMES) is None

    assert index.tried == [(-1, 3), (0, 1)]
    assert (applier.position.last_seq, applier.position.degraded) == (3, BATCH_SKIPPED)
    assert await held(index) == 2
    assert (await index.find_block_keys(POD, {(1, 0)})).keys() == {1}
    assert telemetry.unindexed[BATCH_SKIPPED] == 1
    assert await applier.apply(FRAMES) is None  # what comes again is known
    assert applier.position.last_seq == 3


async def test_what_was_stored_before_a_skipped_batch_is_let_go() -> None:
    index = Poisoned(IndexUnavailableError("no answer"))
    applier, _ = await follow(index)
    await applier.apply(FRAMES[:1])
    assert await held(index) == 1
    await attempts(applier, index, IndexUnavailableError, 1)
    assert await held(index) == 1  # not yet
    await applier.resume()
    await applier.apply(FRAMES[1:2])

    assert await held(index) == 0
    assert (await index.read_position(POD)).last_seq == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("is_away", [False, True], ids=["refuses-everyone", "gone"])
async def test_an_outage_of_the_index_is_no_fault_of_a_batch(is_away: bool) -> None:
    index = Poisoned(IndexUnavailableError("gone") if is_away else IndexRefusesError("its memory is full"))
    applier, _ = await follow(index)
    for _ in range(5):
        await applier.resume()
        index.is_away = is_away
        with pytest.raises(IndexUnavailableError):
            await applier.apply(FRAMES)
        index.is_away = False

    assert index.tried == [(-1, 3)] * 5
    assert applier.position.degraded == ""


async def test_a_batch_that_failed_once_and_then_came_through_may_fail_once_more() -> None:
    index = Poisoned(IndexUnavailableError("no answer"))
    applier, _ = await follow(index)
    error, frames = index.error, FRAMES[:2]
    await attempts(applier, index, type(error), 1)
    index.apply = lambda claim, change: MemoryPrefixIndex.apply(index, claim, change)  # type: ignore[method-assign]
    await applier.resume()
    await applier.apply(frames)
    del index.apply
    await applier.begin_epoch()

    await attempts(applier, index, type(error), 1)
    assert applier.position.degraded == ""


async def test_ranks_of_one_pod_take_turns_and_another_pod_does_not_wait_for_them() -> None:
    index, shares = Counting(), PodShares()
    appliers = []
    for stream in [Stream(endpoint=pod, dp_rank=rank) for pod in ("10.0.0.1:1", "10.0.0.2:1") for rank in range(4)]:
        applier = EventApplier(
            claim=await index.claim(stream),
            roots=root_keys(hash_seed="kvmesh", model="tiny"),
            writer=index,
            telemetry=CountingTelemetry(),
            shares=shares,
        )
        await applier.resume()
        appliers.append(applier)
    await asyncio.gather(*(applier.apply([frame(0, stored(1))]) for applier in appliers))

    assert index.most == {"10.0.0.1:1": 1, "10.0.0.2:1": 1}
    assert index.together == 2


async def test_many_ranks_remember_less_each_and_a_closed_stream_gives_its_share_back() -> None:
    index, shares = MemoryPrefixIndex(), PodShares()
    alone = shares.join("10.0.0.1:1").known_keys
    for _ in range(127):
        share = shares.join("10.0.0.1:1")

    assert share.known_keys * 128 <= alone * 4
    applier, _ = await follow(index, shares)
    await applier.apply([frame(0, stored(2, parent=1))])
    assert shares.orphans.is_over(POD.endpoint) is False
    applier.close()
    assert shares.orphans._taken == {}


async def test_a_long_batch_yields_to_others_again_and_again() -> None:
    index = MemoryPrefixIndex()
    applier, _ = await follow(index)
    events = [removed(each) for each in range(1, LONG_BATCH_BYTES // 16)]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(others())
    long = Frame(seq=0, payload=frame(0, *events).payload)
    await applier.apply([long])
    task.cancel()

    assert len(long.payload) > FRAME_BYTES
    assert turns >= len(long.payload) // (64 << 10)


async def test_a_long_batch_whose_block_size_changes_within_is_not_applied_twice() -> None:
    index = MemoryPrefixIndex()
    applier, _ = await follow(index)
    first = [stored(each, parent=each - 1 or None) for each in range(1, LONG_BATCH_BYTES // 32)]
    long = frame(0, *first, stored(99_999, token_ids=list(range(16)), block_size=16, group_idx=0))
    assert len(long.payload) > LONG_BATCH_BYTES
    halt = await applier.apply([long, frame(1, stored(1))])

    assert halt is not None
    assert (halt.action, [each.seq for each in halt.frames]) == (BatchAction.RESTART, [0, 1])
    assert applier.position.part > 0
    applier.accept_block_sizes()  # as after a look at the publisher's history
    assert await applier.apply([long]) is None
    assert await held(index, 3) == 3
    await applier.apply([frame(1, removed(*range(1, len(first) + 1)))])
    assert await held(index, 3) == 0
