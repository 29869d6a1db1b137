"""How many requests a pod runs at a time is learned while others wait, and follows what it shows."""

import pytest

from extproc.pods.endpoint_samples import RunningLimit
from tests.unit.extproc_choosing.pick_candidates import load


def report(watch: RunningLimit, *, running: int, waiting: int, starts: int = 1, times: int = 1) -> None:
    for _ in range(times):
        counted = load(running_requests=running, waiting_requests=waiting, first_token_count=100)
        watch.report(counted, seconds=0.2, starts=starts)


def test_nothing_is_learned_while_nobody_waits_or_only_for_a_moment() -> None:
    watch = RunningLimit()
    report(watch, running=50, waiting=0, starts=10, times=20)
    report(watch, running=3, waiting=9)
    report(watch, running=3, waiting=0)
    assert (watch.limit, watch.busy_starts_a_second) == (None, None)


def test_requests_that_start_at_the_next_step_do_not_wait() -> None:
    watch = RunningLimit()
    report(watch, running=4, waiting=1, starts=10, times=50)  # 50 a second
    assert watch.limit is None


def test_the_limit_is_what_runs_while_others_wait_and_the_queue_moves_as_fast_as_they_start() -> None:
    watch = RunningLimit()
    report(watch, running=16, waiting=9, starts=4, times=10)
    assert watch.limit == 16.0
    assert watch.busy_starts_a_second == pytest.approx(20.0)


def test_a_limit_that_the_pod_exceeds_was_none() -> None:
    watch = RunningLimit()
    report(watch, running=3, waiting=5, times=2)
    for running in (6, 9, 12):
        report(watch, running=running, waiting=0)
        assert watch.limit == pytest.approx(running, rel=0.05)


def test_a_pod_that_is_short_of_memory_runs_fewer_and_the_limit_follows_within_seconds() -> None:
    watch = RunningLimit()
    report(watch, running=64, waiting=5, times=2)
    report(watch, running=8, waiting=5, times=10)
    assert watch.limit == pytest.approx(36.0, rel=0.2)
    report(watch, running=8, waiting=5, times=50)
    assert watch.limit == pytest.approx(8.0, rel=0.2)
    report(watch, running=0, waiting=5, times=500)
    assert watch.limit == pytest.approx(1.0)


def test_what_usually_runs_fades() -> None:
    watch = RunningLimit()
    report(watch, running=40, waiting=0)
    report(watch, running=2, waiting=0, times=150)
    assert watch.most_running == pytest.approx(20.0, rel=0.05)


def test_a_pod_that_counts_no_first_tokens_does_not_look_as_if_it_started_none() -> None:
    limit = RunningLimit()
    for _ in range(20):
        limit.report(load(waiting_requests=5, running_requests=4), seconds=0.2, starts=0)
    assert limit.busy_starts_a_second is None


def test_a_limit_grows_while_nobody_waits_until_it_is_none() -> None:
    watch = RunningLimit()
    report(watch, running=4, waiting=5, times=2)
    for running in (4, 4, 5, 5, 5, 6, 6, 6, 7, 7, 7, 8, 8, 8, 9):  # 3 s, in which it is reached
        report(watch, running=running, waiting=0)
    assert watch.limit == pytest.approx(9.5, abs=0.7)
    report(watch, running=9, waiting=5, times=50)
    assert watch.limit == pytest.approx(9.0, rel=0.01)
    report(watch, running=3, waiting=0, times=150)
    assert watch.limit is None


def test_a_moment_in_which_nobody_waits_at_a_busy_pod_does_not_raise_its_limit() -> None:
    watch = RunningLimit()
    report(watch, running=16, waiting=5, times=2)
    report(watch, running=13, waiting=0, times=15)
    assert watch.limit == 16.0


def test_a_limit_outlives_any_pause_between_two_reports() -> None:
    watch = RunningLimit()
    report(watch, running=4, waiting=5, times=2)
    watch.report(load(running_requests=4), seconds=1e9, starts=1)
    assert watch.limit is None
