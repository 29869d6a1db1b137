"""The history as it is sent: columns of equal length, in unix seconds, by source, measure, class and model."""

from extproc.answers.judgement import Measured
from extproc.ledger.pool_history import PoolHistory
from extproc.pages.history_state import MOST_SERIES, HistoryEvent, history_state
from kvmesh.pods.page_steps import at_once

NOW, UNIX = 905.0, 1_800_000_905.0  # the same moment
CHAT = ("critical", "m")


def shown_of(history: PoolHistory, *, pool: str = "", picker: str = "p", sample_share: float = 1.0) -> HistoryEvent:
    return at_once(history_state(history, pool=pool, picker=picker, sample_share=sample_share, now=NOW, unix_now=UNIX))


def test_series_are_told_apart_by_who_measured_what() -> None:
    history = PoolHistory(began_at=5.0)
    history.measured(CHAT, Measured(ttft_seconds=0.25, inter_token_seconds=0.02), weight=50.0, now=880.0)
    history.measured(CHAT, Measured(ttft_seconds=0.75), weight=50.0, now=901.0)
    history.pods_ttft.add_counts(("m", "decode"), [(5, 3.0)], now=901.0)

    shown = shown_of(history, pool="a/b", picker="p", sample_share=0.02)

    assert (shown.pool, shown.picker, shown.since, shown.sample_share) == ("a/b", "p", 1_800_000_005.0, 0.02)
    assert [(each.source, each.measure, each.class_name, each.model, each.role) for each in shown.latencies] == [
        ("answers", "ttft", "critical", "m", None),
        ("answers", "inter-token", "critical", "m", None),
        ("pods", "ttft", None, "m", "decode"),
    ]
    first = shown.latencies[0]
    assert (first.whole.observed, first.whole.p99_ms) == (2, 750.0)
    assert {len(column) for column in (first.slices.observed, first.slices.p50_ms, first.slices.p99_ms)} == {60}
    assert first.slices.p50_ms[-3:] == [250.0, None, 750.0]
    assert first.slices.observed[-3:] == [1, 0, 1]
    assert shown.first_at + 60 * shown.slice_seconds == 1_800_000_915.0  # the present slice's end


def test_the_load_is_of_slices_that_are_over() -> None:
    history = PoolHistory()
    history.load.routed(prompt_tokens=100, cached_tokens=60, now=899.0)
    history.load.refused(now=900.0)
    load = shown_of(history, pool="", picker="p", sample_share=0.0).load
    assert load.requests[-2:] == [1, 0]
    assert (load.prompt_tokens[-2], load.cached_tokens[-2], load.refused[-1]) == (100, 60, 1)
    assert (len(load.requests), load.first_at) == (180, 1_800_000_005.0)


def test_the_most_observed_series_are_shown_and_the_others_counted() -> None:
    history = PoolHistory()
    for number in range(MOST_SERIES + 2):
        for _ in range(1 + number):
            history.measured((f"c{number}", "m"), Measured(ttft_seconds=0.1), weight=1.0, now=900.0)
    shown = shown_of(history, pool="", picker="p", sample_share=1.0)
    assert (len(shown.latencies), shown.left_out) == (MOST_SERIES, 2)
    assert shown.latencies[0].class_name == f"c{MOST_SERIES + 1}"


def test_each_series_is_a_step_and_may_be_forgotten_before_it() -> None:
    history = PoolHistory()
    for number in range(5):
        history.measured((f"c{number}", "m"), Measured(ttft_seconds=0.1), weight=1.0, now=900.0)
    steps = history_state(history, pool="", picker="p", sample_share=1.0, now=NOW, unix_now=UNIX)
    assert len(list(steps)) == 5
    steps = history_state(history, pool="", picker="p", sample_share=1.0, now=NOW, unix_now=UNIX)
    next(steps)
    history.ttft.known(now=900.0 + 3600)  # all is forgotten
    assert at_once(steps).latencies == []
