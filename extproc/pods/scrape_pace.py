"""The scrape interval: the configured one, unless that would cost too much CPU. Pure.

One `ScrapePace` serves all pools of a picker. A scrape costs about 0.2 ms of CPU, so that
`BUSY_A_SECOND` is a fifth of a core: 200 endpoints five times a second, 2,000 every two seconds.
"""

BUSY_A_SECOND = 1000.0  # total scrapes of pools with requests
IDLE_A_SECOND = 8.0  # total scrapes of idle pools: negligible CPU
MODELS_A_SECOND = 50.0  # reads of /v1/models
IDLE_MODELS_A_SECOND = 5.0
IDLE_AFTER_SECONDS = 10.0  # without a request
LONGEST_SECONDS = 250.0
LONGEST_MODELS_SECONDS = 300.0
STALE_INTERVALS = 3.0  # a report is stale after this many intervals, or later if configured


class ScrapePace:
    """Counts the endpoints of all pools and computes the scrape interval of one endpoint."""

    def __init__(self, *, rests: bool = False) -> None:
        """`rests`: scrape pools without requests less often."""
        self.rests = rests
        self.endpoints = 0  # endpoints of all pools
        self.busy = 0  # endpoints of pools with requests

    def interval(self, wanted_seconds: float, *, idle: bool = False) -> float:
        """Return the seconds between two scrapes of one endpoint, at least `wanted_seconds`."""
        if idle and self.rests:
            return min(max(wanted_seconds, 1.0, self.endpoints / IDLE_A_SECOND), LONGEST_SECONDS)
        count = self.busy if self.rests else self.endpoints
        return max(wanted_seconds, count / BUSY_A_SECOND)

    def models_interval(self, wanted_seconds: float, *, idle: bool = False) -> float:
        """Return the seconds between two reads of one endpoint's models."""
        if idle and self.rests:
            return min(max(wanted_seconds, self.endpoints / IDLE_MODELS_A_SECOND), LONGEST_MODELS_SECONDS)
        count = self.busy if self.rests else self.endpoints
        return max(wanted_seconds, count / MODELS_A_SECOND)

    def stale_after(self, wanted_seconds: float, *, interval_seconds: float) -> float:
        """Return the age in seconds at which a report becomes stale, at least `wanted_seconds`."""
        return max(wanted_seconds, STALE_INTERVALS * interval_seconds)
