"""What is written into a Deployment's scale, in what steps, and when not."""

from typing import Any

import pytest

from extproc.scaling.acting import ActMemory, ActState, ScaleWish


def wish(replicas: int, **changes: Any) -> ScaleWish:
    given = {"may_lower": True, "window_seconds": 300.0} | changes
    return ScaleWish(pool="llm/a", role="both", variant="", namespace="llm", deployment="a", replicas=replicas, **given)


def following(memory: ActMemory, wanted: int, start: int, *, seconds: float, began: float = 0.0) -> list[int]:
    """Look every five seconds and do what is said; return the numbers that were written."""
    written, now, replicas = [], began, start
    while now < began + seconds:
        memory.see(replicas, now=now)
        number, _, _ = memory.next(wish(wanted), replicas, now=now)
        if number is not None:
            memory.wrote(number, before=replicas, now=now)
            written.append(number)
            replicas = number
        now += 5.0
    return written


def test_up_in_bounded_steps() -> None:
    assert following(ActMemory(began_at=0.0), 40, 3, seconds=60.0) == [7, 14, 28, 40]


def test_down_a_third_a_minute_once_this_picker_has_led_for_the_window() -> None:
    memory = ActMemory(began_at=0.0)
    assert following(memory, 2, 9, seconds=300.0) == []
    assert following(memory, 2, 9, seconds=300.0, began=300.0) == [6, 4, 3, 2]


def test_a_signal_that_rests_on_too_little_never_lowers() -> None:
    memory = ActMemory(began_at=-1e6)
    number, state, words = memory.next(wish(2, may_lower=False), 9, now=0.0)
    assert (number, state, words) == (None, ActState.HELD, "not down to 2: too little is known")
    assert memory.next(wish(10, may_lower=False), 9, now=0.0)[0] == 10


def test_from_none_to_some() -> None:
    assert ActMemory(began_at=0.0).next(wish(2), 0, now=0.0)[0] == 2


def test_it_is_left_to_others_who_change_it_again_and_again() -> None:
    memory = ActMemory(began_at=-1e6)
    now = 0.0
    for _ in range(3):
        memory.see(5, now=now)
        number, _, _ = memory.next(wish(8), 5, now=now)
        assert number == 8
        memory.wrote(8, before=5, now=now)
        now += 30.0
    memory.see(5, now=now)
    number, state, words = memory.next(wish(8), 5, now=now)
    assert (number, state) == (None, ActState.OTHERS_WRITE)
    assert "somebody else has changed it 3 times in ten minutes" in words
    memory.see(5, now=now + 601.0)
    assert memory.next(wish(8), 5, now=now + 601.0)[0] == 8


@pytest.mark.parametrize("period", [30, 120, 600])
def test_a_wish_that_swings_moves_it_in_steps_only(period: int) -> None:
    memory, replicas = ActMemory(began_at=-1e6), 4
    for second in range(0, 3600, 5):
        memory.see(replicas, now=float(second))
        number, _, _ = memory.next(wish(12 if second % period < period / 2 else 2), replicas, now=float(second))
        if number is not None:
            assert number <= max(2 * replicas, replicas + 4)
            assert number >= replicas - max(replicas // 3, 1)
            memory.wrote(number, before=replicas, now=float(second))
            replicas = number
        assert 2 <= replicas <= 12
