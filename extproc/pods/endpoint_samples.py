"""One endpoint's speed from its reports: prefill samples, decaying sums, expected TTFTs, and the resulting pace.

`latency_estimate` keeps one `EndpointSamples` per endpoint. Pure; times in seconds.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from extproc.pods.step_times import StepTime
from extproc.pods.stream_samples import StreamPace, StreamSamples
from kvmesh.pods.pod_report import EndpointLoad

SCALE_TOKENS = 4096.0  # a prompt this long says as much about the time per token as about the base time
PRIOR_WEIGHT = 0.05  # weight of the prior, in samples
FADING = 0.95  # decay of the sums with each whole sample
MOST_FACTOR = 4.0  # a sample is clamped to this factor above or below the expectation,
MOST_SURPRISE_SECONDS = 0.1  # plus this above: a multiple of a tiny time is still tiny
LEAST_SECONDS_A_TOKEN, MOST_SECONDS_A_TOKEN = 1e-7, 0.1
MOST_BASE_SECONDS = 60.0
MOST_TOKENS = 1e7


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """The prefill time of a prompt."""

    base_seconds: float  # of the shortest prompt
    seconds_a_token: float

    def seconds(self, tokens: float) -> float:
        """Return the prefill time of this many tokens."""
        return self.base_seconds + self.seconds_a_token * tokens


class FirstTokenFit:
    """Linear fit of prefill time over tokens: sums over weighted samples, solved by `pace`."""

    __slots__ = ("_s", "_su", "_suu", "_suy", "_sy")

    def __init__(self) -> None:
        self._s = self._su = self._suu = self._sy = self._suy = 0.0

    @property
    def weight(self) -> float:
        """Weight of the samples: up to 1 after the first one, up to 20 after many."""
        return self._s + self._suu

    def add(self, *, tokens: float, seconds: float, expected: Pace, share: float) -> None:
        """Add a sample with a weight of `share`; its distance from `expected` is bounded."""
        tokens = min(max(tokens, 0.0), MOST_TOKENS)
        likely = expected.seconds(tokens)
        seconds = min(max(seconds, likely / MOST_FACTOR), likely * MOST_FACTOR + MOST_SURPRISE_SECONDS)
        u = tokens / SCALE_TOKENS
        weight = share / ((1.0 + u) * (1.0 + u))
        self.fade(FADING**share)
        self._s += weight
        self._su += weight * u
        self._suu += weight * u * u
        self._sy += weight * seconds
        self._suy += weight * u * seconds

    def fade(self, share: float) -> None:
        """Scale the weight of all samples by `share` (0..1)."""
        self._s *= share
        self._su *= share
        self._suu *= share
        self._sy *= share
        self._suy *= share

    def pace(self, prior: Pace) -> Pace:
        """Return the best fit; both numbers are bounded, and neither is negative."""
        base, slope = prior.base_seconds, prior.seconds_a_token * SCALE_TOKENS
        s, suu = self._s + PRIOR_WEIGHT, self._suu + PRIOR_WEIGHT
        sy, suy = self._sy + PRIOR_WEIGHT * base, self._suy + PRIOR_WEIGHT * slope
        # never 0: s x suu >= su x su held before the prior added weight to s and suu
        det = s * suu - self._su * self._su
        base = (sy * suu - self._su * suy) / det
        slope = (s * suy - self._su * sy) / det
        least = LEAST_SECONDS_A_TOKEN * SCALE_TOKENS
        if base < 0.0:
            base, slope = 0.0, suy / suu
        elif slope < least:
            slope = least
            base = (sy - self._su * slope) / s
        return Pace(
            base_seconds=min(max(base, 0.0), MOST_BASE_SECONDS),
            seconds_a_token=min(max(slope / SCALE_TOKENS, LEAST_SECONDS_A_TOKEN), MOST_SECONDS_A_TOKEN),
        )


# a request that starts within this time only waits for the scheduler's next step
LEAST_WAIT_SECONDS = 0.1
FADING_SECONDS = 30.0  # half-life of `most_running` and of the starts while others wait
LEAST_SECONDS = 0.3  # of queueing; with less, the rate of starts means nothing
LESS_SECONDS = 2.0  # half-life of the limit's decline to fewer running requests: memory may be short only for a while
STARTS_SECONDS = 1.0  # half-life of the starts
# time in which the limit doubles while no request waits. Picks hardly exceed the limit, and requests on their way count
# as open, too: without growth the pod would never be seen to run more
GROWTH_SECONDS = 3.0
# running / limit: the limit grows above the first and below the second. In between, the empty queue of a busy pod may
# last only a moment and must not raise the limit beyond the pod's capacity
REACHED_SHARE, QUIET_SHARE = 0.9, 0.5
MOST_LIMIT = 4096.0  # above, there is no limit
LONGEST_SECONDS = 60.0  # cap on the growth per report: 2.0 ** x would overflow


@dataclass(slots=True, eq=False)
class RunningLimit:
    """How many requests one endpoint runs at a time, and how fast it starts waiting requests."""

    limit: float | None = None  # running requests while others wait; None until a queue was seen
    most_running: float = 0.0  # recent maximum
    starts_a_second: float = 0.0  # recent rate, with or without a queue
    is_queued: bool = False  # at the last report, more requests waited than start within LEAST_WAIT_SECONDS
    _busy_starts: float = 0.0
    _busy_seconds: float = 0.0

    @property
    def busy_starts_a_second(self) -> float | None:
        """Requests started per second while others wait (the speed of its queue), or None without a recent queue."""
        if self._busy_seconds < LEAST_SECONDS:
            return None
        return self._busy_starts / self._busy_seconds

    def report(self, load: EndpointLoad, *, seconds: float, starts: int) -> None:
        """Take a report, the time since the last one, and the requests that got their first token in that time.

        A pod without these counters (a server other than vLLM) does not show the speed of its queue.
        """
        share = 0.5 ** (seconds / FADING_SECONDS)
        running = float(load.running_requests)
        self.most_running = max(running, self.most_running * share)
        self._busy_starts *= share
        self._busy_seconds *= share
        self.starts_a_second += (1.0 - 0.5 ** (seconds / STARTS_SECONDS)) * (starts / seconds - self.starts_a_second)
        is_queued = load.waiting_requests > self.starts_a_second * LEAST_WAIT_SECONDS
        # include the window in which the queue empties: full windows alone are biased towards slow ones
        if self.is_queued and (load.first_token_count or load.prefill_count):
            self._busy_starts += starts
            self._busy_seconds += seconds
        if self.is_queued and is_queued:
            if self.limit is None:
                self.limit = max(running, 1.0)
            elif running < self.limit:
                self.limit -= (1.0 - 0.5 ** (seconds / LESS_SECONDS)) * (self.limit - max(running, 1.0))
        if self.limit is not None and running > self.limit:
            self.limit = running
        is_telling = self.limit is not None and not QUIET_SHARE <= running / self.limit < REACHED_SHARE
        if self.limit is not None and is_telling and not load.waiting_requests:
            self.limit *= 2.0 ** (min(seconds, LONGEST_SECONDS) / GROWTH_SECONDS)
            if self.limit > MOST_LIMIT:
                self.limit = None
        self.is_queued = is_queued


FETCHED_SECONDS = 300.0  # after a fetch, prefill counts of ending requests may come from another pod
WINDOW_SECONDS = 5.0  # half-life of the sums: requests end in bursts
LEAST_SPAN_SECONDS = 0.05  # between two reports; below, one has overtaken the other
LEAST_WEIGHT = 0.5  # an endpoint's samples count for the pool from this weight on
TYPICAL_TOKENS = 512.0  # uncached tokens of a request, before any was seen
LEAST_TOKENS, LEAST_WALL_SECONDS = 1.0, 1.0  # computed tokens and time; fewer give no throughput
LEAST_PEAK_SECONDS, LEAST_PEAK_TOKENS = 3.0, 1000.0  # busy time and tokens; fewer give no peak throughput
PEAK_SECONDS = 10.0  # half-life of the peak throughput, in busy seconds
# busy share of the time: above the first, throughput starts to show the endpoint's capacity; at the second, it alone
# counts
BUSY_SHARE, FULLY_BUSY_SHARE = 0.85, 1.0
LEAST_GENERATED = 32.0  # tokens; the mean time of fewer means nothing
MOST_PROMISES = 1000  # expected TTFTs kept until their first tokens come
LEAST_AHEAD_SHARE = 0.25  # lower bound of `ahead_share`, even if shared steps hide the backlog
LEAST_AHEAD_SECONDS = 0.02  # expected wait for the backlog; shorter ones are not compared with the real TTFT
AHEAD_GAIN = 0.3  # step towards the observed share, per comparison
COMPARE_SECONDS = 1.0  # between two comparisons of expected and real TTFTs
ERROR_SHARE = 0.1  # weight of the newest error in the moving mean
MOST_SECONDS = 1e6  # upper bound of every estimate


class EndpointPace(msgspec.Struct, frozen=True, kw_only=True):
    """The expected speed of one endpoint, until its next report."""

    prefill: Pace  # of one prompt
    backlog_seconds_a_token: float  # of many prompts: includes their overhead and the time spent decoding
    request_seconds: float  # prefill time of its average request
    starts_a_second: float  # request starts under load; an optimistic guess until measured
    seen_starts_a_second: float  # recent starts, with a queue or in all, whichever is higher; never a guess
    queue_starts_a_second: float | None  # recent starts while others waited, or None without a recent queue
    running_limit: float | None  # requests that it runs while others wait; None until a queue was seen
    most_running: float  # recent maximum
    inter_token_seconds: float | None
    first_token_seconds: float  # recent mean TTFT by the pod's own count, 0 without one
    streams: StreamPace | None = None  # None while the cost of one more stream is unknown
    preempted_at: float = float("-inf")  # monotonic seconds of the last report with a new preemption


@dataclass(slots=True, eq=False)
class EndpointSamples:
    """One endpoint's samples, and decaying sums over its reports."""

    last: EndpointLoad | None = None
    compared_to: EndpointLoad | None = None
    fit: FirstTokenFit = field(default_factory=FirstTokenFit)
    running: RunningLimit = field(default_factory=RunningLimit)
    streams: StreamSamples = field(default_factory=StreamSamples)
    trend_rate: float | None = None
    wall_seconds: float = 0.0
    queued_seconds: float = 0.0
    first_token_seconds: float = 0.0
    first_tokens: float = 0.0
    prefill_seconds: float = 0.0
    prefill_requests: float = 0.0
    prefill_tokens: float = 0.0
    busy_seconds: float = 0.0  # with some prompt in prefill
    beside_seconds: float = 0.0  # see `_newly_busy`
    fetched_at: float = float("-inf")  # last report with a new fetch from another pod's cache
    ended_at: float = 0.0  # last report with ended requests
    peak: float = 0.0  # recent peak throughput: prompt tokens per busy second, over some seconds
    generation_seconds: float = 0.0
    generated: float = 0.0
    request_seconds: float = 0.0
    ahead_share: float = 1.0  # share of the backlog's time that really delays the next request
    promises: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_PROMISES))
    error_seconds: float = 0.0
    bias_seconds: float = 0.0
    compared: int = 0

    @property
    def busy_share(self) -> float:
        """How far (0..1) its recent throughput shows its capacity: 1 if it had prompts all the time."""
        if self.peak <= 0.0:
            return 0.0
        share = (self.prefill_seconds / self.wall_seconds - BUSY_SHARE) / (FULLY_BUSY_SHARE - BUSY_SHARE)
        return min(max(share, 0.0), 1.0)

    def report(self, load: EndpointLoad, *, prior: Pace, step: StepTime | None = None) -> None:
        """Add the counts since the last report; a counter reset starts over.

        `prior` and `step` are the pool's estimates.
        """
        last = self.last
        if last is None or restarted(last, load) or load.first_token_count < last.first_token_count:
            self.last = self.compared_to = load
            self.ended_at = load.reported_at
            self.beside_seconds = 0.0
            self.promises.clear()
            return
        seconds = load.reported_at - last.reported_at
        if seconds < LEAST_SPAN_SECONDS:
            return
        self.last = load
        starts = load.first_token_count - last.first_token_count
        # without a count of first tokens use the count of ended requests, which is as large
        self.running.report(load, seconds=seconds, starts=starts or max(load.prefill_count - last.prefill_count, 0))
        self._add(last, load, seconds=seconds, prior=prior)
        self.streams.report(last, load, pool=step)
        self._compare(load)

    def _add(self, last: EndpointLoad, load: EndpointLoad, *, seconds: float, prior: Pace) -> None:
        share = 0.5 ** (seconds / WINDOW_SECONDS)
        ended = max(load.prefill_count - last.prefill_count, 0)
        tokens = load.prefill_computed_tokens - last.prefill_computed_tokens
        begun_only = not load.prefill_computed_tokens  # older versions
        if begun_only:
            tokens = (load.prefix_query_tokens - load.prefix_hit_tokens) - (
                last.prefix_query_tokens - last.prefix_hit_tokens
            )
        took = max(load.prefill_seconds_sum - last.prefill_seconds_sum, 0.0)
        if load.fetched_bytes > last.fetched_bytes:
            self.fetched_at = load.reported_at
        if load.reported_at - self.fetched_at < FETCHED_SECONDS:
            # vLLM counts prefill fetched from other pods as its own, with almost no time
            ended, tokens, took = 0, 0, 0.0
        self.wall_seconds = self.wall_seconds * share + seconds
        self.queued_seconds = self.queued_seconds * share + (seconds if self.running.is_queued else 0.0)
        self.first_tokens = self.first_tokens * share + load.first_token_count - last.first_token_count
        self.first_token_seconds = self.first_token_seconds * share + max(
            load.first_token_seconds_sum - last.first_token_seconds_sum, 0.0
        )
        self.prefill_requests = self.prefill_requests * share + ended
        self.prefill_tokens = self.prefill_tokens * share + max(tokens, 0)
        self.prefill_seconds = self.prefill_seconds * share + took
        # the tokens of started prompts do not match the times of ended requests
        busy = seconds if begun_only else self._newly_busy(load.reported_at, took=took, ended=ended)
        self.busy_seconds = self.busy_seconds * share + busy
        self.peak *= 0.5 ** (busy / PEAK_SECONDS)
        if self.busy_seconds > LEAST_PEAK_SECONDS and self.prefill_tokens > LEAST_PEAK_TOKENS:
            self.peak = max(self.peak, self.prefill_tokens / self.busy_seconds)
        self.generated = self.generated * share + max(load.inter_token_count - last.inter_token_count, 0)
        self.generation_seconds = self.generation_seconds * share + max(
            load.inter_token_seconds_sum - last.inter_token_seconds_sum, 0.0
        )
        if ended and took > 0.0 and tokens > 0:
            # prompts in the same steps count the same time: scale their sum down to the wall time
            alone = min(self.wall_seconds / self.prefill_seconds, 1.0)
            self.fit.add(
                tokens=tokens / ended,
                seconds=took * alone / ended,
                expected=self.prefill(prior),
                share=min(seconds, 1.0),
            )

    def _newly_busy(self, now: float, *, took: float, ended: int) -> float:
        """Return the seconds with some prompt in prefill that no earlier report has covered.

        Concurrent prefills add up to more than the wall time. The excess over the time since the last report with ended
        requests is carried over, up to one mean prefill: it stands for prompts that are still in prefill.
        """
        if not ended:
            return 0.0
        counted = took + self.beside_seconds
        busy = min(counted, now - self.ended_at)
        self.beside_seconds = min(counted - busy, took / ended)
        self.ended_at = now
        return busy

    def _compare(self, load: EndpointLoad) -> None:
        since = self.compared_to
        if since is None or load.reported_at - since.reported_at < COMPARE_SECONDS:
            return
        self.compared_to = load
        first_tokens = load.first_token_count - since.first_token_count
        promises = self.promises
        if first_tokens <= 0 or not promises:
            return
        kept = [promises.popleft() for _ in range(min(first_tokens, len(promises)))]
        promised = sum(kept) / len(kept)
        real = max(load.first_token_seconds_sum - since.first_token_seconds_sum, 0.0) / first_tokens
        self.error(promised - real, times=len(kept))
        ahead = promised - self.request_seconds
        if ahead > LEAST_AHEAD_SECONDS and not self.running.is_queued:
            # the times of prompts that share steps already include each other: the backlog would count twice
            share = self.ahead_share * max(real - self.request_seconds, 0.0) / ahead
            self.ahead_share += AHEAD_GAIN * (min(max(share, LEAST_AHEAD_SHARE), 1.0) - self.ahead_share)

    def error(self, seconds: float, *, times: int) -> None:
        """Add the error (predicted - real) of this many requests."""
        seconds = min(max(seconds, -MOST_SECONDS), MOST_SECONDS)
        share = ERROR_SHARE if self.compared else 1.0
        self.error_seconds += share * (abs(seconds) - self.error_seconds)
        self.bias_seconds += share * (seconds - self.bias_seconds)
        self.compared += times

    def prefill(self, pool: Pace) -> Pace:
        """Return the prefill pace from its own samples, or without them from its trend or the pool."""
        prior = pool
        if self.trend_rate is not None and self.trend_rate > 0.0:
            prior = Pace(base_seconds=pool.base_seconds, seconds_a_token=1.0 / self.trend_rate)
        return self.fit.pace(prior)

    def _backlog_seconds_a_token(self, prefill: Pace) -> float:
        """Return the time per token of a backlog: the busier the pod, the more its own throughput counts."""
        alone = prefill.seconds_a_token * self.ahead_share
        if self.prefill_tokens < LEAST_WEIGHT or self.wall_seconds <= 0.0:
            return alone
        share = self.queued_seconds / self.wall_seconds
        each = min(self.prefill_seconds, self.wall_seconds) / self.prefill_tokens
        each = alone + share * (each - alone)
        if self.prefill_tokens > LEAST_TOKENS and self.wall_seconds > LEAST_WALL_SECONDS:
            # recent throughput is a lower bound of capacity. Short prompts take whole steps, which would take as long
            # with ten times the tokens: as a cost per token they would keep the pod half idle and confirm themselves
            each = min(each, self.wall_seconds / self.prefill_tokens)
        if (busy := self.busy_share) > 0.0:
            # the times of prompts that share steps show how long the steps take, not how much they compute
            each += busy * (1.0 / self.peak - each)
        return min(max(each, LEAST_SECONDS_A_TOKEN), MOST_SECONDS_A_TOKEN)

    def pace(self, pool: Pace) -> EndpointPace:
        """Return the current estimates."""
        prefill = self.prefill(pool)
        tokens = self.prefill_tokens / self.prefill_requests if self.prefill_requests > LEAST_WEIGHT else TYPICAL_TOKENS
        self.request_seconds = request_seconds = max(prefill.seconds(tokens), 1e-4)
        queue_starts = self.running.busy_starts_a_second
        starts = 1.0 / request_seconds if queue_starts is None else queue_starts
        return EndpointPace(
            prefill=prefill,
            backlog_seconds_a_token=self._backlog_seconds_a_token(prefill),
            request_seconds=request_seconds,
            # its recent rate is a lower bound
            starts_a_second=max(starts, self.running.starts_a_second, 0.01),
            seen_starts_a_second=max(queue_starts or 0.0, self.running.starts_a_second),
            queue_starts_a_second=queue_starts,
            running_limit=self.running.limit,
            most_running=self.running.most_running,
            inter_token_seconds=self.generation_seconds / self.generated if self.generated >= LEAST_GENERATED else None,
            first_token_seconds=(
                min(self.first_token_seconds / self.first_tokens, MOST_SECONDS)
                if self.first_tokens > LEAST_WEIGHT
                else 0.0
            ),
            streams=self.streams.pace,
            preempted_at=self.streams.preempted_at,
        )


def restarted(previous: EndpointLoad, load: EndpointLoad) -> bool:
    """Tell whether the pod has restarted: its counters were reset, and its cache is empty."""
    return (
        load.prefix_query_tokens < previous.prefix_query_tokens or load.inter_token_count < previous.inter_token_count
    )
