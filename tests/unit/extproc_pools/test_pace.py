"""So many a second and no more."""

from extproc.pools.plan_response import Pace


def taken(pace: Pace, *, times: int, now: float) -> int:
    return sum(pace.take(now=now) for _ in range(times))


def test_a_burst_is_allowed_once_and_fills_again_with_time() -> None:
    pace = Pace(per_second=10, burst_seconds=2)

    assert [taken(pace, times=50, now=now) for now in (100.0, 100.0, 100.5, 200.0)] == [20, 0, 5, 20]


def test_a_pace_of_nothing_allows_nothing() -> None:
    assert not Pace(per_second=0, burst_seconds=5).take(now=1.0)
