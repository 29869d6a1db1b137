"""An endpoint is full for a class where one more stream would break a promised inter-token time."""

from collections.abc import Mapping
from typing import Any

import pytest

from extproc.answers.stream_promises import NO_PROMISES, StreamPromises, stream_promises
from extproc.choosing.room import PREEMPTED_SECONDS, Room, places_of, rooms_of
from extproc.choosing.stream_room import OUT_OF_REACH, UNLEARNED, least_seconds, unkept
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy, PriorityClass
from extproc.policy.request_class import PriorityPolicy
from tests.unit.extproc_choosing.pick_candidates import candidate, load

ALONE, STREAM, CONTEXT = 0.010, 0.0005, 1e-7
CAPACITY = 100_000
POLICY = OverloadPolicy(waiting_requests=3, backlog_seconds=0.5)


def promises(**seconds: float | None) -> StreamPromises:
    """Of classes of which each is more important than the next."""
    classes = {
        name: PriorityClass(priority=-at, inter_token_seconds=promised)
        for at, (name, promised) in enumerate(seconds.items())
    }
    return stream_promises(PriorityPolicy(classes=classes))


def learned(*, preempted: float | None = None, now: float = 10.0) -> LatencyEstimates:
    """Estimates of pods a and b that have shown what a stream costs, and perhaps one that was pushed back."""
    estimates = LatencyEstimates()
    for address in "ab":
        tokens = seconds = 0.0
        for at in range(101):
            running, each = 2 + at % 40, 500 + 37 * (at % 23)
            context = running * each
            step = ALONE + STREAM * running + CONTEXT * context
            tokens, seconds = tokens + running / step, seconds + running
            report = load(
                running_requests=running,
                kv_usage=context / CAPACITY,
                kv_capacity_tokens=CAPACITY,
                reported_at=now - 101 + at,
                inter_token_count=round(tokens),
                inter_token_seconds_sum=seconds,
                preemptions=int(preempted is not None and at == 100),
            )
            estimates.report(address, report, now=report.reported_at)
    return estimates


KNOWN = learned()


def pod(
    address: str = "a", *, running: int, context: int = 0, promised: Mapping[str, int] | None = None, **values: Any
) -> Candidate:
    reported = load(
        running_requests=running, kv_usage=context / CAPACITY, kv_capacity_tokens=CAPACITY, reported_at=10.0
    )
    values = {"prompt": 100, "open_requests": running, **values}
    return candidate(address, reported=reported, promised=promised or {}, **values)


def rooms(
    *pods: Candidate, of: str, promised: StreamPromises, estimates: LatencyEstimates = KNOWN, now: float = 10.0
) -> list[Room]:
    return rooms_of(
        pods,
        ceiling=1.0,
        policy=POLICY,
        estimates=estimates,
        full_until={},
        now=now,
        class_name=of,
        promises=promised,
    )


def has_room(room: Room) -> bool:
    return room.fill < 1.0


def most_streams(seconds: float, **values: Any) -> int:
    """The streams that run when a class with this promise finds the pod full."""
    promised = promises(chat=seconds)
    return next(n for n in range(200) if not has_room(rooms(pod(running=n, **values), of="chat", promised=promised)[0]))


def test_streams_are_let_in_up_to_the_promised_time_less_a_margin() -> None:
    # 0.9 x 30 ms = 10 + 0.5 x 34; what was learned may be off a little
    assert most_streams(0.030) == pytest.approx(34, abs=2)
    assert most_streams(0.020) == pytest.approx(16, abs=2)


def test_context_counts_that_of_the_streams_there_that_of_those_on_their_way_and_the_own_one() -> None:
    least = most_streams(0.030)
    assert most_streams(0.030, context=50_000) == pytest.approx(least - 10, abs=2)
    assert most_streams(0.030, prompt=50_000) == pytest.approx(least - 10, abs=2)
    promised = promises(chat=0.030)
    some = pod(running=20, open_requests=24, booked_requests=4, context_tokens=24 * 500)
    long = pod(running=20, open_requests=24, booked_requests=4, context_tokens=24 * 20_000)
    assert [has_room(rooms(each, of="chat", promised=promised)[0]) for each in (some, long)] == [True, False]


def test_the_reason_names_the_promise() -> None:
    [room] = rooms(pod(running=60, promised={"chat": 60}), of="chat", promised=promises(chat=0.030))
    assert room.why.startswith("inter-token-promise: ")
    assert room.why.endswith(" ms a token with one more stream, 30 ms are promised to class 'chat'")
    assert (room.fill > 1.0, room.opens_in_seconds, room.by_backlog, room.yields) == (True, None, False, False)
    assert room.by_promise


def test_a_less_important_class_breaks_no_promise_of_a_stream_that_runs_there() -> None:
    promised = promises(chat=0.030, batch=None)
    with_chat, without = pod(running=40, promised={"chat": 1}), pod("b", running=40)
    found = rooms(with_chat, without, of="batch", promised=promised)
    assert [has_room(room) for room in found] == [False, True]
    assert "promised to class 'chat'" in found[0].why
    assert places_of(found) == [False, True]
    assert not any(places_of(rooms(with_chat, of="batch", promised=promised)))


def test_classes_that_are_equally_important_keep_each_other_s_promises() -> None:
    equal = stream_promises(
        PriorityPolicy(
            classes={"chat": PriorityClass(inter_token_seconds=0.03), "code": PriorityClass(inter_token_seconds=0.1)}
        )
    )
    [room] = rooms(pod(running=40, promised={"chat": 39}), of="code", promised=equal)
    assert (has_room(room), room.yields) == (False, False)
    # one without a promise could fill the pod again and again
    plain = stream_promises(
        PriorityPolicy(classes={"chat": PriorityClass(inter_token_seconds=0.03), "code": PriorityClass()})
    )
    [room] = rooms(pod(running=40, promised={"chat": 2}), of="code", promised=plain)
    assert (has_room(room), room.yields) == (False, False)


def test_streams_of_less_important_classes_are_not_waited_for() -> None:
    promised = promises(chat=0.030, batch=None)
    filled, own = pod(running=60, promised={"chat": 10}), pod("b", running=60, promised={"chat": 50})
    found = rooms(filled, own, of="chat", promised=promised)
    assert ([has_room(room) for room in found], places_of(found)) == ([False, False], [True, False])
    assert places_of(rooms(filled, pod("b", running=20), of="chat", promised=promised)) == [False, True]
    long = pod(running=60, context=90_000, promised={"chat": 30}, prompt=60_000)  # too much by itself
    assert places_of(rooms(long, of="chat", promised=promised)) == [False]


def test_promises_to_less_important_classes_give_way_where_there_is_no_other_place() -> None:
    promised = promises(chat=None, batch=0.030)
    crowded, other = pod(running=40, promised={"batch": 3}), pod("b", running=60)
    alone = rooms(crowded, of="chat", promised=promised)
    assert (has_room(alone[0]), alone[0].yields, places_of(alone)) == (False, True, [True])
    assert places_of(rooms(crowded, other, of="chat", promised=promised)) == [False, True]


def test_the_own_promise_counts_before_those_that_give_way() -> None:
    promised = promises(chat=0.030, batch=0.025)
    [room] = rooms(pod(running=60, promised={"batch": 3, "chat": 50}), of="chat", promised=promised)
    assert (room.yields, "'chat'" in room.why) == (False, True)


def test_a_pod_that_is_full_already_is_no_place_whatever_gives_way() -> None:
    promised = promises(chat=None, batch=0.030)
    behind = pod(running=40, promised={"batch": 3}, backlog_tokens=1e6, booked_requests=1)
    [room] = rooms(behind, of="chat", promised=promised)
    # nor is it worth a wait for its cache
    assert (has_room(room), room.yields, room.by_backlog) == (False, False, False)


def test_an_endpoint_without_anything_to_do_has_room_and_a_promise_out_of_reach_keeps_no_request_away() -> None:
    strict = promises(chat=0.005)
    assert rooms(pod(running=0), of="chat", promised=strict) == [Room(0.0)]
    assert has_room(rooms(pod(running=30), of="chat", promised=strict)[0])
    words = unkept([pod(running=30)], KNOWN, class_name="chat", promises=strict)
    assert list(words) == [OUT_OF_REACH]
    assert "even a single stream takes longer than the 5 ms a token" in words[OUT_OF_REACH]


def test_before_anything_is_learned_nothing_changes_and_it_is_said() -> None:
    unknown, promised = LatencyEstimates(), promises(chat=0.001)
    assert has_room(rooms(pod(running=60), of="chat", promised=promised, estimates=unknown)[0])
    words = unkept([pod(running=60)], unknown, class_name="chat", promises=promised)
    assert list(words) == [UNLEARNED] and " at a: " in words[UNLEARNED]
    assert unkept([pod(running=0)], unknown, class_name="chat", promises=promised) == {}  # it has room anyway
    assert unkept([pod(running=60)], unknown, class_name="batch", promises=promised) == {}


@pytest.mark.parametrize("of", ["", "chat", "batch"])
def test_without_promises_nothing_changes(of: str) -> None:
    crowded = pod(running=500, context=90_000, promised={"gone": 3})
    for promised in (NO_PROMISES, promises(chat=None, batch=None)):
        assert rooms(crowded, of=of, promised=promised) == rooms(crowded, of=of, promised=NO_PROMISES)
        assert has_room(rooms(crowded, of=of, promised=promised)[0])


def test_targets_that_only_follow_from_a_tolerance_keep_no_request_away() -> None:
    assert stream_promises(PriorityPolicy()).seconds == {}


def test_a_pod_that_pushes_streams_back_has_no_room_for_less_important_classes_until_it_stops() -> None:
    preempted = learned(preempted=9.0)
    promised = promises(chat=None, batch=None)

    def found(of: str, now: float) -> Room:
        return rooms(pod(running=10), of=of, promised=promised, estimates=preempted, now=now)[0]

    assert [has_room(found(of, 10.5)) for of in ("chat", "batch", "")] == [True, False, True]
    assert found("batch", 10.0).why == "it has pushed a stream back 1.0 s ago: its cache is full"
    assert found("batch", 10.0).opens_in_seconds == pytest.approx(PREEMPTED_SECONDS - 1.0)
    assert has_room(found("batch", 11.0 + 0.1))
    assert rooms(pod(running=0), of="batch", promised=promised, estimates=preempted) == [Room(0.0)]


def test_the_least_time_a_token_is_that_of_the_endpoint_with_the_fewest_streams() -> None:
    found = least_seconds([pod(running=30), pod("b", running=9), candidate("c", reported=None)], KNOWN)
    assert found == pytest.approx(ALONE + 10 * STREAM, rel=0.1)
    assert least_seconds([pod("z", running=3)], KNOWN) == 0.0
