"""Histograms of many pods, of several versions, that restart, are one histogram of what was observed."""

from bisect import bisect_left
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answers.latency_history import LatencyHistory
from extproc.ledger.endpoint_telemetry import PodLatencies
from extproc.ledger.metrics import OTHER
from kvmesh.metrics.metric import histogram as declared
from kvmesh.metrics.registry import Family, Histogram
from kvmesh.pods.pod_report import PodHistogram

BOUNDS = (0.1, 0.5, 1.0)
NOW = 30.0  # monotonic seconds


def histogram(*counts: float, seconds: float = 0.0, bounds: tuple[float, ...] = BOUNDS) -> PodHistogram:
    """Make one of counts by bucket."""
    return PodHistogram(bounds=(*bounds, inf), counts=tuple(accumulate(counts)), seconds=seconds)


class Latencies(PodLatencies):
    """With what comes out of them."""

    def __init__(self, *, most_models: int = 100) -> None:
        self.family = Family(declared("latency_seconds", "A latency.", "model", "role", bounds=BOUNDS), Histogram)
        self.history = LatencyHistory(BOUNDS)
        super().__init__(self.family, history=self.history, most_models=most_models)


def counted(latencies: Latencies) -> tuple[list[float], float]:
    merged = latencies.family.of("m", "both")
    return merged.counts, merged.sum


def test_what_a_pod_had_counted_before_it_was_seen_does_not_count() -> None:
    latencies = Latencies()
    latencies.report("a", {"m": histogram(5, 5, 5, 5, seconds=9.0)}, role="both", now=NOW)
    assert counted(latencies) == ([0, 0, 0, 0], 0.0)
    latencies.report("a", {"m": histogram(5, 6, 5, 7, seconds=12.5)}, role="both", now=NOW)
    assert counted(latencies) == ([0, 1, 0, 2], 3.5)


def test_what_has_come_between_two_reports_is_of_the_slice_in_which_it_was_read() -> None:
    latencies = Latencies()
    for seconds, counts in ((0.0, (9, 0, 0, 0)), (5.0, (9, 4, 0, 0)), (15.0, (9, 4, 2, 0))):
        for pod in ("a", "b"):
            latencies.report(pod, {"m": histogram(*counts)}, role="both", now=NOW + seconds)
    spreads = latencies.history.spreads(("m", "both"), now=NOW + 15.0)
    assert [each and each.observed for each in spreads[-3:]] == [None, 8, 4]
    assert [each and each.p50 for each in spreads[-2:]] == pytest.approx([0.3, 0.75])


def test_counters_that_begin_anew_count_from_zero() -> None:
    latencies = Latencies()
    latencies.report("a", {"m": histogram(5, 5, 0, 0, seconds=9.0)}, role="both", now=NOW)
    latencies.report("a", {"m": histogram(1, 0, 0, 0, seconds=0.05)}, role="both", now=NOW)
    assert counted(latencies) == ([1, 0, 0, 0], 0.05)


def test_a_process_known_to_be_new_counts_from_zero_however_much_it_has_counted() -> None:
    latencies = Latencies()
    latencies.report("a", {"m": histogram(1, 0, 0, 0, seconds=0.1)}, role="both", now=NOW)
    latencies.restarted("a")
    latencies.report("a", {"m": histogram(9, 0, 0, 0, seconds=0.5)}, role="both", now=NOW)
    assert counted(latencies) == ([9, 0, 0, 0], 0.5)


def test_a_pod_that_comes_back_after_it_was_gone_is_seen_for_the_first_time() -> None:
    latencies = Latencies()
    for _ in range(2):
        latencies.report("a", {"m": histogram(3, 0, 0, 0)}, role="both", now=NOW)
        latencies.forget("a")
    assert counted(latencies) == ([0, 0, 0, 0], 0.0)


def test_a_model_that_a_pod_begins_to_show_counts_from_zero() -> None:
    latencies = Latencies()
    latencies.report("a", {}, role="both", now=NOW)
    latencies.report("a", {"m": histogram(0, 2, 0, 0, seconds=0.6)}, role="both", now=NOW)
    assert counted(latencies) == ([0, 2, 0, 0], 0.6)


def test_other_buckets_go_to_the_next_longer_one_of_ours() -> None:
    latencies = Latencies()
    theirs = (0.05, 0.2, 0.7, 5.0)
    latencies.report("a", {"m": histogram(0, 0, 0, 0, 0, bounds=theirs)}, role="both", now=NOW)
    latencies.report("a", {"m": histogram(1, 2, 4, 8, 16, bounds=theirs)}, role="both", now=NOW)
    assert counted(latencies)[0] == [1, 2, 4, 24]


def test_roles_are_counted_apart() -> None:
    latencies = Latencies()
    for pod, role in (("a", "prefill"), ("b", "decode")):
        latencies.report(pod, {"m": histogram(0, 0, 0, 0)}, role=role, now=NOW)
        latencies.report(pod, {"m": histogram(1, 0, 0, 0)}, role=role, now=NOW)
    assert {labels: merged.counts for labels, merged in latencies.family.series.items()} == {
        ("m", "prefill"): [1, 0, 0, 0],
        ("m", "decode"): [1, 0, 0, 0],
    }


def test_models_beyond_the_bound_are_one() -> None:
    latencies = Latencies(most_models=3)
    names = [f"m{i}" for i in range(50)]
    latencies.report("a", {name: histogram(0, 0, 0, 0) for name in names}, role="both", now=NOW)
    latencies.report("a", {name: histogram(1, 0, 0, 0) for name in names}, role="both", now=NOW)
    assert {model: merged.counts[0] for (model, _), merged in latencies.family.series.items()} == {
        "m0": 1,
        "m1": 1,
        "m2": 1,
        OTHER: 47,
    }


SECONDS = st.floats(0.0, 2.0)


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.booleans(), st.lists(SECONDS, max_size=5)),
        max_size=30,
    )
)
def test_all_that_pods_observe_between_looks_is_counted_once(looks: list[tuple[str, bool, list[float]]]) -> None:
    """A restart is either told, or seen in the counters where these fall; each pod was seen at zero first."""
    latencies = Latencies()
    since_start: dict[str, list[float]] = {pod: [] for pod in "abc"}
    expected: list[float] = []
    for pod in since_start:
        latencies.report(pod, {"m": histogram(0, 0, 0, 0)}, role="both", now=NOW)
    for pod, restarts, observed in looks:
        if restarts:
            since_start[pod] = []
            latencies.restarted(pod)
        since_start[pod] += observed
        expected += observed
        latencies.report(pod, {"m": of(since_start[pod])}, role="both", now=NOW)
    counts, seconds = counted(latencies)
    assert counts == in_buckets(expected)
    assert abs(seconds - sum(expected)) < 1e-6


def in_buckets(observed: list[float]) -> list[float]:
    counts = [0.0] * (len(BOUNDS) + 1)
    for seconds in observed:
        counts[bisect_left(BOUNDS, seconds)] += 1
    return counts


def of(observed: list[float]) -> PodHistogram:
    return histogram(*in_buckets(observed), seconds=sum(observed))
