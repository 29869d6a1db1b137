"""When refused clients are asked to come back: one after the other, as fast as the pool can serve them. Pure.

A constant Retry-After brings everybody back at the same moment, to be refused again. Here each refusal takes a place in
a line that exists in time only: it begins when the class's estimate is expected to be within its target, and grows by
the work of each request that was sent away.
"""

from collections.abc import Callable


class RetrySlots:
    """The line of one class in one pool. Times are monotonic seconds."""

    def __init__(self, *, least_seconds: float, most_seconds: float, jitter: float) -> None:
        """`jitter`: up to this share of a wait is added by chance, or taken where it is the longest there is."""
        self._least_seconds = least_seconds
        self._most_seconds = most_seconds
        self._jitter = jitter
        self._end = float("-inf")

    def after(self, *, wait_seconds: float, work_seconds: float, now: float, random: Callable[[], float]) -> float:
        """Return in how many seconds the client shall ask again.

        `wait_seconds`: until there would be room for it were it the only one; `work_seconds`: what the pool needs for
        it. `random` returns 0..1.
        """
        begin = max(self._end, now + wait_seconds)
        # a line longer than the longest wait is told nobody: those at its end are spread by chance alone
        self._end = min(begin + work_seconds, now + self._most_seconds)
        seconds = max(begin - now, self._least_seconds)
        if seconds >= self._most_seconds:
            return self._most_seconds * (1.0 - self._jitter * random() / (1.0 + self._jitter))
        return min(seconds * (1.0 + self._jitter * random()), self._most_seconds)
