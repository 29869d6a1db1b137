"""Endpoints are avoided while they fail or lag, get trials, and are never all avoided."""

from extproc.choosing.health import LONGEST_FULL_SECONDS, EndpointHealth, at_most, slow_endpoints
from extproc.policy.values import HealthPolicy

POLICY = HealthPolicy(
    least_requests=4, failure_share=0.5, window_seconds=10.0, avoid_seconds=5.0, longest_avoid_seconds=15.0
)


def failing(health: EndpointHealth, times: int, *, now: float) -> None:
    for _ in range(times):
        health.note("a", failed=True, now=now)


def test_an_endpoint_is_avoided_for_a_while_after_half_of_its_requests_failed() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 3, now=0.0)
    assert health.avoided(now=0.0) == {}
    failing(health, 1, now=1.0)
    assert health.avoided(now=1.0) == {"a": "4 of 4 requests failed"}
    assert health.avoided(now=6.0) == {}


def test_a_trial_that_fails_avoids_it_twice_as_long_up_to_a_limit() -> None:
    health, now, waits = EndpointHealth(POLICY), 0.0, []
    failing(health, 4, now=now)
    for _ in range(4):
        began = now
        while health.avoided(now=now):
            now += 1.0
        waits.append(now - began)
        failing(health, 1, now=now)
    assert waits == [5.0, 10.0, 15.0, 15.0]


def test_since_when_it_is_avoided_and_when_one_request_is_tried_are_told() -> None:
    health = EndpointHealth(POLICY)
    assert health.avoided_times("a") is None
    failing(health, 4, now=1.0)
    assert health.avoided_times("a") == (1.0, 6.0)
    failing(health, 1, now=6.0)  # the trial
    assert health.avoided_times("a") == (1.0, 16.0)
    health.note("a", failed=False, now=27.0)
    assert health.avoided_times("a") is None
    failing(health, 4, now=30.0)
    health.restarted("a")
    assert health.avoided_times("a") is None


def test_a_trial_that_succeeds_for_a_window_heals_it() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.note("a", failed=False, now=6.0)
    health.note("a", failed=True, now=7.0)
    assert health.avoided(now=7.0) == {}  # one failure proves nothing again


def test_few_failures_among_many_answers_are_no_reason() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 1, now=0.0)
    for i in range(20):
        health.note("a", failed=i % 4 == 3, now=0.1 * i)
    assert health.avoided(now=2.0) == {}


def test_a_few_failures_at_once_are_counted_against_all_requests_of_the_window() -> None:
    health = EndpointHealth(POLICY)
    for i in range(100):
        health.note("a", failed=False, now=0.01 * i)
    failing(health, 10, now=1.0)
    assert health.avoided(now=1.0) == {}
    failing(health, 90, now=1.0)
    assert list(health.avoided(now=1.0)) == ["a"]


def test_failures_of_long_ago_do_not_count() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 3, now=0.0)
    failing(health, 3, now=20.0)
    assert health.avoided(now=20.0) == {}


def test_answers_to_what_was_sent_before_neither_prolong_it_nor_end_it() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 20, now=0.0)
    health.note("a", failed=False, now=0.1)
    assert list(health.avoided(now=0.1)) == ["a"]
    assert health.avoided(now=5.0) == {}
    failing(health, 1, now=4.9)
    health.note("a", failed=False, now=5.1)
    failing(health, 1, now=5.2)
    assert health.avoided(now=5.2) == {}  # what came too late is not held against the trial


def test_another_process_begins_with_a_clean_slate() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.restarted("a")
    assert health.avoided(now=0.0) == {}


def test_an_endpoint_whose_tokens_take_three_times_the_usual_is_slow() -> None:
    policy = HealthPolicy(slow_factor=3.0, slow_floor_seconds=0.05)
    assert slow_endpoints({"a": 0.02, "b": 0.03, "c": 0.2}, policy=policy) == {"c": "200 ms a token, the others 30 ms"}
    assert slow_endpoints({"a": 0.001, "b": 0.001, "c": 0.04}, policy=policy) == {}  # fast enough all the same
    assert slow_endpoints({"a": 0.01, "b": 1.0}, policy=policy) == {}  # who is odd?


def test_where_most_are_bad_it_is_not_the_endpoints() -> None:
    bad = {"a": "x", "b": "x"}
    assert at_most(bad, endpoints=4, share=0.5) == bad
    assert at_most(bad, endpoints=3, share=0.5) == {}


def test_a_trial_is_one_request_at_a_time() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.sent("a", now=4.0)  # there was nobody else: no trial yet
    assert health.avoided(now=5.0) == {}
    health.sent("a", now=5.0)
    assert list(health.avoided(now=5.1)) == ["a"]
    health.note("a", failed=False, now=5.2)
    health.sent("a", now=5.3)
    assert health.avoided(now=5.3) == {}


def test_a_trial_whose_client_leaves_makes_way_for_another() -> None:
    health = EndpointHealth(POLICY)
    failing(health, 4, now=0.0)
    health.sent("a", now=5.0)
    assert list(health.avoided(now=9.9)) == ["a"]
    assert health.avoided(now=10.0) == {}


def test_an_endpoint_that_says_it_is_full_is_full_for_a_while_and_not_failed() -> None:
    health = EndpointHealth(POLICY, full_seconds=1.0)
    assert health.full_until(now=0.0) == {}
    for number in range(20):
        health.full("a", now=0.01 * number)
    health.full("b", now=0.0, seconds=3.0)
    assert (health.full_until(now=0.5), health.avoided(now=0.5)) == ({"a": 1.0, "b": 3.0}, {})
    assert health.full_until(now=1.0) == {"b": 3.0}
    assert health.full_until(now=3.0) == {}


def test_one_that_goes_on_saying_so_is_believed_longer_each_time_until_it_serves() -> None:
    health, now, times = EndpointHealth(POLICY, full_seconds=1.0), 0.0, []
    for _ in range(5):
        health.full("a", now=now)
        times.append(health.full_until(now=now)["a"] - now)
        now += times[-1]
    assert times == [1.0, 2.0, 4.0, 8.0, 8.0]
    health.note("a", failed=False, now=now)
    health.full("a", now=now)
    assert health.full_until(now=now) == {"a": now + 1.0}


def test_how_long_it_says_is_bounded_and_nonsense_is_not_believed() -> None:
    health = EndpointHealth(POLICY, full_seconds=1.0)
    for name, seconds in (("a", 1e9), ("b", float("nan")), ("c", -5.0), ("d", 0.0)):
        health.full(name, now=0.0, seconds=seconds)
    assert health.full_until(now=-1.0) == {"a": LONGEST_FULL_SECONDS, "b": 1.0, "c": 1.0, "d": 0.0}


def test_a_full_endpoint_that_is_another_process_is_not_full() -> None:
    health = EndpointHealth(POLICY)
    health.full("a", now=0.0)
    health.restarted("a")
    assert health.full_until(now=0.0) == {}
