"""What one more stream does to the time a token on pods of one role: learned from their own counters. Pure.

A step's time grows with the streams in it: a line through (running requests, mean time a token) of all reports, in
which old ones fade. Before the reports differ enough to show a slope, nothing is known.
"""

from dataclasses import dataclass
from math import inf

HALF_LIFE_SECONDS = 600.0
LEAST_TOKENS = 200.0  # from which a line means something
LEAST_SPREAD = 0.15  # standard deviation of the running requests as a share of their mean, likewise
FAR = 4.0  # times the most that was seen to run: beyond that the line says nothing


@dataclass(slots=True, eq=False)
class StepTimes:
    """Weighted sums; a token is one sample."""

    most_running: float = 0.0  # on one pod, of late
    _weight: float = 0.0
    _running: float = 0.0
    _running_squared: float = 0.0
    _seconds: float = 0.0
    _running_seconds: float = 0.0

    def fade(self, seconds: float) -> None:
        """Let what is known count for less after so many seconds."""
        share = 0.5 ** (seconds / HALF_LIFE_SECONDS)
        self._weight *= share
        self._running *= share
        self._running_squared *= share
        self._seconds *= share
        self._running_seconds *= share
        self.most_running *= share

    def add(self, *, running: float, tokens: float, seconds_a_token: float) -> None:
        """Take what one pod has counted between two reports: its mean time a token while so many ran."""
        self.most_running = max(self.most_running, running)
        self._weight += tokens
        self._running += tokens * running
        self._running_squared += tokens * running * running
        self._seconds += tokens * seconds_a_token
        self._running_seconds += tokens * running * seconds_a_token

    def line(self) -> tuple[float, float] | None:
        """Return the seconds a token of a pod that runs nothing else, and what one more stream adds; None: unknown."""
        if self._weight < LEAST_TOKENS:
            return None
        mean = self._running / self._weight
        spread = self._running_squared / self._weight - mean * mean
        if spread <= (LEAST_SPREAD * mean) ** 2:
            return None
        seconds = self._seconds / self._weight
        slope = max((self._running_seconds / self._weight - mean * seconds) / spread, 0.0)
        return max(seconds - slope * mean, 0.0), slope

    def streams_within(self, seconds: float) -> float | None:
        """Return how many streams a pod runs at so many seconds a token: 0 where not even one; None: unknown."""
        line = self.line()
        if line is None:
            return None
        alone, slope = line
        if alone + slope > seconds:
            return 0.0
        most = (seconds - alone) / slope if slope > 0.0 else inf
        return min(most, FAR * max(self.most_running, 1.0))

    def seconds_at(self, streams: float) -> float | None:
        """Return the time a token where so many run; None: unknown."""
        line = self.line()
        return None if line is None else line[0] + line[1] * streams
