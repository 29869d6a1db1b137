"""Endpoints are avoided while they fail or lag, get trials, and are never all avoided."""

from extproc.choosing.candidates import at_most, slow_endpoints
from extproc.choosing.endpoint_health import LONG_STREAK, EndpointHealth, Outcome
from extproc.pods.inflight import Bookings
from extproc.policy.values import HealthPolicy
from tests.unit.extproc_choosing.pick_candidates import load

POLICY = HealthPolicy()
IDLE = Bookings()


def served(health: EndpointHealth, *, now: float) -> None:
    health.note("a", failed=False, now=now)
    health.ended("a", good=True, now=now)


def failing(health: EndpointHealth, times: int, *, now: float) -> None:
    for _ in range(times):
        health.note("a", failed=True, now=now)


def test_an_endpoint_is_avoided_for_a_while_after_half_of_its_requests_failed() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 1, now=0.0)
    served(health, now=0.0)
    served(health, now=0.0)
    failing(health, 2, now=1.0)
    assert health.avoided(now=1.0) == {"a": "3 of 5 requests failed"}
    assert health.avoided(now=6.0) == {}


def test_three_failures_in_a_row_are_enough_at_any_rate() -> None:
    health = EndpointHealth(POLICY)
    for now in (0.0, 100.0):
        failing(health, 1, now=now)
        assert health.avoided(now=now) == {}
    failing(health, 1, now=200.0)
    assert health.avoided(now=200.0) == {"a": "3 requests in a row failed"}


def test_a_failure_behind_good_headers_is_one_and_no_good_answer() -> None:
    health, now = EndpointHealth(POLICY), 0.0
    for _ in range(3):
        assert health.avoided(now=now) == {}
        health.note("a", failed=False, now=now)
        health.ended("a", good=False, now=now)
    assert list(health.avoided(now=now)) == ["a"]
    health.note("a", failed=False, now=5.0)
    assert health.avoided_times("a") == (0.0, 5.0)  # headers alone do not end the time
    health.ended("a", good=False, now=5.0)
    assert health.avoided_times("a") == (0.0, 15.0)
    served(health, now=15.0)
    assert health.avoided_times("a") is None


def test_streams_are_read_after_a_failure_and_now_and_then_where_they_are_all_brief() -> None:
    health, reads = EndpointHealth(POLICY), [True, False]

    def is_suspect() -> bool:
        return health.is_suspect("a", lambda: reads.pop(0))

    health.unproven("a", sent_at=0.0, most_unread=None, now=0.0)
    health.unproven("a", sent_at=0.0, most_unread=None, now=0.0)
    assert not is_suspect()
    health.unproven("a", sent_at=0.0, most_unread=None, now=0.0)
    assert [is_suspect(), is_suspect()] == [True, False]
    health.ended("a", good=False, now=0.0)
    assert is_suspect()
    health.read("a", Outcome.GOOD, seconds=0.0, now=1.0)
    assert not is_suspect()


def test_streams_that_end_before_they_can_be_read_are_failures_in_the_end() -> None:
    health = EndpointHealth(POLICY)
    for number in range(6):
        health.unproven("a", sent_at=0.0, most_unread=2, now=0.0)
        if number == 1:
            health.read("a", Outcome.NEITHER, seconds=0.0, now=0.0)
        assert bool(health.avoided(now=0.0)) == (number == 6)
    health.unproven("a", sent_at=0.0, most_unread=2, now=0.0)
    assert health.avoided(now=0.0) == {"a": "3 requests in a row failed"}


def test_brief_streams_are_good_answers_where_none_can_be_read() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    for _ in range(3):
        health.unproven("a", sent_at=5.0, most_unread=2, now=5.0)
    assert health.avoided_times("a") is None


def test_one_that_refuses_again_and_again_gets_one_request_at_a_time() -> None:
    health, now = EndpointHealth(POLICY), 0.0
    for _ in range(3):
        health.full("a", now=now)
        now = health.full_until(now=now)["a"]
    assert health.full_until(now=now) == {}
    health.sent("a", now=now)
    assert health.full_until(now=now) == {"a": now + 1.0}
    health.full("a", now=now + 0.5)
    assert health.full_until(now=now + 1.0) == {"a": now + 8.5}
    now += 8.5
    assert health.full_until(now=now) == {}
    health.sent("a", now=now)
    health.note("a", failed=False, now=now)
    assert health.full_until(now=now) == {}


def test_a_trial_that_fails_avoids_it_twice_as_long_up_to_a_limit() -> None:
    health, now, waits = EndpointHealth(POLICY), 0.0, []
    failing(health, 4, now=now)
    for _ in range(6):
        began = now
        while health.avoided(now=now):
            now += 1.0
        waits.append(now - began)
        failing(health, 1, now=now)
    assert waits == [5.0, 10.0, 20.0, 40.0, 60.0, 60.0]


def test_since_when_it_is_avoided_and_when_one_request_is_tried_are_told() -> None:
    health = EndpointHealth(POLICY)
    assert health.avoided_times("a") is None
    failing(health, 4, now=1.0)
    assert health.avoided_times("a") == (1.0, 6.0)
    failing(health, 1, now=6.0)  # the trial
    assert health.avoided_times("a") == (1.0, 16.0)
    served(health, now=27.0)
    assert health.avoided_times("a") is None
    failing(health, 4, now=30.0)
    health.restarted("a")
    assert health.avoided_times("a") is None


def test_a_trial_that_succeeds_for_a_window_heals_it() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    served(health, now=6.0)
    health.note("a", failed=True, now=7.0)
    assert health.avoided(now=7.0) == {}  # one failure proves nothing again


def test_few_failures_among_many_answers_are_no_reason() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 1, now=0.0)
    for i in range(20):
        if i % 4 == 3:
            failing(health, 1, now=0.1 * i)
        else:
            served(health, now=0.1 * i)
    assert health.avoided(now=2.0) == {}


def test_a_few_failures_at_once_are_counted_against_all_requests_of_the_window() -> None:
    health = EndpointHealth(POLICY)
    for i in range(100):
        health.note("a", failed=False, now=0.01 * i)
    failing(health, LONG_STREAK - 1, now=1.0)
    assert health.avoided(now=1.0) == {}
    failing(health, 1, now=1.0)
    assert list(health.avoided(now=1.0)) == ["a"]


def test_a_pod_with_many_good_answers_is_bad_once_only_failures_have_come_for_a_while() -> None:
    health = EndpointHealth(POLICY)
    for i in range(40):
        health.note("a", failed=False, now=0.25 * i)
    for i in range(4):
        failing(health, 1, now=10.0 + 0.25 * i)
        assert health.avoided(now=10.0 + 0.25 * i) == {}
    failing(health, 1, now=11.0)
    assert list(health.avoided(now=11.0)) == ["a"]


def test_a_pod_whose_good_headers_go_on_is_not_bad_for_a_few_failures() -> None:
    health = EndpointHealth(POLICY)
    for i in range(80):  # streams that take long: their ends come late
        health.note("a", failed=False, now=0.25 * i)
        if i % 10 == 9:
            failing(health, 1, now=0.25 * i + 0.1)
    assert health.avoided(now=20.0) == {}


def test_failures_of_long_ago_do_not_count() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 2, now=0.0)
    served(health, now=1.0)
    failing(health, 2, now=20.0)
    assert health.avoided(now=20.0) == {}


def test_answers_to_what_was_sent_before_neither_prolong_it_nor_end_it() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 20, now=0.0)
    health.note("a", failed=False, now=0.1)
    assert list(health.avoided(now=0.1)) == ["a"]
    assert health.avoided(now=5.0) == {}
    failing(health, 1, now=4.9)
    served(health, now=5.1)
    failing(health, 1, now=5.2)
    assert health.avoided(now=5.2) == {}  # what came too late is not held against the trial


def test_another_process_begins_with_a_clean_slate() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.restarted("a")
    assert health.avoided(now=0.0) == {}


def test_an_endpoint_whose_tokens_take_three_times_the_usual_is_slow() -> None:
    assert slow_endpoints({"a": 0.02, "b": 0.03, "c": 0.2}) == {"c": "200 ms a token, the others 30 ms"}
    assert slow_endpoints({"a": 0.001, "b": 0.001, "c": 0.04}) == {}  # fast enough all the same
    assert slow_endpoints({"a": 0.01, "b": 1.0}) == {}  # who is odd?


def test_at_most_half_is_avoided_the_first_ones() -> None:
    bad = {"a": "x", "b": "x"}
    assert at_most(bad, endpoints=4) == bad
    assert at_most(bad, endpoints=3) == {"a": "x"}


def test_a_trial_is_one_request_at_a_time() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.sent("a", now=4.0)  # there was nobody else: no trial yet
    assert health.avoided(now=5.0) == {}
    health.sent("a", now=5.0)
    assert list(health.avoided(now=5.1)) == ["a"]
    health.note("a", failed=False, now=5.2)
    assert health.avoided(now=5.2) == {}  # the next trial
    health.sent("a", now=5.3)
    assert list(health.avoided(now=5.3)) == ["a"]
    served(health, now=5.4)
    health.sent("a", now=5.5)
    assert health.avoided(now=5.5) == {}


def test_a_trial_whose_client_leaves_makes_way_for_another() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.sent("a", now=5.0)
    assert list(health.avoided(now=9.9)) == ["a"]
    assert health.avoided(now=10.0) == {}


def test_an_endpoint_that_says_it_is_full_is_full_for_a_while_and_not_failed() -> None:
    health = EndpointHealth(POLICY)
    assert health.full_until(now=0.0) == {}
    for number in range(20):
        health.full("a", now=0.01 * number)
    health.full("b", now=0.5)
    assert (health.full_until(now=0.5), health.avoided(now=0.5)) == ({"a": 1.0, "b": 1.5}, {})
    assert health.full_until(now=1.0) == {"b": 1.5}
    assert health.full_until(now=1.5) == {}


def test_one_that_goes_on_saying_so_is_believed_longer_each_time_until_it_serves() -> None:
    health, now, times = EndpointHealth(POLICY), 0.0, []
    for _ in range(5):
        health.full("a", now=now)
        times.append(health.full_until(now=now)["a"] - now)
        now += times[-1]
    assert times == [1.0, 2.0, 4.0, 8.0, 8.0]
    health.note("a", failed=False, now=now)
    health.full("a", now=now)
    assert health.full_until(now=now) == {"a": now + 1.0}


def test_a_full_endpoint_that_is_another_process_is_not_full() -> None:
    health = EndpointHealth(POLICY)
    health.full("a", now=0.0)
    health.restarted("a")
    assert health.full_until(now=0.0) == {}


def test_broken_streams_blame_a_pod_whose_numbers_stand_still_and_not_one_that_works() -> None:
    for moves in (True, False):
        health = EndpointHealth(POLICY)
        for number in range(4):
            health.reported("a", load(reported_at=float(number), prefix_query_tokens=min(number, 1)), IDLE)
        for number in range(8):
            now = 4.0 + number
            health.reported("a", load(reported_at=now, prefix_query_tokens=2 + number if moves else 1), IDLE)
            health.read("a", Outcome.BROKEN, seconds=0.1, now=now)
        assert bool(health.avoided_times("a")) is not moves


def test_a_pod_hangs_whose_numbers_stand_still_with_a_request_for_its_engine() -> None:
    health, bookings = EndpointHealth(POLICY), Bookings()
    for now in (0.0, 1.0):
        health.reported("a", load(reported_at=now, prefix_query_tokens=int(now)), bookings)
    booking = bookings.book("a", now=2.0, uncached_tokens=10, context_tokens=10)
    health.reported("a", load(reported_at=6.0, prefix_query_tokens=1), bookings)
    assert health.avoided(now=6.0) == {}  # refused, or its engine does not have it yet
    booking.is_engines = True
    health.reported("a", load(reported_at=6.0, prefix_query_tokens=1), bookings)
    assert health.avoided(now=6.0) == {"a": "it has done nothing for 4 s, with requests there"}
    health.reported("a", load(reported_at=7.0, prefix_query_tokens=2), bookings)
    assert health.avoided(now=7.0) == {}


def test_without_numbers_broken_streams_everywhere_blame_nobody() -> None:
    health = EndpointHealth(POLICY)
    for number in range(40):
        health.read("abcd"[number % 4], Outcome.BROKEN, seconds=0.0, now=0.1 * number)
    assert health.avoided(now=4.0) == {}
    for _ in range(40):
        health.read("a", Outcome.BROKEN, seconds=0.0, now=20.0)
    assert list(health.avoided(now=20.0)) == ["a"]


def test_one_that_refuses_with_nothing_to_do_fails() -> None:
    health, now = EndpointHealth(POLICY), 0.0
    health.reported("a", load(), IDLE)
    for _ in range(4):
        assert health.failing() == frozenset()
        health.full("a", now=now)
        now = health.full_until(now=now).get("a", now)
    assert health.failing() == {"a"}
