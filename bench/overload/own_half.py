"""What a tenant would have been given by a half of its own: pure, from its requests to tokens.

Called by `summary`, to compare: who asks for just its share, at random times and with a limit to the wait, does not get
all of it even where nobody else is served.
"""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from math import inf

from bench.overload.script import Outcome


def own_half_tokens(
    outcomes: Iterable[Outcome],
    *,
    begun: Iterable[tuple[float, int]],
    limit_seconds: float,
    begins: float,
    ends: float,
) -> int:
    """Return the work begun from `begins` to `ends` by a server that does these requests alone, in their order.

    It always is half as fast as the class was served just then: `begun` are the times and the tokens of all that was
    begun of it. It knows every wait, and refuses just what it could not begin within `limit_seconds`; nobody comes back
    to it.
    """
    half, free_at, total = _Half(begun), 0.0, 0
    for outcome in sorted(outcomes, key=lambda each: each.due):
        first = max(free_at, half.done_at(outcome.due))
        starts = max(half.reaches(first), outcome.due)
        if starts - outcome.due > limit_seconds:
            continue
        free_at = first + outcome.work_tokens
        if begins <= starts < ends:
            total += outcome.work_tokens
    return total


class _Half:
    """Half of what a class was given: tokens done by a time, evenly from one beginning to the next."""

    def __init__(self, begun: Iterable[tuple[float, int]]) -> None:
        ordered = sorted(begun)
        self._times = [0.0, *(seconds for seconds, _ in ordered)]
        self._done = [0.0, *accumulate(tokens / 2 for _, tokens in ordered)]

    def done_at(self, seconds: float) -> float:
        """Return the tokens done until then."""
        return _between(self._times, self._done, seconds, beyond=self._done[-1])

    def reaches(self, tokens: float) -> float:
        """Return when so many tokens are done; inf: never."""
        return _between(self._done, self._times, tokens, beyond=inf)


def _between(xs: list[float], ys: list[float], x: float, *, beyond: float) -> float:
    """Return y at x on the line through these points, whose first is 0, 0."""
    index = bisect_left(xs, x)
    if index == len(xs):
        return beyond
    if xs[index] == x:
        return ys[index]
    part = (x - xs[index - 1]) / (xs[index] - xs[index - 1])
    return ys[index - 1] + part * (ys[index] - ys[index - 1])
