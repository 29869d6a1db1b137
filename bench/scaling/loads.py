"""When requests come and what they are: a Poisson process whose rate has a shape, or a trace played at its speed.

The trace is an hour: whole conversations, one in fifty, of Mooncake's. It is repeated from a request on that chance
chooses, and played so much faster or slower that as much comes as the shape says: order, lengths and gaps of the
requests stay those of the trace. What began like a request before counts as cached, as with caches without an end.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import NamedTuple

from bench.scaling.plan import MOST_TOKENS, Mix, Plan
from operate.load.trace import TRACE_BLOCK_TOKENS, TraceRow, read_requests

TRACE = Path(__file__).parents[1] / "data" / "mooncake_conversation_cut.jsonl"
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
    if mix.is_recorded:
        yield from _recorded(lambda at: level(at) * per_load, seconds, draw)
        return
    most = 1.7 * plan.peak * per_load
    at = 0.0
    while (at := at + draw.expovariate(most)) < seconds:
        if draw.random() < level(at) * per_load / most:
            yield Request(
                at=at,
                uncached_tokens=_length(draw, mix.uncached_tokens, mix.spread),
                cached_tokens=_length(draw, mix.cached_tokens, mix.spread),
                answer_tokens=max(_length(draw, mix.answer_tokens, mix.spread), 2.0),
            )


def _recorded(rate: Callable[[float], float], seconds: float, draw: random.Random) -> Iterator[Request]:
    """Yield the trace's requests; `rate`: how many are to come a second."""
    with TRACE.open("rb") as lines:
        trace = [row for row in read_requests(lines, where=str(TRACE)) if isinstance(row, TraceRow)]
    times, cached = [row.timestamp / 1000.0 for row in trace], list(_cached_tokens(trace))
    usual = (times[-1] - times[0]) / (len(trace) - 1)  # seconds between two
    gaps = [later - earlier for earlier, later in pairwise(times)]
    first = draw.randrange(len(trace))
    at = 0.0
    for row, held, gap in islice(cycle(zip(trace, cached, [*gaps, usual], strict=True)), first, None):
        yield Request(
            at=at,
            uncached_tokens=row.input_length - held,
            cached_tokens=held,
            answer_tokens=max(row.output_length, 2.0),
        )
        at += gap / usual / rate(at)
        if at >= seconds:
            return


def _cached_tokens(trace: Iterable[TraceRow]) -> Iterator[float]:
    seen: set[int] = set()
    for row in trace:
        held = next((i for i, block in enumerate(row.hash_ids) if block not in seen), len(row.hash_ids))
        seen.update(row.hash_ids)
        # an engine always computes the last token
        yield min(held * TRACE_BLOCK_TOKENS, max(row.input_length - 1.0, 0.0))


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


def _length(draw: random.Random, mean: float, spread: float) -> float:
    return min(mean * math.exp(draw.gauss(-spread * spread / 2.0, spread)), MOST_TOKENS)
