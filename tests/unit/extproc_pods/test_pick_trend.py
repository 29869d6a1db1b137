"""What two reports of one pod tell together: its prefill rate, its inter-token time, its memory traffic, a restart."""

from typing import Any

from extproc.pods.endpoint import NO_TREND, EndpointTrend
from extproc.pods.endpoint_samples import restarted
from extproc.pods.scrape_target import TrendWatch
from kvmesh.pods.pod_report import EndpointLoad
from tests.unit.extproc_choosing.pick_candidates import load


def report(at: float, **values: Any) -> EndpointLoad:
    return load(reported_at=at, **values)


def test_the_prefill_rate_follows_stretches_in_which_requests_waited_throughout() -> None:
    watch = TrendWatch()
    watch.report(report(0.0, waiting_requests=2, prefix_query_tokens=1000, prefix_hit_tokens=500))
    trend = watch.report(report(0.5, waiting_requests=1, prefix_query_tokens=5000, prefix_hit_tokens=1500))
    assert trend.prefill_tokens_per_second == 6000.0
    trend = watch.report(report(1.0, waiting_requests=1, prefix_query_tokens=7000, prefix_hit_tokens=1500))
    assert trend.prefill_tokens_per_second == 5000.0
    assert watch.report(report(1.5, prefix_query_tokens=9999, prefix_hit_tokens=1500)) == trend
    watch.report(report(2.0, waiting_requests=1, prefix_query_tokens=10_000, prefix_hit_tokens=1500))
    trend = watch.report(report(3.0, waiting_requests=1, prefix_query_tokens=12_000, prefix_hit_tokens=1500))
    assert trend.prefill_tokens_per_second == 5000.0 * 0.99  # a slow stretch had little to do


def test_prompts_that_a_pod_counts_as_a_whole_do_not_make_it_look_faster_than_it_is() -> None:
    watch = TrendWatch()
    # 8,000 tokens a second, in prompts that take a second each
    for tick in range(41):
        trend = watch.report(report(tick / 5, waiting_requests=1, prefix_query_tokens=8000 * (tick // 5 + 1)))
    assert trend.prefill_tokens_per_second == 8000.0


def test_one_or_two_long_prompts_show_no_rate() -> None:
    watch = TrendWatch()
    watch.report(report(0.0, waiting_requests=1, first_token_count=10))
    # two of 4,500 tokens have begun, the second one just now
    trend = watch.report(report(0.6, waiting_requests=1, prefix_query_tokens=9000, first_token_count=11))
    assert trend.prefill_tokens_per_second is None
    trend = watch.report(report(2.4, waiting_requests=1, prefix_query_tokens=22_500, first_token_count=14))
    assert trend.prefill_tokens_per_second == 22_500 / 2.4


def test_nothing_is_learned_from_an_idle_pod_or_one_that_waits_for_memory() -> None:
    watch = TrendWatch()
    watch.report(report(0.0, prefix_query_tokens=1000))
    assert watch.report(report(1.0, prefix_query_tokens=9000)) == NO_TREND
    watch.report(report(2.0, prefix_query_tokens=9000, waiting_requests=1))
    trend = watch.report(report(3.0, prefix_query_tokens=9000, waiting_requests=1))
    assert trend.prefill_tokens_per_second is None


def test_the_time_a_token_is_the_mean_of_a_window_with_enough_tokens() -> None:
    watch = TrendWatch()
    watch.report(report(0.0, inter_token_seconds_sum=5.0, inter_token_count=100))
    assert watch.report(report(1.0, inter_token_seconds_sum=7.0, inter_token_count=150)) == NO_TREND
    trend = watch.report(report(2.0, inter_token_seconds_sum=9.0, inter_token_count=200))
    assert trend == EndpointTrend(inter_token_seconds=0.04)
    assert watch.report(report(4.5, inter_token_seconds_sum=9.1, inter_token_count=210)) == NO_TREND


def test_prompts_count_for_the_window_in_which_they_begin_and_for_the_next_one() -> None:
    watch, rates = TrendWatch(), []
    for at, queried, hits in ((0.0, 0, 0), (2.0, 9000, 1000), (4.0, 9000, 1000), (6.0, 9000, 1000)):
        trend = watch.report(report(at, prefix_query_tokens=queried, prefix_hit_tokens=hits))
        rates.append(trend.prompt_tokens_per_second)
    assert rates == [0.0, 4000.0, 4000.0, 0.0]


def test_memory_traffic_is_a_rate_and_unknown_where_the_pod_does_not_count() -> None:
    watch = TrendWatch()
    watch.report(report(0.0, memory_bytes_moved=1e12))
    assert watch.report(report(2.0, memory_bytes_moved=5e12)).memory_bytes_per_second == 2e12


def test_a_restart_is_seen_by_counters_that_begin_anew() -> None:
    before = report(0.0, prefix_query_tokens=1000, inter_token_count=50, waiting_requests=1)
    after = report(1.0, prefix_query_tokens=10, waiting_requests=1)
    assert (restarted(before, after), restarted(before, before)) == (True, False)
    watch = TrendWatch()
    watch.report(before)
    assert watch.report(after) == NO_TREND


def test_nothing_is_learned_while_caches_come_from_other_pods() -> None:
    watch = TrendWatch()
    fetches = [(0, 0.0), (4000, 0.0), (4000, 5e8), (8000, 5e8), (8000, 1e9)]  # asked for, then there
    for tick, (tokens, moved) in enumerate(fetches):
        # each waits for its cache; beside it some tokens are computed
        trend = watch.report(
            report(
                tick / 2,
                waiting_requests=1,
                prefix_query_tokens=4100 * (tick // 2 + 1),
                prefix_hit_tokens=4000 * (tick // 2),
                fetched_tokens=tokens,
                fetched_bytes=moved,
            )
        )
    assert trend.prefill_tokens_per_second is None
    trend = watch.report(
        report(
            2.5,
            waiting_requests=1,
            prefix_query_tokens=16_300,
            prefix_hit_tokens=8000,
            fetched_tokens=8000,
            fetched_bytes=1e9,
        )
    )
    assert trend.prefill_tokens_per_second == 8000.0
