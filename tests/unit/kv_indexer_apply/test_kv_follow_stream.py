"""Recovery: subscribe, replay, live; gaps, restarts, truncated history, silence."""

from collections.abc import Callable
from typing import Any

import pytest

from kv_indexer.adapters.memory_index import MemoryPrefixIndex
from kv_indexer.apply_events import EventApplier, root_keys
from kv_indexer.core.block_keys import root_key
from kv_indexer.core.source import SourceState, Stream
from kv_indexer.errors import FeedLostError, IndexUnavailableError
from kv_indexer.follow_stream import RecoveryPolicy, StreamFollower
from kv_indexer.ports import Applied
from tests.unit.kv_indexer_apply.kv_fakes import (
    CountingTelemetry,
    FakePod,
    frame,
    prompt,
    removed,
    stored,
)

POD = Stream(endpoint="10.0.0.1:8000")
ROOT = root_key(hash_seed="kvmesh", model="tiny")
LIVE, DEGRADED, LOST = SourceState.LIVE, SourceState.DEGRADED, SourceState.LOST


class EndOfTestError(BaseException):
    """Passes the follower's own safety net."""


class Bench:
    """A follower of a fake pod over the in-memory index."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.telemetry = CountingTelemetry()
        self.slept: list[float] = []

    async def follow(self, pod: FakePod, *, with_replay: bool = True, stop_after_losses: int = 1) -> None:
        """Run until the pod's script has ended, or so many sessions were lost."""

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            if not pod.script or len(self.slept) > stop_after_losses + 10:
                raise EndOfTestError

        applier = EventApplier(
            stream=POD,
            roots=root_keys(hash_seed="kvmesh", model="tiny"),
            writer=self.index,
            telemetry=self.telemetry,
        )
        follower = StreamFollower(
            stream=POD,
            live=pod,
            replay=pod if with_replay else None,
            applier=applier,
            writer=self.index,
            telemetry=self.telemetry,
            policy=RecoveryPolicy(),
            sleep=sleep,
        )
        with pytest.raises(EndOfTestError):
            await follower.run()

    async def matched(self, blocks: int = 9) -> int:
        hits = await self.index.lookup(prompt(blocks), root=ROOT)
        return hits.matched_blocks.get(POD.endpoint, 0)

    def states(self) -> list[tuple[SourceState, str]]:
        """All states but the one that the end of the script causes."""
        return [shown for shown in self.telemetry.states if shown != (LOST, "internal-error")]


@pytest.fixture
def bench() -> Bench:
    return Bench()


def chain(count: int, *, ts: float | None = None) -> list[Any]:
    """Batches 0 … n-1, each storing the next block of one prompt."""
    return [frame(number, stored(number + 1, parent=number or None), ts=ts) for number in range(count)]


async def test_a_new_stream_is_replayed_from_the_beginning_and_then_live(bench: Bench) -> None:
    pod = FakePod(buffer=chain(3), live=[chain(4)[3:]])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (4, [0])
    assert bench.states() == [(SourceState.REPLAYING, ""), (LIVE, "")]


async def test_live_batches_that_the_replay_already_gave_are_applied_once(bench: Bench) -> None:
    batches = [frame(0, stored(1)), frame(1, stored(1)), frame(2, removed(1))]
    pod = FakePod(buffer=batches, live=[batches, [frame(3, removed(1))]])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (0, [0])


async def test_a_restarted_indexer_asks_from_its_last_batch_and_applies_only_what_follows(bench: Bench) -> None:
    batches = [frame(0, stored(1)), frame(1, stored(1)), frame(2, removed(1)), frame(3, removed(1))]
    await bench.follow(FakePod(buffer=batches[:2], live=[[]]))
    successor = FakePod(buffer=batches, live=[[]])

    await bench.follow(successor)

    assert (await bench.matched(), successor.requests) == (0, [1])
    assert bench.telemetry.batches == 4


async def test_a_gap_is_filled_by_a_replay_from_the_first_missing_batch(bench: Bench) -> None:
    batches = chain(4)
    pod = FakePod(live=[[batches[0]]])
    pod.script.append(lambda: pod.buffer.extend(batches))
    pod.script.append([batches[3]])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests, bench.telemetry.gaps) == (4, [0, 1], 1)
    assert bench.states()[-1] == (LIVE, "")


async def test_a_replay_that_loses_batches_is_asked_again_from_the_first_missing(bench: Bench) -> None:
    pod = FakePod(buffer=chain(6), live=[[]])
    pod.dropped_once = {2, 4}

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (6, [0, 2])


async def test_a_long_history_is_fetched_in_pieces(bench: Bench) -> None:
    pod = FakePod(buffer=chain(7), live=[[]])
    pod.longest_answer = 3

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (7, [0, 3, 6])


async def test_a_truncated_history_is_applied_as_far_as_it_is_sound(bench: Bench) -> None:
    late_chain = [frame(5, stored(4, parent=3)), frame(6, stored(1, 2)), frame(7, stored(3, parent=2))]
    pod = FakePod(buffer=late_chain, live=[[frame(8, stored(4, parent=3))]])

    await bench.follow(pod)

    assert await bench.matched() == 4
    assert pod.requests == [0, 0, 0, 5]
    assert bench.states()[-1] == (DEGRADED, "history-truncated")
    assert bench.telemetry.unindexed == {"unknown-parent": 1}


async def test_a_hole_that_is_never_filled_voids_what_came_before(bench: Bench) -> None:
    batches = [frame(0, stored(1)), frame(2, stored(1, 2), ts=2.0)]
    pod = FakePod(buffer=batches, live=[[]])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 1, 1, 1, 2])
    assert bench.states()[-1] == (DEGRADED, "history-truncated")
    assert len((await bench.index.read_registry()).slots) == 1  # the first epoch's slot waits for its sweep


async def test_a_restarted_publisher_voids_its_old_blocks_and_is_replayed(bench: Bench) -> None:
    old, new = chain(3), [frame(0, stored(1), ts=50.0), frame(1, ts=51.0)]
    pod = FakePod(buffer=old, live=[[]])
    pod.script += [lambda: pod.forget_all_but(new), [new[1]]]

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (1, [0, 0])
    assert bench.states()[-1] == (LIVE, "")


async def test_a_publisher_that_restarted_while_nobody_listened_is_found_out_on_connecting(bench: Bench) -> None:
    await bench.follow(FakePod(buffer=chain(3), live=[[]]))

    await bench.follow(FakePod(buffer=[], live=[[]]))
    assert await bench.matched() == 0


async def test_a_restart_whose_numbers_have_passed_ours_is_found_out_by_the_last_batch(bench: Bench) -> None:
    await bench.follow(FakePod(buffer=chain(3), live=[[]]))

    await bench.follow(FakePod(buffer=[frame(number, stored(1), ts=60.0 + number) for number in range(9)], live=[[]]))
    assert await bench.matched() == 1


async def test_without_a_replay_socket_live_batches_are_applied_and_the_source_is_degraded(bench: Bench) -> None:
    pod = FakePod(live=[[frame(7, stored(1))], [frame(8, stored(2, parent=1))]])

    await bench.follow(pod, with_replay=False)

    assert (await bench.matched(), pod.requests) == (2, [])
    assert bench.states()[-1] == (DEGRADED, "no-replay-endpoint")


async def test_a_gap_without_a_replay_socket_voids_what_came_before(bench: Bench) -> None:
    pod = FakePod(live=[[frame(0, stored(1, 2))], [frame(5, stored(1))]])

    await bench.follow(pod, with_replay=False)

    assert await bench.matched() == 1


async def test_a_silent_replay_socket_is_asked_three_times_and_then_done_without(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[frame(2, stored(1))]])
    pod.answers_replay = False

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (1, [0, 0, 0, 0, 0, 0])
    assert bench.states()[-1] == (DEGRADED, "replay-unanswered")


async def test_a_lost_last_batch_is_found_by_asking_an_idle_publisher(bench: Bench) -> None:
    batches = chain(2)
    pod = FakePod(buffer=batches[:1])
    pod.script += [lambda: pod.buffer.append(batches[1]), *[[]] * 10]

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 0])


async def test_a_lost_pod_is_shown_and_tried_again_ever_more_slowly(bench: Bench) -> None:
    refused = FeedLostError("refused")
    pod = FakePod(buffer=chain(1), live=[refused, refused, refused, refused, refused, [], []])

    await bench.follow(pod)

    assert bench.slept == [0.25, 0.5, 1.0, 2.0, 2.0, 0.25]
    assert bench.states() == [(LOST, "unreachable"), (SourceState.REPLAYING, ""), (LIVE, "")]


async def test_a_pod_that_comes_back_unchanged_keeps_its_blocks(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[], FeedLostError("closed"), []])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests, pod.connects) == (2, [0, 1], 2)


class FlakyIndex(MemoryPrefixIndex):
    """Fails on demand, before or after the change is in."""

    fail_before = fail_after = 0

    async def apply(self, stream: Stream, change: Any) -> Applied | None:
        if self.fail_before:
            self.fail_before -= 1
            raise IndexUnavailableError("gone")
        applied = await super().apply(stream, change)
        if self.fail_after:
            self.fail_after -= 1
            raise IndexUnavailableError("the answer is lost")
        return applied


@pytest.mark.parametrize("moment", ["fail_before", "fail_after"])
async def test_an_index_that_fails_around_a_change_neither_loses_nor_doubles_it(bench: Bench, moment: str) -> None:
    bench.index = FlakyIndex()
    batches = [frame(0, stored(1)), frame(1, stored(1)), frame(2, removed(1))]
    pod = FakePod(buffer=batches[:1], live=[])
    fail: Callable[[], None] = lambda: setattr(bench.index, moment, 1)  # noqa: E731
    pod.script += [fail, lambda: pod.buffer.extend(batches[1:]), batches[1:], [], [frame(3, removed(1))]]

    await bench.follow(pod)
    assert await bench.matched() == 0
    assert (LOST, "index-unavailable") in bench.states()


async def test_an_index_that_was_emptied_is_rebuilt(bench: Bench) -> None:
    pod = FakePod(buffer=chain(3), live=[[]])

    def empty() -> None:
        # the twin of FLUSHALL
        bench.index.__init__()  # type: ignore[misc]

    pod.script += [empty, [], []]
    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (3, [0, 0])


async def test_a_defect_is_shown_and_does_not_end_the_follower(bench: Bench) -> None:
    pod = FakePod(buffer=chain(1), live=[ValueError("a defect"), []])

    await bench.follow(pod)

    assert bench.telemetry.states[:3] == [(SourceState.REPLAYING, ""), (LIVE, ""), (LOST, "internal-error")]
    assert pod.connects == 2
