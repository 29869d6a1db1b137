"""How long a request would wait for its first token, without a trained model: moving averages of what pods count.

An endpoint without samples of its own is taken for the pool's median, and before there is one the policy's rate
counts. An estimate without new samples drifts back there within a minute or two, so that a pool that sheds every
request recovers although it gets no samples. Pure; times are arguments, monotonic seconds.

    estimates.report(address, load, now=now)                    # each report, by the scraper's callback
    seconds = expected_ttft(candidate, estimates, now=now)      # choosing.room
    estimates.promised(address, seconds=seconds)                # after the answer: what the error is measured by
    ahead = estimates.drain_seconds(tokens, requests)           # the picker's own queue; Retry-After
"""

from collections.abc import Collection, Mapping
from statistics import median

import msgspec

from extproc.pods.endpoint import EndpointTrend
from extproc.pods.endpoint_samples import LEAST_WEIGHT, MOST_SECONDS, EndpointPace, EndpointSamples, Pace
from extproc.pods.step_times import StepTime, StepTimes
from kvmesh.pods.pod_report import EndpointLoad

BASE_SECONDS = 0.02  # what the shortest prompt takes, until one was measured: about one step
UNCONFIRMED_SECONDS = 15.0  # half-life of samples
AGE_EVERY_SECONDS = 1.0


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
        self._samples: dict[str, EndpointSamples] = {}
        self._paces: dict[str, EndpointPace] = {}
        self._unseen = _unseen(self._policy)
        self._aged_at: float | None = None
        self._step: StepTime | None = None  # of the pool's pods; what was known once stays until it is known better
        self.most_running = 0.0  # at an endpoint of the pool: the median of the most that each ran of late

    def reconfigure(self, *, tokens_per_second: float) -> None:
        """Expect another rate of endpoints of which nothing is known; what was measured stays."""
        before = self._policy
        self._policy = Pace(base_seconds=BASE_SECONDS, seconds_a_token=1.0 / max(tokens_per_second, 1.0))
        if self._pool == before:  # no endpoint has been measured yet
            self._pool = self._policy
            self._unseen = _unseen(self._pool)

    def report(self, endpoint: str, load: EndpointLoad, *, now: float) -> None:
        """Take what the endpoint has counted since its last report."""
        samples = self._samples_of(endpoint)
        samples.report(load, prior=self._pool, step=self._step)
        self._paces[endpoint] = samples.pace(self._pool)
        self.age(now=now)

    def trend(self, endpoint: str, trend: EndpointTrend) -> None:
        """Take how fast it computes prompts while some wait: what to expect where it counts no prefill times."""
        self._samples_of(endpoint).trend_rate = trend.prefill_tokens_per_second

    def promised(self, endpoint: str, *, seconds: float) -> None:
        """Note that a request goes there now and what TTFT it was expected to have.

        vLLM sends a stream's headers before its first token, so that the real TTFT is not seen here: as many first
        tokens as the pod counts are compared with the oldest promises, mean with mean.
        """
        samples = self._samples.get(endpoint)
        if samples is not None:
            samples.promises.append(min(max(seconds, 0.0), MOST_SECONDS))

    def pace(self, endpoint: str) -> EndpointPace:
        """Return what is expected of the endpoint: one look-up."""
        return self._paces.get(endpoint, self._unseen)

    def ttft(
        self, endpoint: str, *, backlog_tokens: float, uncached_tokens: float, waiting_requests: float = 0.0
    ) -> float:
        """Return the seconds to the first token of a request that is sent there now.

        `backlog_tokens` of prompts sent before are not computed yet; `waiting_requests` wait there for a place.
        """
        pace = self._paces.get(endpoint, self._unseen)
        ahead = backlog_tokens * pace.backlog_seconds_a_token
        if waiting_requests > 0.0:
            ahead = max(ahead, waiting_requests / pace.starts_a_second)
        return min(ahead + pace.prefill.seconds(uncached_tokens), MOST_SECONDS)

    def tokens_per_second(self, endpoint: str) -> float | None:
        """Return how fast the endpoint computes many prompts by its own samples, or None before it has any.

        What was computed while it always had prompts counts before what was computed while requests waited.
        """
        samples = self._samples.get(endpoint)
        if samples is None:
            return None
        rate = samples.trend_rate
        if not rate:
            if samples.fit.weight < LEAST_WEIGHT:
                return None
            rate = 1.0 / self._paces[endpoint].backlog_seconds_a_token
        return rate + samples.busy_share * (samples.peak - rate)

    def drain_seconds(self, tokens: float, requests: float, *, endpoints: Collection[str] | None = None) -> float:
        """Return the time until so many queued requests with so many uncached tokens in all have been started.

        `endpoints`: those that take them; None: every one that has reported.
        """
        paces = [self.pace(endpoint) for endpoint in (self._paces if endpoints is None else endpoints)]
        if not paces:
            paces = [self._unseen]
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
                mean_seconds=samples.error_seconds, bias_seconds=samples.bias_seconds, samples=samples.compared
            )
            for endpoint, samples in self._samples.items()
            if samples.compared
        }

    def age(self, *, now: float) -> None:
        """Let estimates drift to the pool's median, once a second at most; each report does it, too."""
        if self._aged_at is None:
            self._aged_at = now
        seconds = now - self._aged_at
        if seconds < AGE_EVERY_SECONDS:
            return
        self._aged_at = now
        share = 0.5 ** (seconds / UNCONFIRMED_SECONDS)
        for samples in self._samples.values():
            samples.fit.fade(share)
            samples.ahead_share += (1.0 - share) * (1.0 - samples.ahead_share)
        known = [
            samples.prefill(self._policy) for samples in self._samples.values() if samples.fit.weight >= LEAST_WEIGHT
        ]
        self._pool = _middle(known) if known else self._policy
        self._unseen = _unseen(self._pool)
        for endpoint, samples in self._samples.items():
            self._paces[endpoint] = samples.pace(self._pool)
        running = [
            samples.running.most_running for samples in self._samples.values() if samples.running.most_running > 0.0
        ]
        self.most_running = median(running) if running else 0.0
        self._step = StepTimes.sum_of(samples.streams.times for samples in self._samples.values()).fit(self._step)

    def forget(self, endpoint: str) -> None:
        """Forget the endpoint: it is gone, or another process."""
        self._samples.pop(endpoint, None)
        self._paces.pop(endpoint, None)

    def _samples_of(self, endpoint: str) -> EndpointSamples:
        samples = self._samples.get(endpoint)
        if samples is None:
            samples = self._samples[endpoint] = EndpointSamples()
            self._paces[endpoint] = samples.pace(self._pool)
        return samples


def _unseen(prior: Pace) -> EndpointPace:
    """Return what is expected of an endpoint that has shown nothing."""
    return EndpointSamples().pace(prior)


def _middle(paces: Collection[Pace]) -> Pace:
    return Pace(
        base_seconds=median(pace.base_seconds for pace in paces),
        seconds_a_token=median(pace.seconds_a_token for pace in paces),
    )
