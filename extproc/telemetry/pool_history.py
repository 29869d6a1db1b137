"""The last 15 minutes of one pool: its load, and how long tokens took as this picker and as the pods measured it.

Two ways, which are never added up. `answers`: the streams whose bodies this picker reads (a sample), by class and
model, from the complete request to the token. `pods`: all requests of all pickers as the histograms of the pods count
them, by model and role. docs/reference/live-feed.md has what is shown.
"""

from extproc.slo.judgement import Measured
from extproc.slo.latency_history import INTER_TOKEN_BOUNDS, TTFT_BOUNDS, Key, LatencyHistory
from extproc.telemetry import metrics
from extproc.telemetry.load_history import LoadHistory


class PoolHistory:
    """What is kept of one pool since `began_at`, monotonic seconds."""

    def __init__(self, *, began_at: float = 0.0) -> None:
        self.began_at = began_at
        self.load = LoadHistory()
        # by class and model
        self.ttft = LatencyHistory(TTFT_BOUNDS)
        self.inter_token = LatencyHistory(INTER_TOKEN_BOUNDS)
        # by model and role
        self.pods_ttft = LatencyHistory(metrics.TTFT.bounds)
        self.pods_inter_token = LatencyHistory(metrics.INTER_TOKEN.bounds)

    def measured(self, key: Key, measured: Measured, *, weight: float, now: float) -> None:
        """Take the times of a stream of a class and a model, which stands for `weight` of them."""
        if measured.ttft_seconds is not None:
            self.ttft.add(key, measured.ttft_seconds, weight=weight, now=now)
        if measured.inter_token_seconds is not None:
            self.inter_token.add(key, measured.inter_token_seconds, weight=weight, now=now)
