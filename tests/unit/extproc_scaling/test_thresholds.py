"""Up when any threshold is reached, down only when all given are at or below: the vectors of the policy's meaning."""

import pytest

from extproc.policy.autoscale import ScaleSignals
from extproc.scaling.thresholds import Way, verdict

UP = ScaleSignals(queue_requests=8, kv_usage=0.8)
DOWN = ScaleSignals(queue_requests=2, kv_usage=0.4)


@pytest.mark.parametrize(
    ("queue", "cache", "way"),
    [
        (9, 0.3, Way.UP),
        (8, 0.3, Way.UP),  # at the threshold
        (1, 0.85, Way.UP),
        (1, 0.60, Way.HOLD),
        (2, 0.40, Way.DOWN),  # at both thresholds
        (2.1, 0.40, Way.HOLD),
        (7.9, 0.79, Way.HOLD),
    ],
)
def test_any_for_more_and_all_for_fewer(queue: float, cache: float, way: Way) -> None:
    assert verdict({"queue_requests": queue, "kv_usage": cache}, up=UP, down=DOWN).way is way


def test_without_thresholds_nothing_is_said() -> None:
    assert verdict({"queue_requests": 99}, up=ScaleSignals(), down=ScaleSignals()).way is Way.NOTHING


def test_a_threshold_that_is_far_exceeded_wants_in_proportion() -> None:
    assert verdict({"queue_requests": 9}, up=UP, down=DOWN).pods(4) == 5
    assert verdict({"queue_requests": 24}, up=UP, down=DOWN).pods(4) == 12
    assert verdict({"queue_requests": 8}, up=UP, down=DOWN).pods(4) == 5
    assert verdict({"queue_requests": 2}, up=UP, down=DOWN).pods(4) == 0


def test_a_threshold_of_nothing_is_always_reached() -> None:
    assert verdict({"queue_requests": 0}, up=ScaleSignals(queue_requests=0), down=ScaleSignals()).pods(3) == 4
