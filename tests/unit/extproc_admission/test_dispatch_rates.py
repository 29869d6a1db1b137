"""How fast a pool takes work, and what the bands above a class take of it."""

from math import e

import pytest

from extproc.admission.pressure_memory import PRIOR_SECONDS, RATE_SECONDS, DispatchRates


def _rates(*, seconds: float, some_wait: bool = False) -> DispatchRates:
    """50 tokens of priority 100, ten times a second, from 0 on."""
    rates = DispatchRates(now=0.0)
    for tenth in range(1, round(10 * seconds) + 1):
        rates.went(100, 50, some_wait=some_wait, now=tenth / 10)
    return rates


@pytest.mark.parametrize("seconds", [2.0, 4.0, 60.0])
def test_a_steady_stream_counts_with_its_rate_from_its_beginning_on_for_those_below_it_alone(seconds: float) -> None:
    rates = _rates(seconds=seconds)
    assert rates.above(0, now=seconds) == pytest.approx(500.0, rel=0.02)
    assert rates.above(100, now=seconds) == 0.0


def test_what_has_ended_fades_and_the_priorities_add_up() -> None:
    rates = DispatchRates(now=-1000.0)
    rates.went(100, 1000, some_wait=False, now=0.0)
    rates.went(50, 1000, some_wait=False, now=0.0)
    assert rates.above(0, now=0.0) == pytest.approx(2000 / RATE_SECONDS)
    assert rates.above(50, now=0.0) == pytest.approx(1000 / RATE_SECONDS)
    assert rates.above(0, now=10 * RATE_SECONDS) < 0.1


def test_a_first_request_is_not_taken_for_a_stream_of_them() -> None:
    rates = DispatchRates(now=5.0)
    rates.went(1, 100, some_wait=False, now=5.0)
    assert rates.above(0, now=5.0) == 100.0


def test_a_clock_that_goes_back_changes_nothing() -> None:
    rates = _rates(seconds=5.0)
    assert rates.above(0, now=4.9) <= rates.above(0, now=5.0) * 1.02
    assert rates.drain_seconds(500.0, estimated=3.0, now=4.9) == 3.0


def test_a_pool_in_which_nobody_waited_drains_as_estimated() -> None:
    assert _rates(seconds=60.0).drain_seconds(1000.0, estimated=7.0, now=60.0) == 7.0


def test_a_queue_drains_as_fast_as_requests_went_while_others_waited() -> None:
    seconds = _rates(seconds=60.0, some_wait=True).drain_seconds(1000.0, estimated=20.0, now=60.0)
    weight = RATE_SECONDS / (RATE_SECONDS + PRIOR_SECONDS)
    assert seconds == pytest.approx(2.0 * weight + 20.0 * (1.0 - weight), rel=0.02)


def test_what_was_counted_gives_way_to_the_estimate_when_it_gets_old() -> None:
    rates = _rates(seconds=60.0, some_wait=True)
    weight = (RATE_SECONDS / e) / (RATE_SECONDS / e + PRIOR_SECONDS)
    later = rates.drain_seconds(1000.0, estimated=20.0, now=60.0 + RATE_SECONDS)
    assert later == pytest.approx(2.0 * weight + 20.0 * (1.0 - weight), rel=0.02)


def test_in_a_pool_in_which_nobody_waited_higher_priorities_take_what_is_estimated() -> None:
    assert _rates(seconds=60.0).share_above(0, estimated=0.3, now=60.0) == 0.3


def test_of_a_load_that_has_just_risen_what_went_while_others_waited_tells_the_share() -> None:
    rates = _rates(seconds=60.0)  # a calm minute
    for tenth in range(601, 631):  # in the next three seconds four times as much, and what is left goes to the others
        rates.went(100, 200, some_wait=True, now=tenth / 10)
        rates.went(-100, 50, some_wait=True, now=tenth / 10)
    weight = 3.0 / (3.0 + PRIOR_SECONDS)
    assert rates.share_above(0, estimated=0.3, now=63.0) == pytest.approx(0.8 * weight + 0.3 * (1 - weight), rel=0.05)
    assert rates.share_above(100, estimated=0.0, now=63.0) == 0.0
    assert rates.share_above(0, estimated=0.3, now=200.0) == pytest.approx(0.3, abs=0.01)
