"""How long a request would wait for its first token, without a trained model: moving averages of what pods count.

The books tell of reports, promises and first tokens; `saturation` and the queue ask. Pure; times are arguments,
monotonic seconds. What an endpoint's own samples do not tell the pool's median does, and the policy before that; an
estimate without new samples drifts back there within a minute or two, so that what sheds everything cannot go on for
want of samples.

    estimates.report(address, load, now=now)                    # each report, by the scraper's callback
    seconds = expected_ttft(candidate, estimates, now=now)      # core.saturation
    estimates.promised(address, seconds=seconds)                # behind the answer: what the error is measured by
    ahead = estimates.drain_seconds(tokens, requests)           # the picker's own queue; Retry-After
"""

from collections.abc import Collection, Mapping
from statistics import median

import msgspec

from extproc.pods.endpoint import EndpointTrend
from extproc.pods.endpoint_samples import LEAST_WEIGHT, MOST_SECONDS, EndpointPace, EndpointSamples, Pace, stranger
from kvmesh.pods.pod_report import EndpointLoad

BASE_SECONDS = 0.02  # what the shortest prompt takes, until somebody has shown it: about one step
UNCONFIRMED_SECONDS = 15.0  # half-life of samples
AGE_EVERY_SECONDS = 1.0
FIRST_TOKEN_SHARE = 0.1  # that one counts of a second's reports


class EstimateError(msgspec.Struct, frozen=True, kw_only=True):
    """How far the estimates of one endpoint were off of late; moving means."""

    mean_seconds: float  # |predicted - real|
    bias_seconds: float  # predicted - real: above 0 they are too pessimistic
    samples: int


class LatencyEstimates:
    """What each endpoint's next request must expect."""

    def __init__(self, *, tokens_per_second: float = 8000.0) -> None:
        """`tokens_per_second`: of prompts, at an endpoint of which nothing is known (policy)."""
        self._policy = Pace(base_seconds=BASE_SECONDS, seconds_a_token=1.0 / max(tokens_per_second, 1.0))
        self._pool = self._policy
        self._lines: dict[str, EndpointSamples] = {}
        self._paces: dict[str, EndpointPace] = {}
        self._stranger = stranger(self._policy)
        self._aged_at: float | None = None
        self.usual_running = 0.0  # at an endpoint of the pool: the median of the most that each ran of late

    def reconfigure(self, *, tokens_per_second: float) -> None:
        """Expect another rate of endpoints of which nothing is known; what was measured stays."""
        before = self._policy
        self._policy = Pace(base_seconds=BASE_SECONDS, seconds_a_token=1.0 / max(tokens_per_second, 1.0))
        if self._pool == before:  # nobody has shown anything yet
            self._pool = self._policy
            self._stranger = stranger(self._pool)

    def report(self, endpoint: str, load: EndpointLoad, *, now: float) -> None:
        """Take what the endpoint has counted since its last report."""
        line = self._line(endpoint)
        line.report(load, prior=self._pool)
        self._paces[endpoint] = line.pace(self._pool)
        self.age(now=now)

    def trend(self, endpoint: str, trend: EndpointTrend) -> None:
        """Take how fast it computes prompts while some wait: what to expect where it counts no prefill times."""
        self._line(endpoint).trend_rate = trend.prefill_tokens_per_second

    def promised(self, endpoint: str, *, seconds: float) -> None:
        """Note that a request goes there now and what TTFT it was expected to have.

        vLLM sends a stream's headers before its first token, so that nobody here sees the real one: as many first
        tokens as the pod counts are compared with the oldest promises, mean with mean.
        """
        line = self._lines.get(endpoint)
        if line is not None:
            line.promises.append(min(max(seconds, 0.0), MOST_SECONDS))

    def first_token(
        self,
        endpoint: str,
        *,
        uncached_tokens: int,
        waited_tokens: float,
        seconds: float,
        now: float,
        predicted: float | None = None,
    ) -> float:
        """Take a first token that was really seen; return predicted - real seconds.

        `waited_tokens`: of prompts that were ahead there; `predicted`: what was promised, else what would be now.
        """
        line = self._line(endpoint)
        pace = line.prefill(self._pool)
        tokens = max(uncached_tokens, 0) + max(waited_tokens, 0.0)
        seconds = min(max(seconds, 0.0), MOST_SECONDS)
        expected = pace.seconds(tokens) if predicted is None else predicted
        # where requests wait for a place, the prompts' lengths do not tell how long
        if line.last is None or not line.last.waiting_requests:
            line.fit.add(tokens=tokens, seconds=seconds, expected=pace, share=FIRST_TOKEN_SHARE)
            self._paces[endpoint] = line.pace(self._pool)
        line.error(expected - seconds, times=1)
        self.age(now=now)
        return expected - seconds

    def pace(self, endpoint: str) -> EndpointPace:
        """Return what is expected of the endpoint: one look-up."""
        return self._paces.get(endpoint, self._stranger)

    def ttft(
        self, endpoint: str, *, backlog_tokens: float, uncached_tokens: float, waiting_requests: float = 0.0
    ) -> float:
        """Return the seconds to the first token of a request that is sent there now.

        `backlog_tokens` of prompts sent before are not computed yet; `waiting_requests` wait there for a place.
        """
        pace = self._paces.get(endpoint, self._stranger)
        ahead = backlog_tokens * pace.backlog_seconds_a_token
        if waiting_requests > 0.0:
            ahead = max(ahead, waiting_requests / pace.starts_a_second)
        return min(ahead + pace.prefill.seconds(uncached_tokens), MOST_SECONDS)

    def inter_token(self, endpoint: str) -> float | None:
        """Return the mean seconds from one generated token to the next, or None where too few were generated."""
        return self.pace(endpoint).inter_token_seconds

    def tokens_per_second(self, endpoint: str) -> float | None:
        """Return how fast the endpoint computes many prompts by its own samples, or None before it has any.

        What was computed while it always had prompts counts before what was computed while requests waited.
        """
        line = self._lines.get(endpoint)
        if line is None:
            return None
        rate = line.trend_rate
        if not rate:
            if line.fit.weight < LEAST_WEIGHT:
                return None
            rate = 1.0 / self._paces[endpoint].backlog_seconds_a_token
        return rate + line.busy_share * (line.peak - rate)

    def drain_seconds(self, tokens: float, requests: float, *, endpoints: Collection[str] | None = None) -> float:
        """Return the time until so many queued requests with so many uncached tokens in all have been started.

        `endpoints`: those that take them; None: every one that has reported.
        """
        paces = [self.pace(endpoint) for endpoint in (self._paces if endpoints is None else endpoints)]
        if not paces:
            paces = [self._stranger]
        token_rate = sum(1.0 / pace.backlog_seconds_a_token for pace in paces)
        seen = [pace.queue_starts_a_second for pace in paces if pace.queue_starts_a_second is not None]
        by_requests = 0.0
        if seen and (rate := sum(seen) * len(paces) / len(seen)) > 0.0:  # the others are taken to be as fast
            by_requests = requests / rate
        return min(max(tokens / token_rate, by_requests, 0.0), MOST_SECONDS)

    def errors(self) -> Mapping[str, EstimateError]:
        """Return how far the estimates were off, by endpoint."""
        return {
            endpoint: EstimateError(
                mean_seconds=line.error_seconds, bias_seconds=line.bias_seconds, samples=line.compared
            )
            for endpoint, line in self._lines.items()
            if line.compared
        }

    def age(self, *, now: float) -> None:
        """Let estimates drift to what others show, once a second at most; reports and first tokens do it, too."""
        if self._aged_at is None:
            self._aged_at = now
        seconds = now - self._aged_at
        if seconds < AGE_EVERY_SECONDS:
            return
        self._aged_at = now
        share = 0.5 ** (seconds / UNCONFIRMED_SECONDS)
        for line in self._lines.values():
            line.fit.fade(share)
            line.ahead_share += (1.0 - share) * (1.0 - line.ahead_share)
        known = [line.prefill(self._policy) for line in self._lines.values() if line.fit.weight >= LEAST_WEIGHT]
        self._pool = _middle(known) if known else self._policy
        self._stranger = stranger(self._pool)
        for endpoint, line in self._lines.items():
            self._paces[endpoint] = line.pace(self._pool)
        running = [line.running.usual for line in self._lines.values() if line.running.usual > 0.0]
        self.usual_running = median(running) if running else 0.0

    def forget(self, endpoint: str) -> None:
        """Forget the endpoint: it is gone, or another process."""
        self._lines.pop(endpoint, None)
        self._paces.pop(endpoint, None)

    def _line(self, endpoint: str) -> EndpointSamples:
        line = self._lines.get(endpoint)
        if line is None:
            line = self._lines[endpoint] = EndpointSamples()
            self._paces[endpoint] = line.pace(self._pool)
        return line


def _middle(paces: Collection[Pace]) -> Pace:
    return Pace(
        base_seconds=median(pace.base_seconds for pace in paces),
        seconds_a_token=median(pace.seconds_a_token for pace in paces),
    )
