"""The margin between expected and worst waits."""

import random

from extproc.admission.pressure_memory import FIRST, MOST, WaitMargin


def test_waits_that_come_as_expected_need_no_margin() -> None:
    margin = WaitMargin()
    for _ in range(200):
        margin.waited(1.9, expected_seconds=2.0, target_seconds=4.0)
    assert margin.factor == 1.0


def test_the_margin_settles_where_few_wait_longer() -> None:
    margin, draw, late = WaitMargin(), random.Random(5), 0
    for turn in range(6000):
        real = 2.0 * draw.uniform(0.5, 2.5)
        late += turn >= 1000 and real > 2.0 * margin.factor
        margin.waited(real, expected_seconds=2.0, target_seconds=4.0)
    assert late / 5000 < 0.02
    assert 1.5 < margin.factor < 4.0


def test_it_is_forgotten_when_waits_become_as_expected_again() -> None:
    margin = WaitMargin()
    for _ in range(50):
        margin.waited(9.0, expected_seconds=1.0, target_seconds=4.0)
    assert margin.factor == MOST
    for _ in range(1000):
        margin.waited(1.0, expected_seconds=1.0, target_seconds=4.0)
    assert margin.factor == 1.0


def test_a_margin_that_lets_in_short_waits_only_shrinks_with_them() -> None:
    margin = WaitMargin()
    for _ in range(50):
        margin.waited(9.0, expected_seconds=1.0, target_seconds=4.0)
    for _ in range(100):
        margin.waited(0.2, expected_seconds=0.4, target_seconds=4.0)
    assert margin.factor < 0.8 * MOST


def test_short_waits_teach_nothing() -> None:
    margin = WaitMargin()
    margin.waited(0.7, expected_seconds=0.01, target_seconds=4.0)
    assert margin.factor == FIRST
