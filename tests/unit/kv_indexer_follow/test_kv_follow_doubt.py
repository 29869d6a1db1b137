"""What is claimed counts only while it is known to be so: hung replays, holes, silence, backlogs."""

import asyncio
from collections.abc import Sequence

import pytest

from kv_indexer.events.sequence import Frame, ReplayAnswer
from kv_indexer.follow.catch_up import NO_REPLAY, TRUNCATED, RecoveryPolicy
from kv_indexer.follow.follow_stream import BEHIND, MISSING
from kvmesh.errors import FeedLostError
from tests.unit.kv_indexer_follow.kv_fakes import FakePod, frame, removed, stored
from tests.unit.kv_indexer_follow.test_kv_follow_stream import DEGRADED, LIVE, LOST, REPLAYING, UNCONFIRMED, Bench


class HangingPod(FakePod):
    """Its replay socket takes a request and does not answer until it is told to."""

    def __init__(self, *, buffer: Sequence[Frame], live: Sequence[object]) -> None:
        super().__init__(buffer=buffer, live=live)
        self.hangs = False
        self.told = asyncio.Event()

    async def replay(self, start_seq: int) -> ReplayAnswer:
        if not self.hangs:
            return await super().replay(start_seq)
        self.requests.append(start_seq)
        await self.told.wait()
        return ReplayAnswer(frames=(), ended=False)

    def hang(self) -> None:
        self.hangs = True


class DrippingPod(FakePod):
    """Its replay brings one batch at a time, without end."""

    async def replay(self, start_seq: int) -> ReplayAnswer:
        self.requests.append(start_seq)
        await asyncio.sleep(0.001)
        return ReplayAnswer(frames=(frame(start_seq, stored(start_seq + 1)),), ended=False)


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    bench.policy = RecoveryPolicy(heal_seconds=1e9)
    return bench


def chain(count: int) -> list[Frame]:
    return [frame(seq, stored(seq + 1, parent=seq or None)) for seq in range(count)]


async def test_batches_are_applied_while_a_quiet_publisher_that_was_asked_does_not_answer(bench: Bench) -> None:
    pod = HangingPod(buffer=chain(3), live=[])
    pod.script = [pod.hang, [], [frame(3, removed(3))]]

    await bench.follow(pod)  # ends before the request is answered

    assert (pod.requests, await bench.matched(), bench.states()[-1]) == ([0, 2], 2, (LIVE, ""))


async def test_a_gap_that_shows_while_a_replay_is_under_way_is_closed_first(bench: Bench) -> None:
    pod = HangingPod(buffer=chain(5), live=[])

    def answer_again() -> None:
        pod.hangs = False

    pod.script = [pod.hang, [], answer_again, [chain(5)[4]], []]
    pod.buffer = chain(3)
    pod.script.insert(2, lambda: pod.forget_all_but(chain(5)))
    await bench.follow(pod)

    assert (await bench.matched(), bench.telemetry.gaps, bench.states()[-1]) == (5, 1, (LIVE, ""))


async def test_a_replay_without_end_leaves_the_stream_to_its_live_batches() -> None:
    bench = Bench()
    bench.policy = RecoveryPolicy(heal_seconds=1e9, replay_limit_seconds=0.1)
    far = 1 << 40
    pod = DrippingPod(live=[[frame(far, stored(1, 2, 3))], []])

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1]) == (3, (DEGRADED, "replay-unanswered"))


async def test_a_gap_is_given_up_at_once_where_the_publisher_did_not_answer_the_last_time(bench: Bench) -> None:
    pod = FakePod(live=[[frame(0, stored(1))], [frame(2, stored(1))], [frame(4, stored(1))]])
    pod.answers_replay = False

    await bench.follow(pod)

    assert (pod.requests, bench.states()[-1]) == ([0, 0], (DEGRADED, "replay-unanswered"))


async def test_numbers_skipped_five_times_a_minute_cost_the_blocks_before_and_never_the_stream(bench: Bench) -> None:
    pod = FakePod(buffer=[], live=[])
    seq = 0
    for _ in range(20):
        for _ in range(11):  # a second each
            batch = frame(seq, stored(1), removed(1), stored(1))
            pod.script += [lambda batch=batch: pod.buffer.append(batch), [batch]]
            seq += 1
        seq += 1
    await bench.follow(pod)

    assert (bench.telemetry.gaps, await bench.matched()) == (19, 1)
    assert {state for state, _ in bench.states()} == {LIVE, REPLAYING, DEGRADED}
    assert bench.slept == []


async def test_who_skips_numbers_all_the_time_is_left_alone_for_a_while_and_taken_up_again(bench: Bench) -> None:
    skipping = [[frame(2 * number, stored(1))] for number in range(60)]
    going_on = [[frame(119 + number, stored(1), removed(1), stored(1))] for number in range(60)]
    pod = FakePod(live=[*skipping, *going_on])

    await bench.follow(pod, with_replay=False)

    assert (LOST, MISSING) in bench.states()
    assert (bench.states()[-1], await bench.matched()) == ((DEGRADED, NO_REPLAY), 1)
    assert sum(state is REPLAYING for state, _ in bench.states()) < 60  # each costs all readers a look


async def test_gaps_that_come_too_often_wait_for_each_other_and_are_filled_in_the_end(bench: Bench) -> None:
    bench.policy = RecoveryPolicy(free_gaps=3)
    batches = chain(40)
    pod = FakePod(buffer=batches, live=[[each] for each in batches[1::2]])
    pod.buffer = []
    pod.script = [step for at in range(1, 40, 2) for step in (_grow(pod, batches[: at + 1]), [batches[at]])]

    await bench.follow(pod)

    assert (await bench.matched(40), bench.states()[-1]) == (40, (LIVE, ""))
    assert bench.slept == sorted(bench.slept)
    assert (LOST, MISSING) in bench.states()


def _grow(pod: FakePod, batches: list[Frame]) -> object:
    return lambda: pod.forget_all_but(batches)


async def test_all_holes_of_a_history_are_given_up_in_one_step(bench: Bench) -> None:
    pod = FakePod(live=[[]])
    answers = [
        ReplayAnswer(frames=(), ended=False, next_seq=3, whole_from=9),
        ReplayAnswer(frames=(frame(9, stored(1)),), ended=True),
    ]

    async def replay(start_seq: int) -> ReplayAnswer:
        pod.requests.append(start_seq)
        return answers[start_seq == 9]

    pod.replay = replay  # type: ignore[method-assign]
    await bench.follow(pod)

    assert (pod.requests, await bench.matched()) == ([0, 0, 0, 9, 9], 1)  # the last of them is a probe
    assert bench.states()[-1] == (DEGRADED, TRUNCATED)


async def test_blocks_of_a_silent_pod_that_cannot_be_asked_do_not_count_until_it_says_something(bench: Bench) -> None:
    pod = FakePod(live=[[frame(0, stored(1))], *[[]] * 29])
    await bench.follow(pod, with_replay=False)
    assert (await bench.matched(), bench.states()[-1]) == (1, (DEGRADED, NO_REPLAY))

    pod.script = [[frame(1, stored(1))], *[[]] * 31]
    await bench.follow(pod, with_replay=False)
    assert (await bench.matched(), bench.states()[-1]) == (0, (UNCONFIRMED, NO_REPLAY))


async def test_a_batch_that_follows_confirms_what_is_claimed(bench: Bench) -> None:
    pod = FakePod(live=[[frame(0, stored(1))], *[[]] * 40, [frame(1, stored(2, parent=1))]])

    await bench.follow(pod, with_replay=False)

    assert (await bench.matched(), bench.states()[-2:]) == (2, [(UNCONFIRMED, NO_REPLAY), (DEGRADED, NO_REPLAY)])


async def test_an_idle_pod_that_holds_nothing_is_not_called_unconfirmed(bench: Bench) -> None:
    await bench.follow(FakePod(live=[[]] * 100), with_replay=False)
    assert bench.states()[-1] == (DEGRADED, NO_REPLAY)


async def test_a_pod_that_answers_probes_may_be_silent_for_ever(bench: Bench) -> None:
    await bench.follow(FakePod(buffer=chain(2), live=[[]] * 100))
    assert (await bench.matched(), bench.states()[-1]) == (2, (LIVE, ""))


async def test_a_backlog_does_not_count_before_it_is_applied(bench: Bench) -> None:
    batches = [frame(seq, stored(1), removed(1), stored(1), ts=100.0 + 0.001 * seq) for seq in range(200)]
    pod = FakePod(live=[[batches[0]], batches[1:65], batches[65:129], batches[129:193], [batches[193]]])

    await bench.follow(pod)  # a second passes at each

    assert bench.states()[-3:] == [(LIVE, ""), (REPLAYING, BEHIND), (LIVE, "")]


async def test_clocks_that_differ_are_no_backlog(bench: Bench) -> None:
    batches = [frame(seq, stored(1), removed(1), stored(1), ts=5e9 + seq // 64) for seq in range(193)]
    pod = FakePod(live=[[batches[0]], batches[1:65], batches[65:129], batches[129:193]])

    await bench.follow(pod)

    assert bench.states()[-1] == (LIVE, "")


async def test_a_stream_that_is_lost_during_a_probe_is_taken_up_again(bench: Bench) -> None:
    pod = HangingPod(buffer=chain(2), live=[])
    pod.script = [pod.hang, [], lambda: setattr(pod, "hangs", False), FeedLostError("closed"), []]

    await bench.follow(pod)

    assert (await bench.matched(), bench.states()[-1], bench.lost) == (2, (LIVE, ""), 1)
