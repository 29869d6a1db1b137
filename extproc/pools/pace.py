"""So many of something a second and no more, with a burst; for work that is welcome and not needed. Pure."""


class Pace:
    """A virtual clock that runs ahead by one interval for each one taken (the generic cell rate algorithm)."""

    __slots__ = ("_ahead_until", "_burst_seconds", "_interval")

    def __init__(self, *, per_second: float, burst_seconds: float) -> None:
        """Allow `per_second` on average (0: none), and as many at once as `burst_seconds` bring."""
        self._interval = 1.0 / per_second if per_second > 0 else float("inf")
        self._burst_seconds = burst_seconds
        self._ahead_until = 0.0

    def take(self, *, now: float) -> bool:
        """Take one, if there is one to be had at `now` (monotonic seconds)."""
        ahead_until = max(self._ahead_until, now) + self._interval
        if ahead_until - now > self._burst_seconds:
            return False
        self._ahead_until = ahead_until
        return True
