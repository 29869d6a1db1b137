"""The thresholds of a policy: up when any is reached, down only when all are at or below. Pure."""

from collections.abc import Mapping
from enum import StrEnum
from math import ceil

import msgspec

from extproc.policy.autoscale import ScaleSignals

WORDS = {"queue_requests": "queueRequests", "kv_usage": "kvUsage", "gpu_utilization": "gpuUtilization"}


class Way(StrEnum):
    """What the thresholds say."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"
    NOTHING = "nothing"  # none is given, or none of those that are has a value


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the thresholds say, by which signal, and how many times its threshold that is."""

    way: Way
    signal: str = ""
    value: float = 0.0
    threshold: float = 0.0

    def pods(self, ready: int) -> int:
        """Return the pods that there are to be at least: in proportion where a threshold is reached."""
        if self.way is not Way.UP:
            return 0
        factor = self.value / self.threshold if self.threshold > 0.0 else 1.0
        return max(ready + 1, ceil(ready * factor))


def verdict(values: Mapping[str, float | None], *, up: ScaleSignals, down: ScaleSignals) -> Verdict:
    """Compare means over the ready pods (`WORDS` has their names) with both sets of thresholds.

    A signal without a value says nothing: it is neither reached nor in the way of fewer pods.
    """
    reached = [
        Verdict(way=Way.UP, signal=name, value=value, threshold=threshold)
        for name, value in values.items()
        if value is not None and (threshold := getattr(up, name)) is not None and value >= threshold
    ]
    if reached:
        return max(reached, key=lambda each: each.value / each.threshold if each.threshold > 0.0 else 1.0)
    given = [(name, value, getattr(down, name)) for name, value in values.items() if value is not None]
    told = [(name, value, threshold) for name, value, threshold in given if threshold is not None]
    above = next((each for each in told if each[1] > each[2]), None)
    if above is not None:
        return Verdict(way=Way.HOLD, signal=above[0], value=above[1], threshold=above[2])
    if told:
        return Verdict(way=Way.DOWN, signal=told[0][0], value=told[0][1], threshold=told[0][2])
    return Verdict(way=Way.NOTHING)
