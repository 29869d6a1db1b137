"""From records to numbers, and from numbers to verdicts."""

import math
from typing import Any

import pytest

from bench.routing.one_cache import OneCacheHits
from bench.routing.pod_counters import PodCounts, parse
from bench.routing.script import POD_MISSING, Way
from bench.routing.summary import RunSummary, Spread, summarise, verdicts
from operate.load.script import Record
from operate.load.summary import percentile

ONE_CACHE = OneCacheHits(prompt_tokens=400, cached_tokens=200, miscounted=0)


def record(number: int, *, due: float, ttft: float | None, **fields: Any) -> Record:
    return Record(
        session=f"s{number}",
        turn=0,
        due=due,
        ready=due,
        sent=due + 0.001,
        first=None if ttft is None else due + 0.001 + ttft,
        ended=due + 1,
        error="status 503" if ttft is None else None,
        **fields,
    )


def summary(arm: str, workload: str, **changes: Any) -> RunSummary:
    fields: dict[str, Any] = {
        "requests": 100,
        "succeeded": 100,
        "success_rate": 1.0,
        "goodput_per_second": 10.0,
        "goodput_share": 1.0,
        "ttft_mean": 100.0,
        "ttft_p50": 90.0,
        "ttft_p95": 200.0,
        "ttft_p99": 300.0,
        "hit_rate": 0.8,
        "one_cache_hit_rate": 0.8,
        "hit_share": 1.0,
        "spread": Spread(requests=1.0, prefill=1.0, requests_by_pod=(), prefill_tokens_by_pod=()),
        "preemptions": 0,
        "errors": {},
        "late_p99": 1.0,
        "busy_cores": 0.5,
        "router_cpu_ms": 1.0,
        "router_cpu_ms_by_process": {},
        "pods_cpu_ms": 1.0,
        "miscounted_prompts": 0,
    }
    return RunSummary(arm=arm, workload=workload, **fields | changes)


def test_a_run_is_summed_up_over_what_was_due_after_the_warm_up() -> None:
    records = [
        record(0, due=0.5, ttft=9.0, prompt_tokens=1000, cached_tokens=0),
        record(1, due=1.0, ttft=0.1, prompt_tokens=200, cached_tokens=100),
        record(2, due=2.0, ttft=0.3, prompt_tokens=200, cached_tokens=50),
        record(3, due=3.0, ttft=None),
    ]
    pods = [
        PodCounts(requests=3, prompt_tokens=300, hit_tokens=100, preemptions=1),
        PodCounts(requests=1, prompt_tokens=100),
    ]
    run = summarise(
        arm="a",
        workload="w",
        records=records,
        measured_from=1.0,
        ttft_limit_ms=200,
        one_cache=ONE_CACHE,
        pods=pods,
        busy_cores=1.5,
        cpu_ms={"envoy": 2.0, "picker-0": 6.0, "pod-0": 1.0, "pod-1": 3.0},
    )

    assert (run.requests, run.succeeded, run.errors) == (3, 2, {"status 503": 1})
    assert [run.goodput_per_second, run.goodput_share] == pytest.approx([0.5, 1 / 3])
    assert [run.ttft_mean, run.ttft_p50, run.ttft_p99] == pytest.approx([200, 100, 300])
    assert (run.hit_rate, run.one_cache_hit_rate, run.hit_share) == (0.375, 0.5, 0.75)
    assert run.spread == Spread(
        requests=1.5, prefill=200 / 150, requests_by_pod=(3, 1), prefill_tokens_by_pod=(200, 100)
    )
    assert (run.preemptions, run.busy_cores, run.router_cpu_ms, run.pods_cpu_ms) == (1, 1.5, 2.0, 1.0)
    assert run.router_cpu_ms_by_process == {"envoy": 0.5, "picker-0": 1.5}


def test_a_run_without_any_answer_has_no_times() -> None:
    run = summarise(
        arm="a",
        workload="w",
        records=[record(0, due=0.0, ttft=None)],
        measured_from=0.0,
        ttft_limit_ms=200,
        one_cache=OneCacheHits(prompt_tokens=0, cached_tokens=0, miscounted=0),
        pods=[PodCounts()],
        busy_cores=0.0,
        cpu_ms={},
    )

    assert (run.success_rate, run.goodput_share, run.hit_share) == (0.0, 0.0, 1.0)
    assert math.isnan(run.ttft_mean)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(1, 101)]

    assert [percentile(values[::-1], share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]


def test_the_targets_are_judged_against_the_baseline_in_the_same_run() -> None:
    runs = [
        summary("round-robin", "qa", ttft_mean=300, ttft_p95=500),
        summary("round-robin", "uniform", ttft_mean=100),
        summary("kvmesh", "qa", ttft_mean=100, hit_share=0.94),
        summary("kvmesh", "qa-x2", ttft_p95=501, hit_share=0.95),
        summary("kvmesh", "uniform", ttft_mean=105.1),
    ]

    assert [verdict.met for verdict in verdicts(runs, arm="kvmesh")] == [True, False, False, True, False]


@pytest.mark.parametrize(("hit_rate", "met"), [(0.699, False), (0.7, True)])
def test_most_of_what_four_questions_about_a_long_document_share_is_hit(hit_rate: float, met: bool) -> None:
    assert [verdict.met for verdict in verdicts([summary("kvmesh", "long", hit_rate=hit_rate)], arm="kvmesh")] == [met]


@pytest.mark.parametrize(("goodput", "met"), [(15.1, False), (15.2, True)])
def test_goodput_beside_a_bad_pod_is_judged_by_that_of_the_other_pods(goodput: float, met: bool) -> None:
    beside = summary("kvmesh", Way.REFUSES, goodput_per_second=goodput)
    alone = summary("kvmesh", POD_MISSING, goodput_per_second=16.0)

    (verdict,) = verdicts([beside, alone, summary("round-robin", Way.BREAKS_OFF)], arm="kvmesh")
    assert (verdict.met, verdict.target.split(":")[0]) == (met, "pod-refuses")
    assert verdicts([beside], arm="kvmesh") == []


def test_where_the_other_pods_serve_nothing_the_target_is_missed() -> None:
    runs = [summary("kvmesh", name, goodput_per_second=0.0) for name in (POD_MISSING, Way.BREAKS_OFF)]

    assert [verdict.met for verdict in verdicts(runs, arm="kvmesh")] == [False]


def test_a_low_ttft_of_few_answers_meets_no_target() -> None:
    runs = [summary("round-robin", "qa", ttft_mean=300), summary("kvmesh", "qa", ttft_mean=10, success_rate=0.9)]

    mean, hits = verdicts(runs, arm="kvmesh")
    assert (mean.met, hits.met) == (False, True)


def test_what_was_not_measured_is_not_judged() -> None:
    assert verdicts([summary("kvmesh", "qa"), summary("kvmesh", "uniform")], arm="kvmesh")[1:] == []


def test_the_pods_counts_are_sums_over_their_series() -> None:
    page = "\n".join(
        (
            "# HELP vllm:num_requests_running Number of requests",
            'vllm:num_requests_running{engine="0",model_name="tiny"} 2.0',
            'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0',
            'vllm:prefix_cache_queries_total{engine="0"} 1e+06',
            'vllm:prefix_cache_hits_total{engine="0"} 500.0',
            'vllm:num_preemptions_total{engine="0"} 0.0',
            'vllm:request_success_total{engine="0",finished_reason="stop"} 3.0',
            'vllm:request_success_total{engine="0",finished_reason="length"} 4.0',
        )
    )

    before = PodCounts(requests=2, prompt_tokens=10, hit_tokens=100)
    assert parse(page) == PodCounts(requests=7, prompt_tokens=1_000_000, hit_tokens=500, busy=3)
    assert parse(page).since(before) == PodCounts(requests=5, prompt_tokens=999_990, hit_tokens=400, busy=3)
    assert parse(page).since(before).plus(before) == parse(page)
