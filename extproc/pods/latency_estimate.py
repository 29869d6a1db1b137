"""TTFT estimates without a trained model: moving averages of pods' counters.

An endpoint without samples gets the pool's median, or the policy's rate while there is none. Without new
samples an estimate drifts back there within a minute or two, so that a pool that sheds every request, and so gets no
samples, recovers. Pure; times are arguments, monotonic seconds.

    estimates.report(address, load, now=now)                    # each report, by the scraper's callback
    seconds = expected_ttft(candidate, estimates, now=now)      # choosing.room
    estimates.promised(address, seconds=seconds)                # after the decision: to measure the error later
    ahead = estimates.drain_seconds(tokens, requests)           # the picker's own queue; Retry-After
"""

from collections.abc import Collection, Mapping
from statistics import median

import msgspec

from extproc.pods.endpoint import EndpointTrend
from extproc.pods.endpoint_samples import LEAST_WEIGHT, MOST_SECONDS, EndpointPace, EndpointSamples, Pace
from extproc.pods.step_times import StepTime, StepTimes
from kvmesh.pods.pod_report import EndpointLoad

BASE_SECONDS = 0.02  # prefill time of the shortest prompt until measured: about one step
UNCONFIRMED_SECONDS = 15.0  # half-life of the samples' weight
AGE_EVERY_SECONDS = 1.0


class EstimateError(msgspec.Struct, frozen=True, kw_only=True):
    """Recent error of one endpoint's TTFT estimates; moving means."""

    mean_seconds: float  # |predicted - real|
    bias_seconds: float  # predicted - real; too pessimistic above 0
    samples: int


class LatencyEstimates:
    """The expected speed of each endpoint."""

    def __init__(self, *, tokens_per_second: float = 8000.0) -> None:
        """`tokens_per_second`: the policy's prefill rate, for endpoints without samples."""
        self._policy = Pace(base_seconds=BASE_SECONDS, seconds_a_token=1.0 / max(tokens_per_second, 1.0))
        self._pool = self._policy
        self._samples: dict[str, EndpointSamples] = {}
        self._paces: dict[str, EndpointPace] = {}
        self._unseen = _unseen(self._policy)
        self._aged_at: float | None = None
        self._step: StepTime | None = None  # fit over the pool's pods; stays until there is a better one
        self.most_running = 0.0  # median of the endpoints' recent maxima of running requests

    def reconfigure(self, *, tokens_per_second: float) -> None:
        """Set the prefill rate of endpoints without samples; measurements stay."""
        before = self._policy
        self._policy = Pace(base_seconds=BASE_SECONDS, seconds_a_token=1.0 / max(tokens_per_second, 1.0))
        if self._pool == before:  # no endpoint has been measured yet
            self._pool = self._policy
            self._unseen = _unseen(self._pool)

    def report(self, endpoint: str, load: EndpointLoad, *, now: float) -> None:
        """Add the endpoint's counts since its last report."""
        samples = self._samples_of(endpoint)
        samples.report(load, prior=self._pool, step=self._step)
        self._paces[endpoint] = samples.pace(self._pool)
        self.age(now=now)

    def trend(self, endpoint: str, trend: EndpointTrend) -> None:
        """Take the prefill rate under load: the estimate for a pod that does not count prefill times."""
        self._samples_of(endpoint).trend_rate = trend.prefill_tokens_per_second

    def promised(self, endpoint: str, *, seconds: float) -> None:
        """Note the expected TTFT of a request that is sent there now.

        The picker does not see the real TTFT, as vLLM sends a stream's headers before its first token. So the mean TTFT
        of the first tokens that the pod counts is compared with the mean of as many expectations, oldest first.
        """
        samples = self._samples.get(endpoint)
        if samples is not None:
            samples.promises.append(min(max(seconds, 0.0), MOST_SECONDS))

    def pace(self, endpoint: str) -> EndpointPace:
        """Return the endpoint's expected speed, in a single dict look-up."""
        return self._paces.get(endpoint, self._unseen)

    def ttft(
        self, endpoint: str, *, backlog_tokens: float, uncached_tokens: float, waiting_requests: float = 0.0
    ) -> float:
        """Return the TTFT in seconds of a request that is sent there now.

        `backlog_tokens`: tokens of earlier prompts still to compute. `waiting_requests`: requests waiting for a slot.
        """
        pace = self._paces.get(endpoint, self._unseen)
        ahead = backlog_tokens * pace.backlog_seconds_a_token
        if waiting_requests > 0.0:
            ahead = max(ahead, waiting_requests / pace.starts_a_second)
        return min(ahead + pace.prefill.seconds(uncached_tokens), MOST_SECONDS)

    def tokens_per_second(self, endpoint: str) -> float | None:
        """Return the endpoint's prefill rate under load by its own samples, or None without any.

        The busier it is, the more its peak throughput counts versus its trend.
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
        """Return the seconds until a queue of `requests` with `tokens` uncached tokens in all has been started.

        `endpoints`: the endpoints that serve the queue, or None for all that have reported.
        """
        paces = [self.pace(endpoint) for endpoint in (self._paces if endpoints is None else endpoints)]
        if not paces:
            paces = [self._unseen]
        token_rate = sum(1.0 / pace.backlog_seconds_a_token for pace in paces)
        seen = [pace.queue_starts_a_second for pace in paces if pace.queue_starts_a_second is not None]
        by_requests = 0.0
        if seen and (rate := sum(seen) * len(paces) / len(seen)) > 0.0:  # the rest count as equally fast
            by_requests = requests / rate
        return min(max(tokens / token_rate, by_requests, 0.0), MOST_SECONDS)

    def errors(self) -> Mapping[str, EstimateError]:
        """Return the estimates' error by endpoint."""
        return {
            endpoint: EstimateError(
                mean_seconds=samples.error_seconds, bias_seconds=samples.bias_seconds, samples=samples.compared
            )
            for endpoint, samples in self._samples.items()
            if samples.compared
        }

    def age(self, *, now: float) -> None:
        """Let estimates drift to the pool's median, at most once a second; each report calls this, too."""
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
        """Forget an endpoint that is gone or has restarted."""
        self._samples.pop(endpoint, None)
        self._paces.pop(endpoint, None)

    def _samples_of(self, endpoint: str) -> EndpointSamples:
        samples = self._samples.get(endpoint)
        if samples is None:
            samples = self._samples[endpoint] = EndpointSamples()
            self._paces[endpoint] = samples.pace(self._pool)
        return samples


def _unseen(prior: Pace) -> EndpointPace:
    return EndpointSamples().pace(prior)


def _middle(paces: Collection[Pace]) -> Pace:
    return Pace(
        base_seconds=median(pace.base_seconds for pace in paces),
        seconds_a_token=median(pace.seconds_a_token for pace in paces),
    )
