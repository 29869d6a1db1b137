"""The level is robust, the trend real, and three samples say nothing."""

import random
from collections.abc import Callable

import pytest

from extproc.scaling.role_memory import Forecast


def played(seconds: float, value: Callable[[float], float]) -> Forecast:
    forecast = Forecast()
    for i in range(int(seconds / 2)):
        forecast.add(value(2.0 * i), now=2.0 * i)
    return forecast


def test_a_few_samples_say_nothing() -> None:
    assert played(30, lambda _: 4.0).ahead(90.0) is None
    assert played(40, lambda _: 4.0).ahead(90.0) == pytest.approx(4.0)


def test_noise_is_no_trend() -> None:
    draw = random.Random(1)
    ahead = []
    forecast = Forecast()
    for i in range(1800):
        forecast.add(draw.gauss(4.0, 1.0), now=2.0 * i)
        if i > 150:
            ahead.append(forecast.ahead(90.0) or 0.0)
    assert 3.7 < sum(ahead) / len(ahead) < 4.3
    assert max(ahead) < 5.5


def test_what_rises_is_seen_ahead() -> None:
    forecast = played(400, lambda at: 2.0 + 0.01 * at)
    assert forecast.ahead(90.0) == pytest.approx(2.0 + 0.01 * (400 + 90), rel=0.1)


def test_what_falls_is_not_taken_to_fall_on() -> None:
    forecast = played(400, lambda at: 8.0 - 0.01 * at)
    assert forecast.ahead(90.0) == forecast.level


def test_one_spike_is_passed_over_and_a_step_is_not() -> None:
    assert played(310, lambda at: 40.0 if 280 <= at < 290 else 4.0).level == pytest.approx(4.0)
    assert played(302, lambda at: 12.0 if at >= 280 else 4.0).level == pytest.approx(12.0)


def test_a_forecast_is_at_most_twice_the_level() -> None:
    forecast = played(300, lambda at: at / 10.0)
    assert forecast.ahead(36_000.0) == pytest.approx(2.0 * (forecast.level or 0.0))


def test_a_clock_that_has_jumped_begins_anew() -> None:
    forecast = played(300, lambda _: 4.0)
    forecast.clear()
    assert forecast.level is None
