"""Percentiles slice by slice: near the truth, of the last minutes alone, and in bounded memory."""

import random
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answers.latency_history import OTHER, TTFT_BOUNDS, LatencyHistory, Spread

CHAT, BATCH = ("chat", "m"), ("batch", "m")


def test_slices_are_the_oldest_first_and_empty_ones_are_none() -> None:
    history = LatencyHistory(TTFT_BOUNDS, slice_seconds=15.0, slices=4)
    history.add(CHAT, 0.2, now=16.0)
    history.add(CHAT, 0.4, now=44.9)
    assert history.spreads(CHAT, now=59.0) == [
        None,
        Spread(observed=1, p50=0.2, p95=0.2, p99=0.2),
        Spread(observed=1, p50=0.4, p95=0.4, p99=0.4),
        None,
    ]
    assert history.spreads(BATCH, now=59.0) == [None] * 4


def test_what_is_older_than_all_slices_is_forgotten() -> None:
    history = LatencyHistory(TTFT_BOUNDS, slice_seconds=15.0, slices=4)
    history.add(CHAT, 0.2, now=0.0)
    history.add(BATCH, 0.3, now=30.0)
    assert history.known(now=59.9) == [CHAT, BATCH]
    assert history.whole(CHAT, now=60.0) is None
    assert history.known(now=60.0) == [BATCH]
    assert history.known(now=90.0) == []


def test_one_that_stands_for_many_counts_as_many() -> None:
    history = LatencyHistory(TTFT_BOUNDS)
    for seconds in (0.1, 0.2, 0.3):
        history.add(CHAT, seconds, weight=1.0, now=1.0)
    history.add(CHAT, 5.0, weight=50.0, now=1.0)
    whole = history.whole(CHAT, now=1.0)
    assert whole is not None
    assert whole.observed == 4
    assert whole.p50 > 4.0


def test_counts_by_bucket_are_interpolated_and_the_last_bucket_has_no_more_than_its_bound() -> None:
    history = LatencyHistory((0.1, 0.5, 1.0))
    history.add_counts(CHAT, [(1, 10.0)], now=1.0)
    whole = history.whole(CHAT, now=1.0)
    assert whole is not None
    assert (whole.p50, whole.p95, whole.p99) == pytest.approx((0.3, 0.48, 0.496))
    history.add_counts(CHAT, [(3, 90.0)], now=2.0)
    whole = history.whole(CHAT, now=2.0)
    assert whole is not None
    assert (whole.p50, whole.p99) == (1.0, 1.0)


def test_nothing_observed_is_no_series() -> None:
    history = LatencyHistory((0.1, 0.5))
    history.add_counts(CHAT, [(0, 0.0), (1, 0.0)], now=1.0)
    history.add_counts(BATCH, [], now=1.0)
    history.add_counts(BATCH, [(0, float("inf")), (1, float("nan"))], now=1.0)
    assert history.known(now=1.0) == []


def test_series_beyond_the_bound_are_one_until_there_is_a_place() -> None:
    history = LatencyHistory(TTFT_BOUNDS, slice_seconds=15.0, slices=4, most_series=2)
    for name in ("a", "b", "c", "d"):
        history.add((name, "m"), 0.1, now=1.0)
    assert set(history.known(now=1.0)) == {("a", "m"), ("b", "m"), OTHER}
    history.add(("e", "m"), 0.1, now=100.0)  # the others are over
    assert history.known(now=100.0) == [("e", "m")]


def test_a_percentile_changes_with_what_comes_after_it_was_asked_for() -> None:
    history = LatencyHistory(TTFT_BOUNDS)
    history.add(CHAT, 0.1, now=1.0)
    assert history.spreads(CHAT, now=1.0)[-1] == Spread(observed=1, p50=0.1, p95=0.1, p99=0.1)
    history.add(CHAT, 9.0, now=2.0)
    last = history.spreads(CHAT, now=2.0)[-1]
    assert last is not None
    assert last.p99 == 9.0


@given(st.lists(st.floats(min_value=0.001, max_value=60.0), min_size=1, max_size=300), st.floats(0.0, 1e6))
def test_percentiles_are_ordered_and_within_what_was_seen(times: list[float], now: float) -> None:
    history = LatencyHistory(TTFT_BOUNDS)
    for seconds in times:
        history.add(CHAT, seconds, now=now)
    whole = history.whole(CHAT, now=now)
    assert whole is not None
    assert whole.observed == len(times)
    assert min(times) <= whole.p50 <= whole.p95 <= whole.p99 <= max(times)


def test_percentiles_are_within_a_tenth_of_the_truth() -> None:
    dice = random.Random(7)
    times = [dice.lognormvariate(-1.2, 0.8) for _ in range(5000)]
    history = LatencyHistory(TTFT_BOUNDS)
    for seconds in times:
        history.add(CHAT, seconds, now=1.0)
    whole, truth = history.whole(CHAT, now=1.0), quantiles(times, n=100)
    assert whole is not None
    for found, exact in ((whole.p50, truth[49]), (whole.p95, truth[94]), (whole.p99, truth[98])):
        assert abs(found / exact - 1.0) < 0.1
