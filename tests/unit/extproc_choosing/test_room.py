"""Endpoints are full by what is known of them, never by what is not known, and never for long by mistake."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from extproc.choosing.endpoint_health import EndpointHealth
from extproc.choosing.room import BLIND_REQUESTS, Room, rooms_of, takes_prompts
from extproc.choosing.room import room as room_of
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.priority import OverloadPolicy
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import candidate, load
from tests.unit.extproc_choosing.room_of import Saturation

POLICY = OverloadPolicy(waiting_requests=3, kv_usage=0.9, backlog_seconds=0.5, slow_start_seconds=10.0)
RATE = 10_000.0  # tokens a second


def estimates_of(*reports: EndpointLoad, endpoint: str = "a") -> LatencyEstimates:
    estimates = LatencyEstimates(tokens_per_second=RATE)
    for report in reports:
        estimates.report(endpoint, report, now=report.reported_at)
    return estimates


def rooms(
    *candidates: Candidate, estimates: LatencyEstimates | None = None, ceiling: float = 1.0, now: float = 0.0
) -> list[Room]:
    return rooms_of(
        candidates,
        ceiling=ceiling,
        policy=POLICY,
        estimates=estimates or LatencyEstimates(tokens_per_second=RATE),
        full_until={},
        now=now,
    )


def one(reported: EndpointLoad | None, **values: Any) -> Room:
    given: dict[str, Any] = {
        name: values.pop(name) for name in ("estimates", "ceiling", "now", "others") if name in values
    }
    others = given.pop("others", [candidate("known")])
    return rooms(candidate("a", reported=reported, **values), *others, **given)[0]


BUSY = load(running_requests=4)


def test_an_idle_endpoint_has_room_whatever_the_books_say() -> None:
    assert one(load(), backlog_tokens=1e6, open_requests=50) == Room(0.0)


def test_what_was_sent_since_an_idle_report_fills_the_endpoint() -> None:
    room = one(load(), backlog_tokens=1e6, open_requests=1, booked_requests=1)
    assert room.fill > 1.0


def test_reported_waiting_requests_fill_it_and_are_worked_off_with_time() -> None:
    waits = load(waiting_requests=6, running_requests=16)
    room = one(waits, open_requests=22, estimates=limited_to(16, starts=10))
    assert (room.fill >= 1.0, room.why) == (True, "about 6 requests wait there for a place")
    assert (room.by_backlog, room.by_queue) == (False, True)
    assert one(waits, open_requests=20, estimates=limited_to(16, starts=10), now=0.2).fill < 1.0
    room = one(waits, estimates=limited_to(16, starts=10))  # somebody else's: time tells
    assert (room.why, room.by_backlog, room.by_queue) == ("6 requests wait there", True, True)
    assert room.opens_in_seconds == pytest.approx(0.1, rel=0.2)


def test_requests_whose_caches_are_on_their_way_are_no_queue_and_hold_their_blocks() -> None:
    fetches = load(fetching_requests=9, running_requests=16)
    assert one(fetches, open_requests=25).fill < 1.0
    assert one(load(waiting_requests=9, running_requests=16), open_requests=25).fill >= 1.0
    assert one(load(fetching_requests=9, kv_usage=0.99), open_requests=9).why == "99% of its cache is in use"


def limited_to(running: int, *, starts: int) -> LatencyEstimates:
    """Estimates of a pod that was seen to run so many and to start so many a second while others waited."""
    return estimates_of(
        *(
            load(
                waiting_requests=20,
                running_requests=running,
                reported_at=float(at - 6),
                first_token_count=starts * at,
                prefill_count=starts * at,
            )
            for at in range(7)
        )
    )


def test_what_was_sent_since_fills_it_beyond_what_it_is_known_to_run() -> None:
    known = limited_to(16, starts=4)
    assert one(load(running_requests=16), open_requests=18, booked_requests=2, estimates=known).fill < 1.0
    room = one(load(running_requests=16), open_requests=19, booked_requests=3, estimates=known)
    assert (room.fill, room.opens_in_seconds) == (1.0, None)  # a completion opens it, not time


@pytest.mark.parametrize(("starts", "most"), [(2, 3), (10, 5), (60, 30)])
def test_as_many_may_wait_as_the_pod_starts_within_the_time_that_prompts_may_wait(starts: int, most: int) -> None:
    known, running = limited_to(16, starts=starts), load(waiting_requests=1, running_requests=16)
    roomy = [extra for extra in range(40) if one(running, open_requests=16 + extra, estimates=known).fill < 1.0]
    assert len(roomy) == pytest.approx(most, abs=1)


def test_a_pod_of_many_short_requests_is_not_full_by_their_number_between_two_reports() -> None:
    # 50 a second of 80 ms each; one of them had just come when the pod was asked
    reports = [
        load(
            waiting_requests=at % 2,
            running_requests=4 + at % 3,
            reported_at=at / 5,
            first_token_count=10 * at,
            prefill_count=10 * at,
            prefill_seconds_sum=0.2 * at,
            prefill_computed_tokens=1000 * at,
        )
        for at in range(50)
    ]
    known = estimates_of(*reports)
    last = reports[-1]
    for sent in range(50):
        room = one(last, booked_requests=sent, open_requests=5, estimates=known, now=last.reported_at + sent / 50)
        assert room.fill < 1.0, (sent, room)


def test_prompts_to_be_computed_fill_it_by_time_and_one_more_always_goes_to_an_endpoint_without_any() -> None:
    assert one(BUSY, backlog_tokens=0.0, prompt=1_000_000).fill < 1.0
    assert one(BUSY, backlog_tokens=4900.0, booked_requests=1, open_requests=5).fill == pytest.approx(0.98)
    room = one(BUSY, backlog_tokens=8000.0, booked_requests=1, open_requests=5)
    assert (room.why, room.by_queue) == ("prompts for 0.8 s are to be computed there", True)
    assert room.opens_in_seconds == pytest.approx(0.3)


def test_the_cache_fills_it() -> None:
    assert one(structs.replace(BUSY, kv_usage=0.89)).fill < 1.0
    room = one(structs.replace(BUSY, kv_usage=0.95), backlog_tokens=1e5)
    assert (room.why, room.by_queue, room.opens_in_seconds) == ("95% of its cache is in use", False, None)


@pytest.mark.parametrize(
    ("tokens", "answer", "is_full"), [(3000, 0, False), (3000, 1200, True), (5500, 0, True), (0, 9000, False)]
)
def test_expected_answers_fill_the_cache(tokens: int, answer: int, is_full: bool) -> None:
    busy = structs.replace(BUSY, kv_usage=0.4, kv_capacity_tokens=10_000)
    one_more = candidate("a", reported=busy, prompt=1000, matched=200, growth_tokens=tokens, backlog_tokens=1000.0)
    (room,) = rooms_of(
        [one_more],
        ceiling=1.0,
        policy=POLICY,
        estimates=LatencyEstimates(tokens_per_second=RATE),
        full_until={},
        now=0.0,
        answer_tokens=answer,
    )
    assert (room.fill >= 1.0, "will fill it" in room.why) == (is_full, is_full)


def test_a_class_with_a_ceiling_finds_it_full_earlier() -> None:
    for busy in ({"backlog_tokens": 4600.0, "booked_requests": 1}, {"open_requests": 20, "booked_requests": 4}):
        known = limited_to(16, starts=10) if "open_requests" in busy else None
        fills = [one(BUSY, estimates=known, ceiling=ceiling, **busy).fill >= 1.0 for ceiling in (1.0, 0.6)]
        assert fills == [False, True], busy


@pytest.mark.parametrize("ceiling", [1.0, 0.6, 0.1])
def test_a_long_request_s_cache_does_not_fill_a_pod_for_any_class(ceiling: float) -> None:
    assert one(load(running_requests=1, kv_usage=0.85), ceiling=ceiling).fill < 1.0
    assert one(load(running_requests=1, kv_usage=0.95), ceiling=ceiling).why == "95% of its cache is in use"


@pytest.mark.parametrize("ceiling", [1.0, 0.5])
def test_an_unknown_endpoint_is_never_idle_and_takes_a_few_at_a_time(ceiling: float) -> None:
    fills = [one(None, open_requests=count, ceiling=ceiling).fill for count in range(4)]
    assert 0.0 < fills[0] < fills[2] == 1.0
    assert fills[1] < 1.0 < fills[3]


def test_a_pool_of_unknown_endpoints_goes_on_by_its_bookings() -> None:
    blind = [candidate(name, reported=None, open_requests=10) for name in "ab"]
    assert all(room.fill < 1.0 for room in rooms(*blind))
    crowded = candidate("a", reported=None, open_requests=int(BLIND_REQUESTS))
    assert rooms(crowded)[0].fill >= 1.0
    for ran, most in ((1, 32), (64, 64)):  # a quiet time is no limit
        known = estimates_of(*(load(running_requests=ran, reported_at=at / 5) for at in range(5)))
        opened = [candidate("a", reported=None, open_requests=count) for count in range(100)]
        assert sum(rooms(one, estimates=known)[0].fill < 1.0 for one in opened) == pytest.approx(most, abs=1)


def test_a_pod_s_own_503_is_believed_for_its_time() -> None:
    health = EndpointHealth()
    saturation = Saturation(POLICY, estimates=LatencyEstimates(tokens_per_second=RATE), health=health)
    health.full("a", now=10.0)
    [room, other] = saturation.rooms([candidate("a"), candidate("b")], ceiling=1.0, now=10.4)
    assert room.why == "it has said that it is full, for another 0.6 s"
    assert room.opens_in_seconds == pytest.approx(0.6)
    assert (room.fill, room.by_backlog, other) == (1.0, False, Room(0.0))
    assert saturation.rooms([candidate("a")], ceiling=1.0, now=11.0) == [Room(0.0)]


def test_a_new_endpoint_takes_one_request_first_and_its_share_grows_with_time() -> None:
    pool = LatencyEstimates(tokens_per_second=RATE)
    for name in "bcd":
        for at in range(3):
            pool.report(name, load(running_requests=20, reported_at=float(at)), now=float(at))

    def most_open(now: float) -> int:
        return next(
            count
            for count in range(100)
            if one(BUSY, open_requests=count, ready_since=100.0, estimates=pool, now=now).fill >= 1.0
        )

    assert [most_open(now) for now in (100.0, 102.0, 105.0, 109.0)] == [2, 4, 10, 18]
    assert one(BUSY, open_requests=50, ready_since=100.0, estimates=pool, now=110.0).fill < 1.0


def test_without_others_to_compare_a_new_endpoint_has_smaller_limits() -> None:
    assert one(BUSY, backlog_tokens=600.0, booked_requests=1, ready_since=0.0).fill >= 1.0
    assert one(BUSY, backlog_tokens=600.0, booked_requests=1, ready_since=0.0, now=5.0).fill < 1.0
    assert one(load(), ready_since=0.0).fill == 0.0


def test_the_ttft_counts_what_is_ahead_and_the_own_tokens_that_are_not_cached() -> None:
    saturation = Saturation(POLICY, estimates=LatencyEstimates(tokens_per_second=RATE), health=EndpointHealth())
    cold, warm = candidate("a", prompt=5000), candidate("a", prompt=5000, matched=4000)
    queued = candidate("a", reported=BUSY, prompt=5000, matched=4000, backlog_tokens=10_000.0)
    assert [round(saturation.ttft(one, now=0.0), 6) for one in (cold, warm, queued)] == [0.52, 0.12, 1.12]
    known = Saturation(POLICY, estimates=limited_to(16, starts=10), health=EndpointHealth())
    waits = candidate("a", reported=load(waiting_requests=30, running_requests=16), prompt=0, open_requests=46)
    assert known.ttft(waits, now=0.0) == pytest.approx(3.0, rel=0.1)


ANY_LOAD = st.none() | st.builds(
    load,
    waiting_requests=st.integers(0, 10**6),
    running_requests=st.integers(0, 10**6),
    kv_usage=st.floats(0, 1),
    reported_at=st.floats(-100, 100),
)


@given(
    reported=ANY_LOAD,
    booked=st.integers(0, 1000),
    opened=st.integers(0, 1000),
    backlog=st.floats(0, 1e9),
    ready_since=st.none() | st.floats(-100, 100),
    ceiling=st.floats(0.01, 1.0),
)
def test_room_is_a_number_with_a_reason_where_it_is_full_and_a_lower_ceiling_never_gives_more(
    reported: EndpointLoad | None, booked: int, opened: int, backlog: float, ready_since: float | None, ceiling: float
) -> None:
    values: dict[str, Any] = {
        "booked_requests": booked,
        "open_requests": opened,
        "backlog_tokens": backlog,
        "ready_since": ready_since,
    }
    whole, share = one(reported, **values), one(reported, ceiling=ceiling, **values)
    for room in (whole, share):
        assert 0.0 <= room.fill < float("inf")
        assert (room.fill >= 1.0) == bool(room.why)
        assert room.opens_in_seconds is None or room.opens_in_seconds >= 0.0
    assert share.fill >= whole.fill or share.fill >= 1.0
    if reported is not None and ready_since is None:  # the short way through gives the same
        slowly = alone(candidate("a", reported=reported, **values))
        assert whole.fill == pytest.approx(slowly.fill, rel=1e-12)  # it multiplies where the long way divides
        assert (whole.why, whole.opens_in_seconds) == (slowly.why, slowly.opens_in_seconds)


def alone(of: Candidate) -> Room:
    known = LatencyEstimates(tokens_per_second=RATE)
    return room_of(of, ceiling=1.0, policy=POLICY, estimates=known, full_until={}, now=0.0)


class FakePod:
    """Runs at most `slots` at a time for `seconds` each, first come first served; tells as vLLM does."""

    def __init__(self, slots: int, seconds: float) -> None:
        self.slots, self.seconds = slots, seconds
        self.ends: list[float] = []
        self.queue: list[float] = []
        self.started = 0
        self.most_waiting = 0

    def advance(self, now: float) -> int:
        """Return how many have ended."""
        ended = [end for end in self.ends if end <= now]
        self.ends = [end for end in self.ends if end > now]
        for _ in ended:
            if self.queue:
                self._start(now)
        return len(ended)

    def send(self, now: float) -> None:
        self.queue.append(now)
        if len(self.ends) < self.slots:
            self._start(now)
        self.most_waiting = max(self.most_waiting, len(self.queue))

    def _start(self, now: float) -> None:
        del self.queue[0]
        self.ends.append(now + self.seconds)
        self.started += 1


def served(slots: int, seconds: float, *, offer: Callable[[int], int], ticks: int = 2000) -> tuple[FakePod, int]:
    """Offer `offer(tick)` requests each 10 ms for as long as there is room; return the pod and what it served.

    Counts after a fifth of the time, in which the estimates learn.
    """
    pod, estimates, opened, done, waiting = FakePod(slots, seconds), LatencyEstimates(tokens_per_second=1e6), 0, 0, 0
    reported, since = load(), 0
    for tick in range(ticks):
        now = tick / 100
        ended = pod.advance(now)
        opened -= ended
        done += ended if tick >= ticks // 5 else 0
        if tick == ticks // 5:
            pod.most_waiting = 0
        if tick % 20 == 0:
            reported, since = (
                load(
                    waiting_requests=len(pod.queue),
                    running_requests=len(pod.ends),
                    reported_at=now,
                    first_token_count=pod.started,
                    prefill_count=pod.started,
                ),
                0,
            )
            estimates.report("a", reported, now=now)
        waiting += offer(tick)
        while waiting:
            if one(reported, booked_requests=since, open_requests=opened, estimates=estimates, now=now).fill >= 1.0:
                break
            pod.send(now)
            opened, since, waiting = opened + 1, since + 1, waiting - 1
    return pod, done


def test_a_pod_under_three_times_its_load_stays_busy_and_its_queue_short() -> None:
    # 16 places of 0.8 s: 20 a second; 60 a second are offered
    pod, done = served(16, 0.8, offer=lambda tick: 3 if tick % 5 == 0 else 0)
    assert done >= 0.95 * 20 * 16
    assert 1 <= pod.most_waiting <= 20 * POLICY.backlog_seconds + 2


def test_a_pod_that_can_take_all_of_it_serves_all_of_it() -> None:
    pod, done = served(64, 0.08, offer=lambda tick: 1)
    assert done >= 0.97 * 100 * 16
    assert pod.most_waiting == 0


@pytest.mark.parametrize(
    ("reported", "full_until", "takes"),
    [
        (load(waiting_requests=9, running_requests=9), 0.0, True),  # a queue is no limit for prompts of others
        (load(kv_usage=0.94), 0.0, True),
        (load(kv_usage=0.95), 0.0, False),  # blocks that wait to be fetched fill it
        (load(), 10.5, False),  # it has said itself that it is full
        (load(), 10.0, True),
        (None, 0.0, True),
    ],
)
def test_a_prefill_pod_takes_prompts_while_its_cache_has_room(
    reported: EndpointLoad | None, full_until: float, takes: bool
) -> None:
    pod = candidate("p", reported=reported, backlog_tokens=1e6)
    full = {"p": full_until} if full_until else {}
    assert takes_prompts(pod, policy=OverloadPolicy(), full_until=full, now=10.0) is takes
