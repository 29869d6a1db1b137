"""What a pod that always has prompts computes in a second prices its backlog; what an idle one does, does not."""

import pytest

from extproc.pods.endpoint import EndpointTrend
from extproc.pods.endpoint_samples import EndpointSamples, Pace
from extproc.pods.latency_estimate import LatencyEstimates
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import load

STEP = 0.2  # seconds between reports
POOL = Pace(base_seconds=0.02, seconds_a_token=1e-5)  # others compute 100,000 tokens a second


class Pod:
    """Counts as a pod does that computes prompts of 100 tokens."""

    def __init__(self) -> None:
        self.now = self.tokens = 0.0
        self.prompts = self.computed = 0
        self.counts_computed = True  # as newer versions of vLLM
        self.prefill_seconds = 0.0

    def load(self) -> EndpointLoad:
        return load(
            reported_at=self.now,
            prefill_count=self.prompts,
            prefill_seconds_sum=self.prefill_seconds,
            prefill_computed_tokens=self.computed if self.counts_computed else 0,
            prefix_query_tokens=self.computed,
            first_token_count=self.prompts,
            first_token_seconds_sum=self.prefill_seconds,
        )

    def loads(self, seconds: float, *, rate: float, busy: float) -> list[EndpointLoad]:
        """Report for so long that it computes `rate` tokens a second, `busy` seconds of prefill in each."""
        made = []
        for _ in range(round(seconds / STEP)):
            self.now += STEP
            self.tokens += rate * STEP
            self.prompts = round(self.tokens / 100)
            self.computed = 100 * self.prompts
            self.prefill_seconds += busy * STEP
            made.append(self.load())
        return made


class Samples:
    """One pod's samples, told what the pod counts."""

    def __init__(self) -> None:
        self.pod, self.samples = Pod(), EndpointSamples()
        self.samples.report(self.pod.load(), prior=POOL)

    def compute(self, seconds: float, *, rate: float, busy: float) -> None:
        for each in self.pod.loads(seconds, rate=rate, busy=busy):
            self.samples.report(each, prior=POOL)

    @property
    def backlog_rate(self) -> float:
        return 1.0 / self.samples.pace(POOL).backlog_seconds_a_token


@pytest.mark.parametrize("busy", [1.0, 16.0], ids=["one after another", "in shared steps"])
def test_a_pod_that_computes_prompts_all_the_time_is_priced_at_its_own_peak_throughput(busy: float) -> None:
    it = Samples()
    it.compute(20.0, rate=8000, busy=busy)
    assert it.samples.busy_share == pytest.approx(1.0)
    assert it.backlog_rate == pytest.approx(8000.0)


def test_a_pod_that_computes_prompts_half_of_the_time_is_not_priced_at_its_peak_throughput() -> None:
    it = Samples()
    it.compute(20.0, rate=8000, busy=0.5)
    assert it.samples.peak == pytest.approx(16_000.0)  # a busy second
    assert it.samples.busy_share == 0.0
    assert it.backlog_rate > 12_000


@pytest.mark.parametrize(("busy", "share"), [(0.85, 0.0), (0.925, 0.5), (1.0, 1.0)])
def test_the_busier_a_pod_is_the_more_its_peak_throughput_tells(busy: float, share: float) -> None:
    it = Samples()
    it.compute(20.0, rate=8000, busy=busy)
    assert it.samples.busy_share == pytest.approx(share, abs=1e-6)


def test_a_pod_that_computes_less_while_it_is_busy_is_priced_at_its_best_which_fades_by_half_in_10_seconds() -> None:
    it = Samples()
    it.compute(20.0, rate=8000, busy=16.0)
    it.compute(5.0, rate=2000, busy=16.0)
    assert it.backlog_rate == pytest.approx(8000 * 0.5**0.5)
    it.compute(5.0, rate=2000, busy=16.0)
    assert it.backlog_rate == pytest.approx(4000.0)
    it.compute(60.0, rate=2000, busy=16.0)
    assert it.backlog_rate == pytest.approx(2000.0, rel=0.01)  # and never below what it computes


def test_the_peak_does_not_fade_while_nothing_is_computed() -> None:
    it = Samples()
    it.compute(20.0, rate=8000, busy=1.0)
    assert it.samples.peak == pytest.approx(8000.0)
    it.compute(30.0, rate=0, busy=0.0)
    it.pod.now += 30.0
    it.samples.report(it.pod.load(), prior=POOL)
    assert it.samples.peak == pytest.approx(8000.0)


@pytest.mark.parametrize("busy", [1.0, 16.0], ids=["one after another", "in shared steps"])
def test_a_load_that_rises_after_a_calm_time_is_priced_within_seconds_at_what_the_pod_computes(busy: float) -> None:
    it = Samples()
    it.compute(60.0, rate=2000, busy=0.25)  # a quarter of the time, as fast as later
    it.compute(3.0, rate=8000, busy=busy)
    assert it.samples.peak == pytest.approx(8000.0, rel=0.05)


def test_a_pod_that_counts_tokens_when_they_begin_is_priced_by_the_clock() -> None:
    it = Samples()
    it.pod.counts_computed = False
    it.compute(20.0, rate=2000, busy=0.6)
    it.compute(3.0, rate=8000, busy=0.0)  # these prompts begin, and none of them has ended
    assert it.samples.peak < 8000.0


def test_the_time_of_long_prompts_beside_short_ones_is_counted_once() -> None:
    it = Samples()
    for _ in range(60):  # one of 4,000 tokens takes half a second, and two of 100 end meanwhile
        for prompts, tokens, took in ((1, 100, 0.1), (1, 100, 0.1), (0, 0, 0.0), (1, 4000, 0.55)):
            it.pod.now += 0.15
            it.pod.prompts += prompts
            it.pod.computed += tokens
            it.pod.prefill_seconds += took
            it.samples.report(it.pod.load(), prior=POOL)
    assert it.samples.peak == pytest.approx(4200 / 0.6, rel=0.1)


@pytest.mark.parametrize(
    ("seconds", "rate"), [(2.0, 8000), (20.0, 100)], ids=["in too short a time", "of too few tokens"]
)
def test_a_burst_or_a_trickle_is_no_peak(seconds: float, rate: float) -> None:
    it = Samples()
    it.compute(seconds, rate=rate, busy=16.0)
    assert (it.samples.peak, it.samples.busy_share) == (0.0, 0.0)


def estimated(*, busy: float, trend: float | None) -> float | None:
    """Return what is expected of a pod that computes 8,000 tokens a second for 20 seconds."""
    estimates, pod = LatencyEstimates(tokens_per_second=100_000.0), Pod()
    estimates.report("a", pod.load(), now=0.0)
    estimates.trend("a", EndpointTrend(prefill_tokens_per_second=trend))
    for each in pod.loads(20.0, rate=8000, busy=busy):
        estimates.report("a", each, now=each.reported_at)
    return estimates.tokens_per_second("a")


def test_the_rate_of_a_pod_that_is_always_busy_is_its_peak_whatever_its_trend_was() -> None:
    assert estimated(busy=16.0, trend=2000.0) == pytest.approx(8000.0)
    assert estimated(busy=16.0, trend=None) == pytest.approx(8000.0)


def test_the_rate_of_a_pod_that_is_busy_half_of_the_time_is_its_trend_or_else_its_price() -> None:
    assert estimated(busy=0.5, trend=2000.0) == 2000.0
    without = estimated(busy=0.5, trend=None)
    assert without is not None
    assert without > 12_000


def test_the_rate_of_a_pod_that_is_almost_always_busy_lies_between_its_trend_and_its_peak() -> None:
    assert estimated(busy=0.925, trend=2000.0) == pytest.approx((2000 + 8000 / 0.925) / 2)
