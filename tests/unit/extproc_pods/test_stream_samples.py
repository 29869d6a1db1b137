"""What reports show of an endpoint's streams, window by window."""

from typing import Any

import pytest

from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.stream_samples import StreamSamples
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import load

ALONE, STREAM, PROMPT = 0.01, 0.0005, 1e-4
CAPACITY = 100_000


class Reports:
    """A pod that reports every 200 ms while `running` streams run beside prompts of so many tokens a second."""

    def __init__(self) -> None:
        self.at, self.tokens, self.seconds, self.queried, self.preemptions = 0.0, 0.0, 0.0, 0.0, 0
        self.last = self._load(0)

    def go_on(self, seconds: float, *, running: int, prompts_a_second: float = 0.0) -> list[EndpointLoad]:
        found = []
        for _ in range(round(seconds / 0.2)):
            self.at += 0.2
            # a step of t seconds computes prompts_a_second x t tokens: t = decoding + PROMPT x those
            step = (ALONE + STREAM * running) / (1.0 - PROMPT * prompts_a_second)
            self.tokens += running * 0.2 / step
            self.seconds += running * 0.2
            self.queried += 0.2 * prompts_a_second
            found.append(self._load(running))
        return found

    def _load(self, running: int, **values: Any) -> EndpointLoad:
        return load(
            running_requests=running,
            kv_usage=running / 100,
            kv_capacity_tokens=CAPACITY,
            reported_at=self.at,
            inter_token_count=round(self.tokens),
            inter_token_seconds_sum=self.seconds,
            prefix_query_tokens=round(self.queried),
            preemptions=self.preemptions,
            **values,
        )


def estimates_of(*parts: tuple[float, int, float]) -> tuple[LatencyEstimates, Reports]:
    estimates, pod = LatencyEstimates(), Reports()
    for seconds, running, prompts in parts:
        for report in pod.go_on(seconds, running=running, prompts_a_second=prompts):
            estimates.report("a", report, now=report.reported_at)
    return estimates, pod


def test_what_one_more_stream_costs_is_learned_from_reports_that_differ() -> None:
    estimates, _ = estimates_of((5, 4, 0.0), (5, 16, 0.0), (5, 8, 0.0))
    streams = estimates.pace("a").streams
    assert streams is not None
    for running in (1, 8, 24):
        seconds = streams.seconds(running, 1000.0 * running)
        assert seconds == pytest.approx(ALONE + STREAM * running, rel=0.07)


def test_nothing_is_known_while_all_reports_are_alike_or_of_an_idle_pod() -> None:
    for parts in ([(20.0, 8, 0.0)], [(20.0, 0, 0.0)], [(5.0, 0, 0.0), (5.0, 3, 0.0)]):
        assert estimates_of(*parts)[0].pace("a").streams is None, parts


def test_a_pod_that_was_not_seen_yet_is_taken_for_the_others_of_its_pool() -> None:
    estimates, pod = estimates_of((5, 4, 0.0), (5, 16, 0.0))
    for report in Reports().go_on(3, running=2):
        estimates.report("b", report, now=pod.at + report.reported_at)
    known, other = estimates.pace("a").streams, estimates.pace("b").streams
    assert known is not None and other is not None
    assert other.seconds_a_stream == pytest.approx(known.seconds_a_stream, rel=0.1)


def test_prompts_cost_the_streams_beside_them_as_long_as_they_come() -> None:
    estimates, pod = estimates_of((6, 4, 0.0), (6, 16, 0.0), (6, 8, 4000.0), (6, 16, 4000.0))
    busy = estimates.pace("a").streams
    assert busy is not None
    expected = (ALONE + 12 * STREAM) / (1.0 - PROMPT * 4000.0)
    assert busy.seconds(12, 12_000) == pytest.approx(expected, rel=0.1)
    for report in pod.go_on(12, running=8):
        estimates.report("a", report, now=report.reported_at)
    calm = estimates.pace("a").streams
    assert calm is not None
    assert calm.seconds(12, 12_000) == pytest.approx(ALONE + 12 * STREAM, rel=0.1)
    assert busy.alone_seconds == pytest.approx(ALONE + STREAM, rel=0.15)  # whatever is beside it


def test_preemptions_are_seen_when_they_are_counted() -> None:
    samples, before = StreamSamples(), load(preemptions=3, reported_at=1.0)
    samples.report(before, load(preemptions=3, reported_at=1.2), pool=None)
    assert samples.preempted_at == float("-inf")
    samples.report(before, load(preemptions=4, reported_at=1.4), pool=None)
    assert samples.preempted_at == 1.4
    samples.report(load(preemptions=9, reported_at=2.0), load(preemptions=0, reported_at=2.2), pool=None)
    assert samples.preempted_at == 1.4  # another process


def test_reports_that_are_far_apart_say_nothing_of_what_ran_meanwhile() -> None:
    samples, pod = StreamSamples(), Reports()
    before = pod.last
    for running in (4, 16, 4, 16):
        pod.at += 30.0
        *_, report = pod.go_on(0.2, running=running)
        samples.report(before, report, pool=None)
        before = report
    assert samples.pace is None
