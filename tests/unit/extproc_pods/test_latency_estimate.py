"""What a request must expect is learned from what pods count, within bounds, and forgotten when nothing confirms it."""

from collections.abc import Callable
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from extproc.pods.endpoint import EndpointTrend
from extproc.pods.latency_estimate import LatencyEstimates
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import load

IDLE = load()
STEP = 0.2  # seconds between reports


class Pod:
    """Counts what it did, as a pod does, and reports every STEP seconds."""

    def __init__(self, estimates: LatencyEstimates, endpoint: str = "a", *, at: float = 0.0) -> None:
        self.estimates, self.endpoint, self.now, self.load = (
            estimates,
            endpoint,
            at,
            structs.replace(IDLE, reported_at=at),
        )
        estimates.report(endpoint, self.load, now=at)

    def served(
        self, prompts: int, *, tokens: int, seconds: float, ttft: float | None = None, **values: Any
    ) -> EndpointLoad:
        """Report that so many prompts of so many uncached tokens took so long each since the last report."""
        was = self.load
        self.now += STEP
        self.load = structs.replace(
            was,
            prefill_count=was.prefill_count + prompts,
            prefill_seconds_sum=was.prefill_seconds_sum + prompts * seconds,
            prefill_computed_tokens=was.prefill_computed_tokens + prompts * tokens,
            prefix_query_tokens=was.prefix_query_tokens + prompts * tokens,
            first_token_count=was.first_token_count + prompts,
            first_token_seconds_sum=was.first_token_seconds_sum + prompts * (seconds if ttft is None else ttft),
            **{"reported_at": self.now, "waiting_requests": 0, "running_requests": 0} | values,
        )
        self.estimates.report(self.endpoint, self.load, now=self.now)
        return self.load

    def for_seconds(self, seconds: float, report: Callable[[], object]) -> None:
        until = self.now + seconds
        while self.now < until:
            report()


def ttft(estimates: LatencyEstimates, tokens: float, *, endpoint: str = "a", **values: float) -> float:
    return estimates.ttft(endpoint, **({"backlog_tokens": 0.0, "uncached_tokens": tokens} | values))


def test_before_anything_is_known_the_policys_rate_counts_and_a_first_step() -> None:
    estimates = LatencyEstimates(tokens_per_second=10_000.0)
    assert ttft(estimates, 1000.0) == pytest.approx(0.12)
    assert ttft(estimates, 1000.0, backlog_tokens=5000.0) == pytest.approx(0.62)
    assert (estimates.pace("a").inter_token_seconds, estimates.tokens_per_second("a"), estimates.errors()) == (
        None,
        None,
        {},
    )


def test_short_and_long_prompts_together_tell_the_fixed_time_and_the_time_a_token() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    for _ in range(100):  # 50 ms and 20,000 tokens a second
        pod.served(1, tokens=100, seconds=0.055)
        pod.served(1, tokens=2000, seconds=0.15)
    assert ttft(estimates, 100.0) == pytest.approx(0.055, rel=0.15)
    assert ttft(estimates, 2000.0) == pytest.approx(0.15, rel=0.15)
    assert estimates.tokens_per_second("a") == pytest.approx(20_000.0, rel=0.25)


def test_prompts_that_share_their_steps_do_not_make_the_pod_look_slower_than_its_clock() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    # 16 prompts of 100 tokens in each fifth of a second, all of which took it whole: 8,000 tokens a second
    pod.for_seconds(20.0, lambda: pod.served(16, tokens=100, seconds=0.2))
    assert ttft(estimates, 100.0, backlog_tokens=7900.0) < 1.3


def test_a_slower_pod_is_told_from_a_faster_one_and_a_new_one_is_taken_for_the_middle() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pods = {rate: Pod(estimates, f"pod-{rate}") for rate in (2500, 5000, 16_000)}
    for _ in range(300):
        for rate, pod in pods.items():
            pod.served(1, tokens=1000, seconds=1000 / rate)
    slow, middle, fast = (ttft(estimates, 1000.0, endpoint=f"pod-{rate}") for rate in pods)
    # what takes longer than there is time for is taken for prompts that shared their steps
    assert slow == pytest.approx(0.2, rel=0.1)
    assert middle == pytest.approx(0.2, rel=0.1)
    assert fast == pytest.approx(1 / 16, rel=0.2)
    assert ttft(estimates, 1000.0, endpoint="new") == pytest.approx(middle, rel=0.1)


def test_a_trend_tells_where_no_prefill_times_are_counted() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    Pod(estimates)
    estimates.trend("a", EndpointTrend(prefill_tokens_per_second=1000.0))
    estimates.age(now=10.0)
    assert ttft(estimates, 1000.0) == pytest.approx(1.02)


def test_computed_tokens_that_a_pod_does_not_count_are_those_not_found_in_its_cache() -> None:
    estimates = LatencyEstimates(tokens_per_second=1000.0)
    now, counted = 0.0, IDLE
    for _ in range(100):
        estimates.report("a", counted, now=now)
        now += 1.0
        counted = structs.replace(
            counted,
            reported_at=now,
            prefix_query_tokens=counted.prefix_query_tokens + 5000,
            prefix_hit_tokens=counted.prefix_hit_tokens + 1000,
            prefill_count=counted.prefill_count + 1,
            prefill_seconds_sum=counted.prefill_seconds_sum + 0.4,
        )
    assert ttft(estimates, 4000.0) == pytest.approx(0.4, rel=0.05)


def test_a_queue_is_worked_off_as_fast_as_requests_started_while_others_waited() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    # 5 starts a second: places are short, not prefill
    pod.for_seconds(5.0, lambda: pod.served(1, tokens=10, seconds=0.02, waiting_requests=20, running_requests=4))
    assert ttft(estimates, 10.0, waiting_requests=20.0) == pytest.approx(4.0, rel=0.1)
    assert estimates.drain_seconds(100.0, 50) == pytest.approx(10.0, rel=0.1)
    pace = estimates.pace("a")
    assert (pace.running_limit, pace.most_running, estimates.most_running) == (4.0, 4.0, 4.0)


def test_the_pool_drains_by_all_its_endpoints_or_by_those_that_may_serve() -> None:
    estimates = LatencyEstimates(tokens_per_second=1000.0)
    assert estimates.drain_seconds(4000.0, 1) == pytest.approx(4.0)
    assert estimates.drain_seconds(4000.0, 1, endpoints=["a", "b"]) == pytest.approx(2.0)
    for name in "abcd":
        Pod(estimates, name)
    assert estimates.drain_seconds(4000.0, 1) == pytest.approx(1.0)
    assert estimates.drain_seconds(0.0, 0) == 0.0


def test_the_time_between_tokens_is_the_mean_of_the_last_seconds() -> None:
    estimates = LatencyEstimates()
    estimates.report("a", IDLE, now=0.0)
    few = structs.replace(IDLE, reported_at=1.0, inter_token_count=10, inter_token_seconds_sum=5.0)
    estimates.report("a", few, now=1.0)
    assert estimates.pace("a").inter_token_seconds is None
    many = structs.replace(IDLE, reported_at=2.0, inter_token_count=1010, inter_token_seconds_sum=25.0)
    estimates.report("a", many, now=2.0)
    assert estimates.pace("a").inter_token_seconds == pytest.approx(0.025, rel=0.2)


def test_an_estimate_that_nothing_confirms_drifts_back_so_that_shedding_ends() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    pod.for_seconds(60.0, lambda: pod.served(1, tokens=10, seconds=0.2, ttft=9.0))
    slow = ttft(estimates, 1000.0)
    pod.for_seconds(180.0, lambda: pod.served(0, tokens=0, seconds=0.0))
    assert slow > 0.3
    assert ttft(estimates, 1000.0) == pytest.approx(0.145, rel=0.2)


def test_one_outlier_changes_the_estimate_a_little() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    pod.for_seconds(30.0, lambda: pod.served(1, tokens=1000, seconds=0.1))
    before = ttft(estimates, 1000.0)
    pod.served(1, tokens=1000, seconds=500.0)
    assert ttft(estimates, 1000.0) < before * 2.0


def test_the_error_is_what_was_promised_less_what_came() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    for _ in range(5):
        estimates.promised("a", seconds=0.3)
        pod.served(1, tokens=100, seconds=0.05, ttft=0.7)
    pod.served(0, tokens=0, seconds=0.0)
    errors = estimates.errors()
    assert errors["a"].mean_seconds == pytest.approx(0.4)
    assert errors["a"].bias_seconds == pytest.approx(-0.4)
    assert errors["a"].samples == 5


def test_a_backlog_that_delays_nobody_counts_less_and_only_while_this_is_seen() -> None:
    estimates = LatencyEstimates(tokens_per_second=10_000.0)
    pod = Pod(estimates)
    pod.for_seconds(20.0, lambda: pod.served(3, tokens=500, seconds=0.05))
    before = ttft(estimates, 500.0, backlog_tokens=5000.0)

    def better_than_promised() -> None:
        estimates.promised("a", seconds=before)
        pod.served(3, tokens=500, seconds=0.05)

    pod.for_seconds(20.0, better_than_promised)
    assert ttft(estimates, 500.0, backlog_tokens=5000.0) < 0.5 * before
    assert ttft(estimates, 500.0) == pytest.approx(0.05, rel=0.1)  # of its own work nothing
    pod.for_seconds(60.0, lambda: pod.served(3, tokens=500, seconds=0.05))
    assert ttft(estimates, 500.0, backlog_tokens=5000.0) == pytest.approx(before, rel=0.1)


def test_another_process_begins_anew_and_one_that_is_gone_is_forgotten() -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    pod = Pod(estimates)
    pod.for_seconds(10.0, lambda: pod.served(5, tokens=100, seconds=0.01, waiting_requests=9, running_requests=3))
    estimates.report(
        "a", structs.replace(IDLE, reported_at=pod.now + 1.0), now=pod.now + 1.0
    )  # counters at 0: no negative sums
    assert isfinite(ttft(estimates, 100.0))
    estimates.forget("a")
    assert (estimates.errors(), estimates.pace("a").running_limit) == ({}, None)
    estimates.promised("a", seconds=1.0)  # it is not known any more: nothing happens


COUNTS = st.integers(min_value=0, max_value=10**15)
SECONDS = st.floats(min_value=0, max_value=1e15, allow_nan=False)
REPORTS = st.builds(
    EndpointLoad,
    waiting_requests=COUNTS,
    running_requests=COUNTS,
    kv_usage=st.floats(0, 1),
    prefix_hit_tokens=COUNTS,
    prefix_query_tokens=COUNTS,
    reported_at=st.floats(0, 1e6),
    inter_token_seconds_sum=SECONDS,
    inter_token_count=COUNTS,
    prefill_seconds_sum=SECONDS,
    prefill_count=COUNTS,
    prefill_computed_tokens=COUNTS,
    first_token_seconds_sum=SECONDS,
    first_token_count=COUNTS,
)


@pytest.mark.thorough
@settings(max_examples=200)
@given(
    reports=st.lists(st.tuples(st.sampled_from("ab"), REPORTS), max_size=12),
    asked=st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e6)),
)
def test_whatever_pods_report_every_estimate_is_a_number_that_is_not_negative(
    reports: list[tuple[str, EndpointLoad]],
    asked: tuple[float, float, float],
) -> None:
    estimates = LatencyEstimates(tokens_per_second=8000.0)
    now = 0.0
    for endpoint, reported in reports:
        now = max(now, reported.reported_at)
        estimates.promised(endpoint, seconds=reported.prefill_seconds_sum)
        estimates.report(endpoint, reported, now=now)
    backlog, uncached_tokens, waiting = asked
    for endpoint in "abc":
        expected = estimates.ttft(
            endpoint, backlog_tokens=backlog, uncached_tokens=uncached_tokens, waiting_requests=waiting
        )
        assert isfinite(expected)
        assert 0.0 <= expected <= 1e6
        # more work is never expected to take less time
        assert expected <= estimates.ttft(
            endpoint, backlog_tokens=backlog + 1, uncached_tokens=uncached_tokens, waiting_requests=waiting + 1
        )
        inter_token = estimates.pace(endpoint).inter_token_seconds
        assert inter_token is None or (isfinite(inter_token) and inter_token >= 0.0)
    drained = estimates.drain_seconds(backlog, int(waiting))
    assert isfinite(drained)
    assert 0.0 <= drained <= 1e6
    assert all(isfinite(error.mean_seconds) and isfinite(error.bias_seconds) for error in estimates.errors().values())
