"""The totals of `kvmesh top`, from one answer of a picker or from two."""

from extproc.pages.picker_state import DecisionState, EndpointState, MeasuredState, PickerState
from operate.local.top_totals import Seen, lines, totals_of

BOUNDS = (0.01, 0.1, 1.0)


def state(*, now: float, picks: int = 0, counts: tuple[float, ...] = (), decisions: int = 0) -> PickerState:
    """Return what a picker says of two pods, the second without a report."""
    return PickerState(
        now=now,
        endpoints=[
            EndpointState(address="a", state="ready", picks=picks, running=3, waiting=1, kv_usage=0.5, cached_blocks=7),
            EndpointState(address="b", state="unreachable", cached_blocks=3),
        ],
        decisions=[DecisionState(endpoint="a", prompt_tokens=100, matched_tokens=75) for _ in range(decisions)],
        ttft=MeasuredState(bounds=BOUNDS, counts=counts) if counts else MeasuredState(),
    )


def said(now: PickerState, earlier: PickerState | None = None, *, width: int = 200) -> list[str]:
    """Return the lines."""
    return lines(now, earlier, width=width)


def test_the_pods_are_added_up_as_far_as_they_report() -> None:
    total = totals_of(state(now=1.0, picks=4).endpoints)
    assert (total.address, total.state, total.cached_blocks, total.picks) == ("all 2", "1 ready", 10, 4)
    assert (total.running, total.waiting, total.kv_usage) == (3, 1, 0.5)
    nothing = totals_of([EndpointState(address="b", state="unknown")])
    assert (nothing.running, nothing.kv_usage) == (None, None)


def test_without_requests_nothing_is_said() -> None:
    assert said(state(now=1.0)) == []
    assert said(state(now=1.0, counts=(0.0, 0.0, 0.0, 0.0))) == []


def test_the_first_answer_counts_from_the_start() -> None:
    assert said(state(now=1.0, counts=(50.0, 45.0, 3.0, 2.0), decisions=4)) == [
        "hit rate 75% of the last 4 prompts   TTFT p50 ≤ 10 ms, p95 ≤ 100 ms, p99 > 1 s since the start"
    ]


def test_two_answers_tell_what_was_between_them() -> None:
    earlier = state(now=10.0, picks=100, counts=(50.0, 0.0, 0.0, 0.0))
    now = state(now=20.0, picks=125, counts=(50.0, 0.0, 8.0, 0.0))
    assert said(now, earlier) == ["2.5 requests/s   TTFT p50 ≤ 1 s, p95 ≤ 1 s, p99 ≤ 1 s in the last minute"]
    assert said(now, earlier, width=40) == [
        "2.5 requests/s",
        "TTFT p50 ≤ 1 s, p95 ≤ 1 s, p99 ≤ 1 s in the last minute",
    ]
    assert "since the start" in said(now, state(now=15.0, picks=125, counts=(50.0, 0.0, 8.0, 0.0)))[0]


def test_answers_older_than_a_minute_are_let_go_and_those_of_another_picker() -> None:
    seen = Seen()
    assert seen.before(state(now=0.0, picks=5)) is None
    first = seen.before(state(now=30.0, picks=8))
    assert first is not None
    assert first.now == 0.0
    later = seen.before(state(now=61.0, picks=9))
    assert later is not None
    assert later.now == 30.0
    assert seen.before(state(now=62.0, picks=1)) is None  # it began anew


def test_what_a_replica_counted_before_it_was_heard_is_not_of_the_last_minute() -> None:
    seen = Seen()
    assert seen.before(state(now=0.0, picks=5), answering=["a"]) is None
    both = state(now=1.0, picks=1_000_005)
    assert seen.before(both, answering=["a", "b"]) is None
    assert seen.before(state(now=2.0, picks=1_000_009), answering=["b", "a"]) == both
    assert seen.before(state(now=3.0, picks=1_000_009), answering=["a"]) is None  # lost: its picks stand still


def test_a_narrow_terminal_gets_as_many_lines_as_it_takes() -> None:
    now = state(now=20.0, picks=125, counts=(50.0, 0.0, 8.0, 0.0), decisions=4)
    assert said(now, state(now=10.0, picks=100, counts=(50.0, 0.0, 0.0, 0.0)), width=80) == [
        "2.5 requests/s   hit rate 75% of the last 4 prompts",
        "TTFT p50 ≤ 1 s, p95 ≤ 1 s, p99 ≤ 1 s in the last minute",
    ]
