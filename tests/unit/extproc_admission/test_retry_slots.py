"""Retry-After: spread as the pool can serve, bounded, never all at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.pressure_memory import RetrySlots


def ask(line: RetrySlots, *, now: float, wait: float = 2.0, work: float = 0.5, random: float = 0.0) -> float:
    return line.after(wait_seconds=wait, work_seconds=work, now=now, random=lambda: random)


def test_refused_requests_come_back_one_after_the_other_at_the_pace_of_the_pool() -> None:
    line = RetrySlots()
    assert [ask(line, now=0.0) for _ in range(4)] == [2.0, 2.5, 3.0, 3.5]


def test_the_line_moves_on_with_time() -> None:
    line = RetrySlots()
    for _ in range(4):
        ask(line, now=0.0)
    assert ask(line, now=1.0) == 3.0
    assert ask(line, now=100.0) == 2.0


def test_nobody_comes_back_before_the_least_time_or_after_the_most() -> None:
    line = RetrySlots()
    assert ask(line, now=0.0, wait=0.0) == 1.0
    assert [ask(line, now=0.0, wait=1000.0, work=50.0) for _ in range(3)] == [60.0, 60.0, 60.0]


def test_chance_adds_to_a_wait_and_spreads_those_at_the_longest() -> None:
    line = RetrySlots()
    assert ask(line, now=0.0, random=1.0) == 3.0
    assert ask(line, now=0.0, wait=1000.0, random=0.0) == 60.0
    assert ask(line, now=0.0, wait=1000.0, random=1.0) == pytest.approx(40.0)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1e6), st.floats(0, 1e3), st.floats(0, 1)), max_size=50))
def test_every_answer_is_within_its_bounds(asked: list[tuple[float, float, float, float]]) -> None:
    line, now = RetrySlots(), 0.0
    for passed, wait, work, random in asked:
        now += passed
        assert 1.0 <= ask(line, now=now, wait=wait, work=work, random=random) <= 60.0
