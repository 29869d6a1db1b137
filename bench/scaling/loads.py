"""When requests come and what they are: a Poisson process whose rate has a shape."""

import math
import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bench.scaling.plan import MOST_TOKENS, SPREAD, Mix, Plan

BURST_SECONDS = 60.0  # for which the rate of a day is off its curve by the same factor
BURST_SPREAD = 0.15  # sigma of that factor's logarithm


class Request(NamedTuple):
    """One request."""

    at: float  # seconds
    uncached_tokens: float
    cached_tokens: float
    answer_tokens: float


def requests(mix: Mix, shape: str, plan: Plan, *, seed: int) -> Iterator[Request]:
    """Yield the requests in the order in which they come."""
    draw = random.Random(seed)
    # a load of 1 keeps `busy_pods` busy
    per_load = mix.busy_pods * plan.engine.tokens_per_second / mix.uncached_tokens
    seconds = plan.seconds[shape]
    level = _step(seconds, plan) if shape == "step" else _day(seconds, plan, draw)
    most = 1.7 * plan.peak * per_load
    at = 0.0
    while (at := at + draw.expovariate(most)) < seconds:
        if draw.random() < level(at) * per_load / most:
            yield Request(
                at=at,
                uncached_tokens=_length(draw, mix.uncached_tokens),
                cached_tokens=_length(draw, mix.cached_tokens),
                answer_tokens=max(_length(draw, mix.answer_tokens), 2.0),
            )


def _step(seconds: float, plan: Plan) -> Callable[[float], float]:
    """A quarter of the peak, then three quarters for a third of the time, then a quarter again."""
    return lambda at: plan.peak * (0.75 if seconds / 3 <= at < 2 * seconds / 3 else 0.25)


def _day(seconds: float, plan: Plan, draw: random.Random) -> Callable[[float], float]:
    """A night, a morning that rises, a dip at noon, an afternoon, an evening; each minute off by some chance."""
    chance = [math.exp(draw.gauss(0.0, BURST_SPREAD)) for _ in range(int(seconds / BURST_SECONDS) + 1)]

    def level(at: float) -> float:
        hour = 24.0 * at / seconds
        curve = 0.12 + 0.75 * _bump(hour, 10.5, 2.2) + 0.85 * _bump(hour, 15.5, 2.4) + 0.3 * _bump(hour, 21.0, 1.5)
        return plan.peak * min(curve, 1.0) * chance[int(at / BURST_SECONDS)]

    return level


def _bump(hour: float, middle: float, width: float) -> float:
    return math.exp(-0.5 * ((hour - middle) / width) ** 2)


def _length(draw: random.Random, mean: float) -> float:
    return min(mean * math.exp(draw.gauss(-SPREAD * SPREAD / 2.0, SPREAD)), MOST_TOKENS)
