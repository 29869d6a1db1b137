"""The cost of one more stream in inter-token time on a pod: learned from pods' own counters, without training. Pure.

A step's time grows with its streams, their context, and the prompt tokens computed in the same step. `StepTimes` keeps
decaying sums over (streams, context, prompt tokens, mean inter-token time) of reports: `fit` solves for all three,
`line` for the streams alone. The result is unknown until the reports differ enough to show the cost of a stream.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Self

import msgspec

HALF_LIFE_SECONDS = 600.0
LEAST_TOKENS = 200.0  # a line through fewer samples means nothing
LEAST_SPREAD = 0.15  # standard deviation / mean of the running requests; below, the slope means nothing
FAR = 4.0  # times the most streams seen; the line says nothing beyond
PRIOR_TOKENS = 1000.0  # weight of the prior, in samples
# typical deviation of a step's streams, context tokens and prompt tokens from their means: weights the prior
SPREADS = (4.0, 10_000.0, 100.0)
MOST_SECONDS = 10.0  # per token; more is nonsense, as are counts above MOST_COUNT
MOST_COUNT = 1e9
_FACTORS = 3
_PAIRS = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2), (2, 2))


class StepTime(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The time of a step, which gives each of its streams one token."""

    alone_seconds: float  # of an empty step
    seconds_a_stream: float
    seconds_a_context_token: float  # of all streams together
    seconds_a_prompt_token: float  # computed in the same step
    most_streams: float  # the most seen together; the model stops at FAR times this and the next
    most_context_tokens: float

    def seconds(self, *, streams: float, context_tokens: float, prompt_tokens: float = 0.0) -> float:
        """Return the inter-token time of a step with this content; too short for far more than was ever seen."""
        return (
            self.alone_seconds
            + self.seconds_a_stream * min(streams, FAR * self.most_streams)
            + self.seconds_a_context_token * min(context_tokens, FAR * self.most_context_tokens)
            + self.seconds_a_prompt_token * prompt_tokens
        )


@dataclass(slots=True, eq=False)
class StepTimes:
    """Decaying weighted sums; each token is one sample."""

    half_life_seconds: float = HALF_LIFE_SECONDS
    most_running: float = 0.0  # on one pod; decays
    most_context_tokens: float = 0.0
    _weight: float = 0.0
    _means: list[float] = field(default_factory=lambda: [0.0] * (_FACTORS + 1))  # x weight; the last: seconds per token
    _products: list[float] = field(default_factory=lambda: [0.0] * len(_PAIRS))  # of each pair of factors
    _with_seconds: list[float] = field(default_factory=lambda: [0.0] * _FACTORS)  # of each factor and the time

    def fade(self, seconds: float) -> None:
        """Decay all sums by the time passed."""
        share = 0.5 ** (seconds / self.half_life_seconds)
        self._weight *= share
        self._means = [value * share for value in self._means]
        self._products = [value * share for value in self._products]
        self._with_seconds = [value * share for value in self._with_seconds]
        self.most_running *= share
        self.most_context_tokens *= share

    def add(
        self,
        *,
        running: float,
        tokens: float,
        seconds_a_token: float,
        context_tokens: float = 0.0,
        prompt_tokens: float = 0.0,
    ) -> None:
        """Add one pod's counts between two reports: `tokens`, their mean time, and the mean of running requests.

        `context_tokens`: of all streams together. `prompt_tokens`: computed per step. Impossible samples are ignored.
        """
        factors = running, context_tokens, prompt_tokens
        if not all(0.0 <= count <= MOST_COUNT for count in (*factors, tokens)) or not tokens:
            return
        if not 0.0 <= seconds_a_token <= MOST_SECONDS:
            return
        self.most_running = max(self.most_running, running)
        self.most_context_tokens = max(self.most_context_tokens, context_tokens)
        self._weight += tokens
        for i, value in enumerate((*factors, seconds_a_token)):
            self._means[i] += tokens * value
        for place, (i, j) in enumerate(_PAIRS):
            self._products[place] += tokens * factors[i] * factors[j]
        for i, value in enumerate(factors):
            self._with_seconds[i] += tokens * value * seconds_a_token

    @classmethod
    def sum_of(cls, parts: Iterable["StepTimes"]) -> Self:
        """Return the merged samples of several pods."""
        whole = cls()
        for part in parts:
            whole.most_running = max(whole.most_running, part.most_running)
            whole.most_context_tokens = max(whole.most_context_tokens, part.most_context_tokens)
            whole._weight += part._weight
            whole._means = [a + b for a, b in zip(whole._means, part._means, strict=True)]
            whole._products = [a + b for a, b in zip(whole._products, part._products, strict=True)]
            whole._with_seconds = [a + b for a, b in zip(whole._with_seconds, part._with_seconds, strict=True)]
        return whole

    def line(self, known: tuple[float, float] | None = None) -> tuple[float, float] | None:
        """Return the seconds per token without streams and the seconds that each stream adds, or None if unknown.

        `known`: the previous line. Reports that do not differ enough shift its level but keep its slope.
        """
        if self._weight < LEAST_TOKENS:
            return known
        mean = self._means[0] / self._weight
        seconds = self._means[_FACTORS] / self._weight
        spread = self._products[0] / self._weight - mean * mean
        if spread > (LEAST_SPREAD * mean) ** 2:
            slope = max((self._with_seconds[0] / self._weight - mean * seconds) / spread, 0.0)
        elif known is not None:
            slope = known[1]
        else:
            return None
        return max(seconds - slope * mean, 0.0), slope

    def fit(self, prior: StepTime | None) -> StepTime | None:
        """Fit the step time to the samples and the prior; None if both say too little.

        Least squares. The prior (from the pool) counts as PRIOR_TOKENS samples, so that uniform reports shift the level
        but not the cost of a stream. No cost is negative: such a factor is left out.
        """
        if prior is None and self.line() is None:
            return None
        if self._weight <= 0.0:
            return prior
        weight = self._weight
        means = [value / weight for value in self._means]
        matrix = [[0.0] * _FACTORS for _ in range(_FACTORS)]
        for place, (i, j) in enumerate(_PAIRS):
            matrix[i][j] = matrix[j][i] = self._products[place] / weight - means[i] * means[j]
        vector = [self._with_seconds[i] / weight - means[i] * means[_FACTORS] for i in range(_FACTORS)]
        known = (
            (0.0, 0.0, 0.0)
            if prior is None
            else (prior.seconds_a_stream, prior.seconds_a_context_token, prior.seconds_a_prompt_token)
        )
        for i, spread in enumerate(SPREADS):
            # without a prior, attribute the time to the streams (their spread is sufficient), not to
            # correlated factors
            trust = PRIOR_TOKENS / weight * spread * spread if i or prior is not None else 0.0
            matrix[i][i] += trust
            vector[i] += trust * known[i]
        slopes = _least_squares(matrix, vector)
        alone = means[_FACTORS] - sum(slope * mean for slope, mean in zip(slopes, means, strict=False))
        if prior is not None:
            alone = (weight * alone + PRIOR_TOKENS * prior.alone_seconds) / (weight + PRIOR_TOKENS)
        return StepTime(
            alone_seconds=max(alone, 0.0),
            seconds_a_stream=slopes[0],
            seconds_a_context_token=slopes[1],
            seconds_a_prompt_token=slopes[2],
            most_streams=max(self.most_running, 1.0 if prior is None else prior.most_streams),
            most_context_tokens=max(self.most_context_tokens, 1.0 if prior is None else prior.most_context_tokens),
        )

    def streams_within(self, seconds: float, known: tuple[float, float] | None = None) -> float | None:
        """Return how many streams a pod can run at this inter-token time (0 if not even one), or None if unknown.

        `known`: the previous line.
        """
        line = self.line(known)
        if line is None:
            return None
        alone, slope = line
        if alone + slope > seconds:
            return 0.0
        most = (seconds - alone) / slope if slope > 0.0 else inf
        return min(most, FAR * max(self.most_running, 1.0))

    def seconds_at(self, streams: float, known: tuple[float, float] | None = None) -> float | None:
        """Return the inter-token time with this many streams, or None if unknown. `known`: the previous line."""
        line = self.line(known)
        return None if line is None else line[0] + line[1] * streams


def _least_squares(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Return the factors' slopes, none negative: drop the most negative one and solve again."""
    left = list(range(_FACTORS))
    while left:
        found = _solved([[matrix[i][j] for j in left] for i in left], [vector[i] for i in left])
        worst = min(range(len(left)), key=lambda at: found[at] * SPREADS[left[at]])
        if found[worst] >= 0.0:
            slopes = [0.0] * _FACTORS
            for at, i in enumerate(left):
                slopes[i] = found[at]
            return slopes
        del left[worst]
    return [0.0] * _FACTORS


def _solved(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Solve matrix x = vector for a symmetric, positive semidefinite matrix; a factor without spread gets 0."""
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for i in range(size):
        pivot = rows[i][i]
        if pivot <= 1e-12 * matrix[i][i] or pivot <= 0.0:
            rows[i] = [0.0] * (size + 1)
            continue
        for row in rows[i + 1 :]:
            share = row[i] / pivot
            for j in range(i, size + 1):
                row[j] -= share * rows[i][j]
    found = [0.0] * size
    for i in reversed(range(size)):
        if rows[i][i] > 0.0:
            found[i] = (rows[i][size] - sum(rows[i][j] * found[j] for j in range(i + 1, size))) / rows[i][i]
    return found
