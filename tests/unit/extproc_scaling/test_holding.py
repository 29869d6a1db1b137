"""Up at once and down late, in bounded steps."""

from extproc.scaling.holding import Holding


def settled(holding: Holding, recommended: int, *, now: float, present: int = 4) -> int:
    return holding.settle(recommended, present=present, now=now, window_seconds=300.0)[0]


def test_more_at_once_but_not_without_bounds() -> None:
    holding = Holding()
    assert settled(holding, 6, now=0.0) == 6
    assert settled(holding, 100, now=2.0) == 6
    assert settled(holding, 100, now=15.0) == 12  # twice as many, every quarter of a minute
    assert settled(holding, 100, now=30.0) == 24


def test_fewer_only_after_the_window_and_step_by_step() -> None:
    holding = Holding()
    seen = [settled(holding, 8 if at == 0 else 3, now=float(at)) for at in range(0, 900, 10)]
    assert seen[:31] == [8] * 31
    assert sorted(set(seen), reverse=True) == [8, 6, 4, 3]
    assert [seen.index(count) for count in (6, 4, 3)] == [31, 37, 43]  # a minute each


def test_no_lower_than_the_highest_of_the_window() -> None:
    holding = Holding()
    for at in range(0, 1200, 10):
        number = settled(holding, 6 if at % 200 == 0 else 2, now=float(at), present=6)
    assert number == 6


def test_a_saw_tooth_does_not_swing() -> None:
    for period in (60, 120, 240):
        holding = Holding()
        seen = [settled(holding, 3 + (at % period) * 6 // period, now=float(at), present=8) for at in range(0, 3600, 2)]
        assert len(set(seen[period:])) == 1, period


def test_while_nothing_is_known_the_number_stays_and_the_window_begins_anew() -> None:
    holding = Holding()
    settled(holding, 8, now=0.0)
    assert holding.hold(0, present=4) == 8
    assert settled(holding, 2, now=310.0) == 8
    assert settled(holding, 2, now=611.0) == 6


def test_bounds_hold_for_the_number_itself() -> None:
    holding = Holding()
    settled(holding, 8, now=0.0)
    holding.bound(1, 5)
    assert holding.wanted == 5
