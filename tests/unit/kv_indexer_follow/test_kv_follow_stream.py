"""Recovery: subscribe, replay, live; gaps, restarts, truncated history, silence."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from kv_indexer.apply.apply_events import EventApplier, root_keys
from kv_indexer.events.sequence import Frame, ReplayAnswer
from kv_indexer.follow.catch_up import NO_REPLAY, RecoveryPolicy
from kv_indexer.follow.follow_stream import StreamFollower
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.index_changes import Applied
from kvmesh.blocks.source import Claim, SourceState, Stream, StreamPosition, StreamRecord
from kvmesh.errors import FeedLostError, IndexUnavailableError, LeaseLostError
from tests.unit.kv_indexer_follow.kv_fakes import (
    CLEARED,
    CountingTelemetry,
    FakeIdentity,
    FakePod,
    frame,
    prompt,
    removed,
    stored,
)
from tests.unit.kvmesh_index.kv_memory_index import MemoryPrefixIndex

POD = Stream(endpoint="10.0.0.1:8000")
ROOT = root_key(hash_seed="kvmesh", model="tiny")
LIVE, DEGRADED, LOST = SourceState.LIVE, SourceState.DEGRADED, SourceState.LOST
REPLAYING, UNCONFIRMED = SourceState.REPLAYING, SourceState.UNCONFIRMED


class Bench:
    """A follower of a fake pod over the in-memory index."""

    def __init__(self) -> None:
        self.index = MemoryPrefixIndex()
        self.telemetry = CountingTelemetry()
        self.identity: FakeIdentity | None = None
        self.slept: list[float] = []
        self.time = 0.0
        self.policy = RecoveryPolicy(idle_probes=10, quiet_probe_limit=8)
        self.registered: Callable[[], StreamRecord | None] = lambda: None  # what all indexers' registry says
        self.check: Callable[[StreamRecord | None, float], bool] | None = None  # the follower's, while it is subscribed
        self.subscribed: Callable[[Any], AbstractContextManager[None]] | None = None
        self.lost = 0
        self.on_sleep: Callable[[], None] = lambda: None
        self.slowdown = 1.0
        self.quiet_limit_seconds = float("inf")

    async def follow(self, pod: FakePod, *, with_replay: bool = True) -> None:
        """Run until the pod's script has ended."""

        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)
            self.time += seconds
            self.on_sleep()
            assert len(self.slept) < 100, "the follower goes round in circles"

        def pass_a_second() -> None:
            self.time += 1.0

        pod.on_receive = pass_a_second
        claim = await self.index.claim(POD)
        follower = StreamFollower(
            claim=claim,
            live=pod,
            replay=pod.replay if with_replay else None,
            applier=EventApplier(
                claim=claim,
                roots=root_keys(hash_seed="kvmesh", model="tiny"),
                writer=self.index,
                telemetry=self.telemetry,
            ),
            writer=self.index,
            telemetry=self.telemetry,
            policy=self.policy,
            started_at=self.identity.started_at if self.identity else None,
            sleep=sleep,
            clock=lambda: self.time,
            registered=lambda _: self.registered(),
            subscribe=self.subscribed,
            on_lost=self._lost,
            slowdown=lambda: self.slowdown,
            quiet_limit_seconds=lambda: self.quiet_limit_seconds,
        )
        async with asyncio.timeout(10):
            await follower.run()

    def _lost(self) -> None:
        self.lost += 1

    @contextmanager
    def subscribe(self, check: Callable[[StreamRecord | None, float], bool]) -> Iterator[None]:
        self.check = check
        try:
            yield
        finally:
            self.check = None

    async def tell(self, stream: Stream, *frames: Frame) -> None:
        """Have another stream's batches in the index."""
        applier = EventApplier(
            claim=await self.index.claim(stream),
            roots=root_keys(hash_seed="kvmesh", model="tiny"),
            writer=self.index,
            telemetry=CountingTelemetry(),
        )
        await applier.resume()
        assert await applier.apply(frames) is None

    async def matched(self, blocks: int = 9) -> int:
        hits = await self.index.lookup(prompt(blocks), root=ROOT)
        return hits.matched_blocks.get(POD.endpoint, 0)

    def states(self) -> list[tuple[SourceState, str]]:
        return self.telemetry.states


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


async def test_a_silent_replay_socket_is_asked_twice_and_then_done_without(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[frame(2, stored(1))]])
    pod.answers_replay = False

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (1, [0, 0])  # the gap is given up at once
    assert bench.states()[-1] == (DEGRADED, "replay-unanswered")


async def test_a_lost_last_batch_is_found_by_asking_an_idle_publisher(bench: Bench) -> None:
    batches = chain(2)
    pod = FakePod(buffer=batches[:1])
    pod.script += [lambda: pod.buffer.append(batches[1]), *[[]] * 10]

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 0])


class CountingIndex(MemoryPrefixIndex):
    """An index that knows how often a stream's position was read."""

    reads = 0

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        self.reads += 1
        return await super().read_position(stream)


def record_of(index: MemoryPrefixIndex, **changes: Any) -> StreamRecord:
    entry = index.entries[POD]
    position = entry.position
    record = StreamRecord(
        endpoint=POD.endpoint,
        dp_rank=0,
        epoch=position.epoch,
        last_seq=position.last_seq,
        last_ts=position.last_ts,
        state=entry.state,
        reason=entry.reason,
    )
    return replace(record, **changes)


async def test_a_quiet_stream_that_is_as_the_registry_says_is_not_read_by_itself(bench: Bench) -> None:
    bench.index = index = CountingIndex()
    bench.registered = lambda: record_of(index)
    await bench.follow(FakePod(buffer=chain(2), live=[[]] * 5))
    assert (index.reads, bench.states()[-1]) == (1, (LIVE, ""))  # once, to take it up


@pytest.mark.parametrize("changes", [{"epoch": 9}, {"last_seq": 0}, {"state": LOST}, {"reason": "not-followed"}])
async def test_a_stream_that_the_registry_has_otherwise_is_read(bench: Bench, changes: dict[str, Any]) -> None:
    bench.index = index = CountingIndex()
    bench.registered = lambda: record_of(index, **changes)
    await bench.follow(FakePod(buffer=chain(2), live=[[]] * 5))
    assert (index.reads, await bench.matched()) == (6, 2)


async def test_a_stream_that_somebody_watches_sleeps_until_the_publisher_is_to_be_asked(bench: Bench) -> None:
    bench.index = index = CountingIndex()
    bench.registered, bench.subscribed = (lambda: record_of(index)), bench.subscribe
    pod = FakePod(buffer=chain(2), live=[[]] * 3)
    await bench.follow(pod)
    assert (pod.waits, index.reads) == ([10.0, 9.0, 8.0, 7.0], 1)  # a second passes at each


async def test_probes_that_bring_nothing_get_rarer_up_to_a_limit_and_a_batch_ends_that(bench: Bench) -> None:
    bench.subscribed, bench.identity = bench.subscribe, FakeIdentity(5.0)
    bench.policy = RecoveryPolicy(idle_seconds=0.1, idle_probes=10, quiet_probe_limit=4)
    bench.registered = lambda: record_of(bench.index)
    new = frame(2, stored(3, parent=2))
    pod = FakePod(buffer=chain(2), live=[[] for _ in range(11)])
    pod.script += [lambda: pod.buffer.append(new), [new], [], []]
    await bench.follow(pod)
    until_probe = [1, 2, 1, 4, 3, 2, 1, 4, 3, 2, 1, 4, 1, 2, 1]  # a second passes at each
    assert (pod.waits, bench.check) == (until_probe, None)


async def test_in_a_large_fleet_the_first_probe_after_a_replay_is_late_and_not_at_the_same_time_as_others(
    bench: Bench,
) -> None:
    bench.subscribed, bench.identity, bench.slowdown = bench.subscribe, FakeIdentity(5.0), 10.0
    pod = FakePod(buffer=chain(2), live=[[frame(2, stored(3, parent=2))], []])
    await bench.follow(pod)
    first, after_a_batch, _ = pod.waits
    assert (220 <= first <= 400, first) == (True, 4 * after_a_batch)


async def test_probes_stay_more_frequent_where_the_start_time_of_the_publisher_is_unknown(bench: Bench) -> None:
    bench.subscribed = bench.subscribe
    bench.policy = RecoveryPolicy(idle_seconds=0.1, idle_probes=10, unknown_probe_limit=1)
    pod = FakePod(buffer=chain(2), live=[[]] * 4)
    await bench.follow(pod)
    assert (pod.waits, len(pod.requests)) == ([1.0] * 5, 5)


async def test_probes_of_a_few_streams_stay_as_frequent_as_all_of_them_can_be_asked(bench: Bench) -> None:
    bench.subscribed, bench.identity, bench.quiet_limit_seconds = bench.subscribe, FakeIdentity(5.0), 1.5
    bench.policy = RecoveryPolicy(idle_seconds=0.1, idle_probes=10)
    pod = FakePod(buffer=chain(2), live=[[]] * 6)
    await bench.follow(pod)
    assert pod.waits == [1.0, 1.5, 0.5, 1.5, 0.5, 1.5, 0.5]  # a second passes at each


@pytest.mark.parametrize(
    ("changes", "asked_at", "wakes"),
    [({}, 100.0, 0), ({"epoch": 9}, 100.0, 1), ({"epoch": 9}, 0.0, 0), ({"last_seq": 0}, 100.0, 1), (None, 100.0, 1)],
)
async def test_only_a_registry_asked_while_the_stream_waits_and_that_says_otherwise_wakes_it(
    bench: Bench, changes: dict[str, Any] | None, asked_at: float, wakes: int
) -> None:
    bench.subscribed = bench.subscribe
    answers = []

    def say() -> None:
        assert bench.check is not None
        answers.append(bench.check(None if changes is None else record_of(bench.index, **changes), asked_at))

    pod = FakePod(buffer=chain(2), live=[say, []])
    await bench.follow(pod)
    # also what came too early to wake it is told again, or else it would sleep on what it has missed
    assert (pod.interrupted, answers) == (wakes, [changes == {}])


async def test_whoever_asks_the_pod_is_not_told_of_what_is_wrong_with_redis(bench: Bench) -> None:
    class Away(MemoryPrefixIndex):
        is_away = False

        async def read_position(self, stream: Stream) -> StreamPosition | None:
            if self.is_away:
                raise IndexUnavailableError("away")
            return await super().read_position(stream)

    bench.index = index = Away()

    bench.on_sleep = lambda: setattr(index, "is_away", False)
    await bench.follow(FakePod(buffer=chain(1), live=[lambda: setattr(index, "is_away", True), [], []]))
    assert (bench.lost, [state for state, _ in bench.states()].count(LOST)) == (0, 1)


async def test_batches_that_all_look_known_do_not_hide_another_process_for_long(bench: Bench) -> None:
    new = [frame(0, stored(1), ts=0.5), *(frame(number, ts=0.5 + number / 100) for number in range(1, 12))]
    pod = FakePod(buffer=[frame(99, stored(1, 2, 3), ts=1e12)], live=[[each] for each in new[1:]])
    pod.script.insert(0, lambda: pod.forget_all_but(new))

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (1, (LIVE, ""))


async def test_a_lost_pod_is_shown_and_tried_again_ever_more_slowly(bench: Bench) -> None:
    refused = FeedLostError("refused")
    pod = FakePod(buffer=chain(1), live=[refused, refused, refused, refused, refused, [], refused, []])

    await bench.follow(pod)

    assert bench.slept == [0.25, 0.5, 1.0, 2.0, 2.0, 0.25]
    once = [(LOST, "unreachable"), (SourceState.REPLAYING, ""), (LIVE, "")]
    assert bench.states() == once * 2


async def test_a_pod_that_comes_back_unchanged_keeps_its_blocks(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[], FeedLostError("closed"), []])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests, pod.connects) == (2, [0, 1], 2)


async def test_an_empty_answer_of_a_living_pod_is_asked_again_before_it_is_taken_for_a_restart(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[], FeedLostError("closed"), []])
    pod.script.insert(1, lambda: setattr(pod, "dropped_once", {1}))

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 1, 1])


async def test_a_change_of_start_time_is_a_restart_even_if_the_batches_look_the_same(bench: Bench) -> None:
    bench.identity = FakeIdentity(100.0)
    pod = FakePod(buffer=chain(3), live=[[], FeedLostError("closed"), []])
    pod.script.insert(1, lambda: setattr(bench.identity, "value", 200.0))
    first = bench.index

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (3, [0, 0])
    assert len((await first.read_registry()).slots) == 1
    position = await first.read_position(POD)
    assert position is not None
    assert (position.started_at, position.last_seq) == (200.0, 2)


async def test_a_change_of_start_time_is_noticed_while_the_connection_stands(bench: Bench) -> None:
    bench.identity = FakeIdentity(100.0)
    bench.policy = RecoveryPolicy(identity_seconds=0.0)
    pod = FakePod(buffer=chain(3), live=[[]])
    pod.receive_yields = 20  # so that the watch comes to its turn
    pod.script += [lambda: setattr(bench.identity, "value", 200.0), lambda: pod.forget_all_but([]), [], [], []]

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (0, (LIVE, ""))


class SlowPod(FakePod):
    """Is replaced by an empty process while its first replay is on the way."""

    identity: FakeIdentity

    async def replay(self, start_seq: int) -> ReplayAnswer:
        answer = await super().replay(start_seq)
        if len(self.requests) == 1:
            self.forget_all_but([])
            self.identity.value = 200.0
            for _ in range(20):  # so that the watch comes to its turn
                await asyncio.sleep(0)
        return answer


async def test_a_start_time_that_is_seen_during_a_replay_does_not_vouch_for_what_was_replayed(bench: Bench) -> None:
    bench.policy = RecoveryPolicy(identity_seconds=0.0)
    pod = SlowPod(buffer=chain(3), live=[[], []])
    pod.identity = bench.identity = FakeIdentity(100.0)

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (0, (LIVE, ""))


@pytest.mark.parametrize("later", [None, 100.4])
async def test_a_start_time_that_is_missing_or_rounded_changes_nothing(bench: Bench, later: float | None) -> None:
    bench.identity = FakeIdentity(100.0)
    pod = FakePod(buffer=chain(3), live=[[], FeedLostError("closed"), []])
    pod.script.insert(1, lambda: setattr(bench.identity, "value", later))
    await bench.follow(pod)
    position = await bench.index.read_position(POD)
    assert position is not None

    assert (await bench.matched(), pod.requests, position.started_at) == (3, [0, 2], 100.0)


async def test_the_start_time_outlives_the_indexer(bench: Bench) -> None:
    bench.identity = FakeIdentity(100.0)
    await bench.follow(FakePod(live=[[frame(0, stored(1))]]), with_replay=False)
    pod = FakePod(live=[[], [frame(1, stored(2, parent=1))]])
    await bench.follow(pod, with_replay=False)
    # the same process; that nothing was missed is known from its next batch on
    assert (await bench.matched(), bench.states()[-2:]) == (2, [(UNCONFIRMED, NO_REPLAY), (DEGRADED, NO_REPLAY)])

    bench.identity.value = 300.0
    await bench.follow(FakePod(live=[[]]), with_replay=False)
    assert await bench.matched() == 0


async def test_without_replay_and_start_time_a_lost_connection_voids_what_nobody_can_vouch_for(bench: Bench) -> None:
    pod = FakePod(live=[[frame(0, stored(1))], FeedLostError("closed"), []])

    await bench.follow(pod, with_replay=False)

    assert (await bench.matched(), bench.states()[-1]) == (0, (DEGRADED, "no-replay-endpoint"))


async def test_a_silent_replay_socket_after_a_lost_connection_voids_what_nobody_can_vouch_for(bench: Bench) -> None:
    pod = FakePod(buffer=chain(2), live=[[], FeedLostError("closed"), []])
    pod.script.insert(1, lambda: setattr(pod, "answers_replay", False))

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (0, (DEGRADED, "replay-unanswered"))


async def test_a_pod_that_dies_during_a_replay_is_not_believed_to_go_on_where_another_one_is(bench: Bench) -> None:
    old, new = chain(3), [frame(number, stored(number + 1), ts=90.0 + number) for number in range(5)]
    pod = FakePod(buffer=old, live=[[frame(5, stored(1), ts=95.0)], []])
    pod.script.insert(0, lambda: pod.die_into(new))

    await bench.follow(pod)

    # number 3 of the new process would follow number 2 of the old one
    assert (await bench.matched(), pod.requests) == (1, [0, 3, 2, 0])


async def test_a_gap_that_the_first_answers_do_not_fill_is_asked_for_again(bench: Bench) -> None:
    batches = chain(4)
    pod = FakePod(buffer=batches[:1])
    pod.script += [lambda: pod.buffer.extend(batches[1:3]), lambda: setattr(pod, "cut_once", 2), [batches[3]]]

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (4, [0, 1, 2])


async def test_while_a_gap_is_open_the_source_is_not_called_live(bench: Bench) -> None:
    batches = chain(3)
    pod = FakePod(buffer=batches[:1])
    pod.script += [lambda: pod.buffer.extend(batches[1:]), [batches[2]]]

    await bench.follow(pod)

    assert bench.states() == [(SourceState.REPLAYING, ""), (LIVE, ""), (SourceState.REPLAYING, ""), (LIVE, "")]


async def test_a_batch_that_the_publisher_never_had_is_given_up_in_bounded_time(bench: Bench) -> None:
    pod = FakePod(buffer=chain(1), live=[[frame(1 << 62, stored(1, 2), ts=70.0)], []])

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 1, 1, 1])
    assert bench.states()[-1] == (DEGRADED, "history-truncated")


async def test_a_degraded_source_heals_when_the_whole_history_can_be_had_after_all(bench: Bench) -> None:
    bench.policy = RecoveryPolicy(heal_seconds=0.0)
    pod = FakePod(live=[[frame(2, stored(3, parent=2))]])
    pod.answers_replay = False
    pod.script += [lambda: pod.forget_all_but(chain(3)), lambda: setattr(pod, "answers_replay", True), [], []]

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (3, (LIVE, ""))


async def test_a_source_whose_history_stays_truncated_is_left_as_it_is(bench: Bench) -> None:
    bench.policy = RecoveryPolicy(heal_seconds=0.0, heal_limit_seconds=0.0, idle_probes=10)
    pod = FakePod(buffer=[frame(5, stored(1, 2))], live=[[], []])

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (2, (DEGRADED, "history-truncated"))
    assert pod.requests == [0, 0, 0, 5, *[0] * 6]  # three fruitless looks a time, and nothing voided


async def test_a_replay_socket_that_answers_again_is_noticed_on_a_busy_stream(bench: Bench) -> None:
    bench.policy = RecoveryPolicy(heal_seconds=0.0)
    batches = chain(2)
    pod = FakePod(live=[[batches[0]]])
    pod.answers_replay = False
    pod.script += [
        lambda: pod.forget_all_but(batches),
        lambda: setattr(pod, "answers_replay", True),
        [batches[1]],
    ]

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (2, (LIVE, ""))


async def test_a_clear_makes_a_degraded_source_exact_again(bench: Bench) -> None:
    pod = FakePod(buffer=[frame(5, stored(1, 2))], live=[[frame(6, CLEARED, stored(1))]])

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (1, (LIVE, ""))


async def test_a_publisher_that_jumps_back_and_forth_is_made_to_wait_ever_longer_and_never_called_live(
    bench: Bench,
) -> None:
    jumps = [[frame(seq, stored(1), ts=100.0 + step)] for step, seq in enumerate([900, 3, 1 << 60, 0, 70, 2] * 8)]
    pod = FakePod(buffer=chain(1), live=jumps)

    await bench.follow(pod)

    assert bench.slept == sorted(bench.slept)
    assert (bench.slept[0] <= 0.25, 10.0 < bench.slept[-1] <= 30.0) == (True, True)
    assert (LOST, "unstable-publisher") in bench.states()
    assert len(pod.requests) < 8 * len(jumps)


async def test_an_old_number_with_other_content_is_a_restart_whatever_its_time(bench: Bench) -> None:
    pod = FakePod(buffer=chain(3), live=[[frame(1, stored(7), ts=0.5)]])
    pod.script.insert(0, lambda: pod.forget_all_but([frame(0, stored(1), ts=0.1), frame(1, stored(7), ts=0.5)]))

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (1, [0, 0])


async def test_another_block_size_is_a_restart_that_was_missed(bench: Bench) -> None:
    larger: dict[str, Any] = {"block_size": 8, "token_ids": list(range(16))}
    new = [frame(3, stored(51, 52, **larger))]
    pod = FakePod(buffer=chain(3), live=[new])
    pod.script.insert(0, lambda: pod.forget_all_but([frame(0, ts=9.0), frame(1, ts=9.0), frame(2, ts=9.0), *new]))

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (2, [0, 0])
    assert [slot.block_size for slot in (await bench.index.read_registry()).slots] == [8]
    assert bench.telemetry.unindexed["block-size-changed"] == 1


async def test_a_publisher_that_does_change_its_block_size_is_degraded_and_not_restarted_for_ever(bench: Bench) -> None:
    larger: dict[str, Any] = {"block_size": 8, "token_ids": list(range(16))}
    batches = [*chain(1), frame(1, stored(51, 52, **larger)), frame(2, stored(53, 54, **larger))]
    pod = FakePod(buffer=batches[:1])
    pod.script += [lambda: pod.buffer.append(batches[1]), [batches[1]], lambda: pod.buffer.append(batches[2])]
    pod.script += [[batches[2]], []]

    await bench.follow(pod)

    assert (await bench.matched(), pod.requests) == (1, [0, 0])
    assert bench.states()[-1] == (DEGRADED, "block-size-changed")


async def test_orphans_of_a_truncated_history_are_completed_from_pods_that_agree(bench: Bench) -> None:
    for other in (Stream(endpoint="10.0.0.2:8000"), Stream(endpoint="10.0.0.3:8000")):
        await bench.tell(other, frame(0, stored(1, 2, 3)))
    pod = FakePod(buffer=[frame(5, stored(4, parent=3)), frame(6, stored(1, 2))], live=[[]])

    await bench.follow(pod)

    position = await bench.index.read_position(POD)
    assert position is not None
    assert await bench.index.find_block_keys(POD, {(4, 0)}) != {}
    assert (position.last_seq, bench.states()[-1]) == (6, (DEGRADED, "history-truncated"))


async def test_it_is_shown_how_many_stores_wait_for_their_parents(bench: Bench) -> None:
    pod = FakePod(
        buffer=[frame(5, stored(4, parent=3))], live=[[], [frame(6, stored(7, parent=6))], [frame(7, stored(1, 2, 3))]]
    )

    await bench.follow(pod)

    assert bench.telemetry.waiting_orphans == [1, 2, 1]


class FlakyIndex(MemoryPrefixIndex):
    """Fails on demand, before or after the change is in, or when a state is recorded."""

    fail_before = fail_after = fail_state = 0

    async def set_state(self, claim: Claim, *, state: SourceState, **more: Any) -> None:
        if self.fail_state and state is LOST:
            self.fail_state -= 1
            raise IndexUnavailableError("refused")
        await super().set_state(claim, state=state, **more)

    async def apply(self, claim: Claim, change: Any) -> Applied | None:
        if self.fail_before:
            self.fail_before -= 1
            raise IndexUnavailableError("gone")
        applied = await super().apply(claim, change)
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


async def recorded(bench: Bench) -> tuple[SourceState, str]:
    (stream,) = (await bench.index.read_registry()).streams
    return stream.state, stream.reason


class WatchedPod(FakePod):
    """Notes what the index says whenever the follower connects again; `meddle` is called at the second time."""

    bench: Bench
    meddle: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.seen: list[tuple[SourceState, str]] = []

    async def connect(self) -> None:
        if self.connects == 2:
            self.meddle()
        if self.connects:
            self.seen.append(await recorded(self.bench))
            if not self.script:
                raise LeaseLostError("the script has ended")
        await super().connect()


async def test_a_loss_that_could_not_be_recorded_is_recorded_by_a_later_attempt_and_said_once(bench: Bench) -> None:
    index = bench.index = FlakyIndex()
    gone = FeedLostError("gone")
    pod = WatchedPod(buffer=chain(1), live=[[], lambda: setattr(index, "fail_state", 2), gone, gone, gone, gone])
    pod.bench = bench

    await bench.follow(pod)

    assert pod.seen == [(LIVE, ""), (LIVE, ""), (LOST, "unreachable"), (LOST, "unreachable")]
    assert bench.states() == [(SourceState.REPLAYING, ""), (LIVE, ""), (LOST, "unreachable")]


async def test_a_dead_pod_that_another_hand_calls_live_is_recorded_as_lost_again(bench: Bench) -> None:
    def call_live() -> None:
        bench.index.entries[POD].state, bench.index.entries[POD].reason = LIVE, ""

    pod = WatchedPod(buffer=chain(1), live=[[], *[FeedLostError("gone")] * 4])
    pod.bench, pod.meddle = bench, call_live

    await bench.follow(pod)

    assert pod.seen == [(LOST, "unreachable"), (LIVE, ""), (LIVE, ""), (LOST, "unreachable")]


async def test_a_living_pod_that_another_hand_calls_lost_is_recorded_as_live_again(bench: Bench) -> None:
    pod = FakePod(buffer=chain(1), live=[[], lambda: bench.index.lose(POD, "another hand"), [], []])

    await bench.follow(pod)

    assert await recorded(bench) == (LIVE, "")
    assert bench.states() == [(SourceState.REPLAYING, ""), (LIVE, "")]


async def test_an_emptied_index_ends_the_follower_and_the_next_one_rebuilds_it(bench: Bench) -> None:
    pod = FakePod(buffer=chain(3), live=[[]])
    pod.script += [lambda: bench.index.drop(POD), [], []]  # the twin of FLUSHALL
    await bench.follow(pod)
    assert await bench.matched() == 0

    pod.script = [[]]
    await bench.follow(pod)
    assert (await bench.matched(), pod.requests) == (3, [0, 0])


async def test_a_lost_claim_ends_the_follower_quietly_and_nothing_more_is_written(bench: Bench) -> None:
    pod = FakePod(buffer=chain(1))
    pod.script += [lambda: bench.index.take(POD, owner="another", until=1e9), [frame(1, stored(2, parent=1))], []]
    await bench.follow(pod)

    position = await bench.index.read_position(POD)
    assert position is not None
    assert (position.last_seq, bench.slept, pod.script) == (0, [], [[]])
    assert bench.states() == [(SourceState.REPLAYING, ""), (LIVE, "")]


async def test_whoever_asks_the_pod_is_told_once_when_it_is_lost(bench: Bench) -> None:
    refused = FeedLostError("refused")
    await bench.follow(FakePod(buffer=chain(1), live=[[], refused, refused, refused, []]))
    assert bench.lost == 1


async def test_a_defect_is_shown_and_does_not_end_the_follower(bench: Bench) -> None:
    pod = FakePod(buffer=chain(1), live=[ValueError("a defect"), []])

    await bench.follow(pod)

    assert bench.telemetry.states[:3] == [(SourceState.REPLAYING, ""), (LIVE, ""), (LOST, "internal-error")]
    assert pod.connects == 2
