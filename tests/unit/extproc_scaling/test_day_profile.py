"""The time of day: its shape over days, nothing from few samples or one day, and clocks that jump."""

import math

import pytest

from extproc.scaling.day_profile import DAY_SECONDS, MOST_RATIO, SLOTS, DayProfile, DayState
from extproc.scaling.forecast import Forecast

MIDNIGHT = 20_000 * DAY_SECONDS
STEP = 60.0


def shape(wall: float) -> float:
    return 5.0 + 4.0 * math.sin(2.0 * math.pi * wall / DAY_SECONDS)


def seen(days: float, *, scale: float = 1.0) -> tuple[DayProfile, float]:
    """Return the profile of so many days, and the time at which they end."""
    profile = DayProfile()
    wall = MIDNIGHT
    while wall < MIDNIGHT + days * DAY_SECONDS:
        profile.add(scale * shape(wall), now=wall - MIDNIGHT, wall=wall)
        wall += STEP
    return profile, wall


def test_two_days_say_what_the_third_will_be() -> None:
    profile, wall = seen(2.25)
    for seconds in (90.0, 1800.0, 3600.0, 6 * 3600.0):
        assert profile.ratio(wall=wall, seconds=seconds) == pytest.approx(shape(wall + seconds) / shape(wall), rel=0.03)
    assert profile.state(wall=wall, seconds=3600.0) is DayState.KNOWN


def test_three_samples_and_one_day_say_nothing() -> None:
    profile = DayProfile()
    for i in range(3):
        profile.add(4.0, now=2.0 * i, wall=MIDNIGHT + 2.0 * i)
    assert profile.ratio(wall=MIDNIGHT + 6.0, seconds=60.0) is None
    profile, wall = seen(1.2)
    assert profile.state(wall=wall, seconds=60.0) is DayState.LEARNING


def test_a_slot_that_was_hardly_seen_does_not_count() -> None:
    profile = DayProfile()
    for day in range(3):
        for second in range(0, 240, 60):  # four minutes of ten
            profile.add(9.0, now=day * DAY_SECONDS + second, wall=MIDNIGHT + day * DAY_SECONDS + second)
    assert profile.ratio(wall=MIDNIGHT + 3 * DAY_SECONDS, seconds=60.0) is None


def test_more_load_in_all_has_the_same_shape() -> None:
    profile, wall = seen(2.25, scale=10.0)
    assert profile.ratio(wall=wall, seconds=3600.0) == pytest.approx(shape(wall + 3600.0) / shape(wall), rel=0.03)


def test_the_last_days_count_more_and_old_ones_are_forgotten() -> None:
    profile, wall = seen(9.0)
    for _ in range(int(10 * DAY_SECONDS / STEP)):
        profile.add(5.0, now=wall - MIDNIGHT, wall=wall)
        wall += STEP
    quarter = 0.25 * DAY_SECONDS
    assert profile.ratio(wall=MIDNIGHT + 19 * DAY_SECONDS, seconds=quarter) == pytest.approx(1.0, abs=0.2)
    assert profile.ratio(wall=wall + 9 * DAY_SECONDS, seconds=quarter) is None


def test_a_ratio_is_bounded_and_idle_times_have_none() -> None:
    profile = DayProfile()
    wall = MIDNIGHT
    for _ in range(int(2.1 * DAY_SECONDS / STEP)):
        profile.add({0: 0.001, 1: 0.1}.get(int(wall % DAY_SECONDS // 7200), 50.0), now=wall - MIDNIGHT, wall=wall)
        wall += STEP
    assert profile.ratio(wall=MIDNIGHT + 2 * DAY_SECONDS + 3600.0, seconds=7200.0) is None
    assert profile.ratio(wall=MIDNIGHT + 2 * DAY_SECONDS + 10_800.0, seconds=7200.0) == MOST_RATIO


@pytest.mark.parametrize("jump", [-7200.0, 7200.0, 5 * DAY_SECONDS])
def test_a_clock_that_jumps_is_named_and_writes_nothing_until_it_has_run_evenly(jump: float) -> None:
    profile, wall = seen(2.25)
    now = wall - MIDNIGHT
    slots = [(slot.mean, slot.days) for slot in profile._slots]
    for i in range(20):
        profile.add(1000.0, now=now + STEP * i, wall=wall + jump + STEP * i)
        assert profile.state(wall=wall + jump + STEP * i, seconds=60.0) is DayState.CLOCK_JUMPED
        assert profile.ratio(wall=wall + jump + STEP * i, seconds=60.0) is None
    assert [(slot.mean, slot.days) for slot in profile._slots] == slots
    for i in range(20, 40):
        profile.add(5.0, now=now + STEP * i, wall=wall + jump + STEP * i)
    assert profile.state(wall=wall + jump, seconds=60.0) is not DayState.CLOCK_JUMPED


def test_its_memory_is_a_days_slots() -> None:
    assert len(seen(5.0)[0]._slots) == SLOTS == 144


def test_the_forecast_takes_the_higher_of_trend_and_time_of_day() -> None:
    forecast = Forecast()
    wall = MIDNIGHT
    for _ in range(int(2.2 * DAY_SECONDS / 30.0)):
        forecast.add(shape(wall), now=wall - MIDNIGHT, wall=wall)
        wall += 30.0
    level = forecast.level or 0.0
    assert forecast.ahead(1800.0, wall=wall) == pytest.approx(level * shape(wall + 1800.0) / shape(wall), rel=0.03)
    falls = MIDNIGHT + 2.45 * DAY_SECONDS
    while wall < falls:
        forecast.add(shape(wall), now=wall - MIDNIGHT, wall=wall)
        wall += 30.0
    assert forecast.ahead(1800.0, wall=wall) == forecast.level  # what falls is held elsewhere
    assert (forecast.by_day(1800.0, wall=wall) or 0.0) < (forecast.level or 0.0)
    forecast.clear()
    assert forecast.day.state(wall=wall, seconds=60.0) is DayState.KNOWN
