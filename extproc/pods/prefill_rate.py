"""How many prompt tokens an endpoint computes a second when it has enough to do, and how two reports differ otherwise.

Pure. The rate turns tokens booked on an endpoint into tokens still waiting there (`inflight`).
"""

from extproc.pods.endpoint import NO_TREND, EndpointTrend
from kvmesh.pods.pod_report import EndpointLoad

LEAST_TOKENS = 32  # output tokens in a window from which their mean time means something
# of reports with waiting requests all along: pods count a prompt as a whole when they begin with it, so that what a
# shorter time shows is mostly how the prompts fell into it
LEAST_SECONDS, MOST_SECONDS = 0.5, 10.0
WINDOW_SECONDS = 2.0  # of reports compared for means; counts of shorter ones are too small
# a period shows at most what the pod can do: the best one counts, and fades slowly
FADING_SHARE = 0.01  # a second


class TrendWatch:
    """One endpoint's trend, from one report to the next."""

    def __init__(self) -> None:
        self._previous: EndpointLoad | None = None
        self._waiting_since: EndpointLoad | None = None  # where requests began to wait
        self._rate_then: float | None = None
        self._base: EndpointLoad | None = None  # where the window of the means began
        self.trend = NO_TREND

    def report(self, load: EndpointLoad) -> EndpointTrend:
        """Take a report and return the trend up to it."""
        previous, self._previous = self._previous, load
        if previous is None or restarted(previous, load):
            self._base, self._waiting_since, self.trend = load, None, NO_TREND
            self._prefill_rate(load)
            return self.trend
        base = self._base or previous
        rate = self._prefill_rate(load)
        inter_token, moved = self.trend.inter_token_seconds, self.trend.memory_bytes_per_second
        seconds = load.reported_at - base.reported_at
        if seconds >= WINDOW_SECONDS:
            tokens = load.inter_token_count - base.inter_token_count
            inter_token = (
                (load.inter_token_seconds_sum - base.inter_token_seconds_sum) / tokens
                if tokens >= LEAST_TOKENS
                else None
            )
            if load.memory_bytes_moved is not None and base.memory_bytes_moved is not None:
                moved = (load.memory_bytes_moved - base.memory_bytes_moved) / seconds
            self._base = load
        if (rate, inter_token, moved) != (
            self.trend.prefill_tokens_per_second,
            self.trend.inter_token_seconds,
            self.trend.memory_bytes_per_second,
        ):
            self.trend = EndpointTrend(
                inter_token_seconds=inter_token, memory_bytes_per_second=moved, prefill_tokens_per_second=rate
            )
        return self.trend

    def _prefill_rate(self, load: EndpointLoad) -> float | None:
        """Return the most computed tokens a second of the periods in which requests waited all along.

        A mean of all time would be lower for pods with little to do, and a pod that looks slow is given less.
        """
        known, start = self.trend.prefill_tokens_per_second, self._waiting_since
        if not load.waiting_requests:
            self._waiting_since = None
            return known
        if start is None or load.reported_at - start.reported_at > MOST_SECONDS:
            self._waiting_since, self._rate_then = load, known
            return known
        seconds = load.reported_at - start.reported_at
        computed = (load.prefix_query_tokens - load.prefix_hit_tokens) - (
            start.prefix_query_tokens - start.prefix_hit_tokens
        )
        if seconds < LEAST_SECONDS or computed <= 0:  # none: it waits for memory, not for its turn
            return known
        sample, earlier = computed / seconds, self._rate_then
        return sample if earlier is None else max(sample, earlier * (1.0 - FADING_SHARE * seconds))


def restarted(previous: EndpointLoad, load: EndpointLoad) -> bool:
    """Tell whether another process reports: its counters have begun anew, its cache is empty."""
    return (
        load.prefix_query_tokens < previous.prefix_query_tokens or load.inter_token_count < previous.inter_token_count
    )
