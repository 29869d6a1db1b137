"""What one more stream costs is learned from reports that differ."""

import pytest

from extproc.scaling.step_times import StepTimes


def learned(*running: float, alone: float = 0.01, slope: float = 0.0005) -> StepTimes:
    steps = StepTimes()
    for streams in running:
        steps.add(running=streams, tokens=100.0 * streams, seconds_a_token=alone + slope * streams)
    return steps


def test_the_streams_within_a_promise() -> None:
    steps = learned(10, 20, 40)
    assert steps.streams_within(0.05) == pytest.approx(80.0)
    assert steps.seconds_at(80.0) == pytest.approx(0.05)


def test_reports_that_are_alike_say_nothing() -> None:
    assert learned(20, 20, 21).streams_within(0.05) is None
    assert StepTimes().streams_within(0.05) is None


def test_nothing_is_said_far_beyond_what_was_seen() -> None:
    assert learned(1, 2, 3).streams_within(0.05) == pytest.approx(12.0)
    assert learned(10, 20, slope=0.0).streams_within(0.05) == pytest.approx(80.0)


def test_a_promise_that_not_even_one_stream_keeps() -> None:
    assert learned(10, 20, 40).streams_within(0.005) == 0.0


def test_what_was_seen_fades() -> None:
    steps = learned(10, 20, 40)
    steps.fade(100_000.0)
    assert steps.streams_within(0.05) is None
