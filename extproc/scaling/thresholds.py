"""A policy's thresholds: up if any signal reaches its own, down only if all signals are at or below theirs. Pure."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from math import ceil
from statistics import fmean

import msgspec

from extproc.policy.autoscale import ScalePolicy, ScaleSignals
from extproc.scaling.demand import Waiting, is_sane
from extproc.scaling.seen import PodSeen

WORDS = {"queue_requests": "queueRequests", "kv_usage": "kvUsage"}


class Way(StrEnum):
    """The direction by the thresholds."""

    UP = "up"
    DOWN = "down"
    HOLD = "hold"
    NOTHING = "nothing"  # no threshold is set


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The direction, with the decisive signal, its value and its threshold."""

    way: Way
    signal: str = ""
    value: float = 0.0
    threshold: float = 0.0

    def pods(self, ready: int) -> int:
        """Return the least number of pods: above `ready` in proportion to the reached threshold, otherwise 0."""
        if self.way is not Way.UP:
            return 0
        factor = self.value / self.threshold if self.threshold > 0.0 else 1.0
        return max(ready + 1, ceil(ready * factor))


def verdict(values: Mapping[str, float], *, up: ScaleSignals, down: ScaleSignals) -> Verdict:
    """Compare means over the ready pods (keys as in `WORDS`) with both sets of thresholds."""
    reached = [
        Verdict(way=Way.UP, signal=name, value=value, threshold=threshold)
        for name, value in values.items()
        if (threshold := getattr(up, name)) is not None and value >= threshold
    ]
    if reached:
        return max(reached, key=lambda each: each.value / each.threshold if each.threshold > 0.0 else 1.0)
    given = [(name, value, getattr(down, name)) for name, value in values.items()]
    told = [(name, value, threshold) for name, value, threshold in given if threshold is not None]
    above = next((each for each in told if each[1] > each[2]), None)
    if above is not None:
        return Verdict(way=Way.HOLD, signal=above[0], value=above[1], threshold=above[2])
    if told:
        return Verdict(way=Way.DOWN, signal=told[0][0], value=told[0][1], threshold=told[0][2])
    return Verdict(way=Way.NOTHING)


SILENT = Verdict(way=Way.NOTHING)


def threshold_verdict(policy: ScalePolicy, pods: Sequence[PodSeen], waiting: Waiting, ready: int) -> Verdict:
    """Return the direction by the means over the pods that serve; `waiting` counts as if spread over the ready ones."""
    loads = [pod.load for pod in pods if pod.serves and pod.load is not None and is_sane(pod.load)]
    if not loads or not ready:
        return SILENT
    values = {
        "queue_requests": fmean(load.waiting_requests for load in loads) + waiting.requests / ready,
        "kv_usage": fmean(load.kv_usage for load in loads),
    }
    return verdict(values, up=policy.scale_up, down=policy.scale_down)


def threshold_words(told: Verdict) -> str:
    """Return the reason's part about the thresholds, or ""."""
    if told.way is Way.UP:
        return f"; scaleUp.{WORDS[told.signal]}: {told.value:.3g} of {told.threshold:g} is reached"
    if told.way is Way.HOLD:
        return f"; no fewer: {WORDS[told.signal]} is {told.value:.3g}, above scaleDown's {told.threshold:g}"
    return ""
