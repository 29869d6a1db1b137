"""What one endpoint's reports show of its speed: prefill samples, decaying sums, promised TTFTs, the resulting pace.

`latency_estimate` keeps one `EndpointSamples` for each endpoint. Pure; seconds.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec

from extproc.pods.endpoint import NO_TREND, EndpointTrend
from extproc.pods.step_times import StepTime
from extproc.pods.stream_samples import StreamPace, StreamSamples
from kvmesh.pods.pod_report import EndpointLoad

SCALE_TOKENS = 4096.0  # a prompt of so many tokens teaches as much of the inter-token time as of the base
PRIOR_WEIGHT = 0.05  # samples that the prior counts as
FADING = 0.95  # of what was known, with each whole sample
MOST_FACTOR = 4.0  # one sample counts as at most so many times more, or less, than expected
MOST_SURPRISE_SECONDS = 0.1  # beside that: a multiple of very little is very little
LEAST_SECONDS_A_TOKEN, MOST_SECONDS_A_TOKEN = 1e-7, 0.1
MOST_BASE_SECONDS = 60.0
MOST_TOKENS = 1e7


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """What a prompt costs."""

    base_seconds: float  # however short it is
    seconds_a_token: float

    def seconds(self, tokens: float) -> float:
        """Return what so many tokens take."""
        return self.base_seconds + self.seconds_a_token * tokens


class FirstTokenFit:
    """Sums over weighted samples; `pace` solves for the two numbers."""

    __slots__ = ("_s", "_su", "_suu", "_suy", "_sy")

    def __init__(self) -> None:
        self._s = self._su = self._suu = self._sy = self._suy = 0.0

    @property
    def weight(self) -> float:
        """How much is known: up to 1 after the first sample, up to 20 after many."""
        return self._s + self._suu

    def add(self, *, tokens: float, seconds: float, expected: Pace, share: float) -> None:
        """Take a sample that counts as `share` of a whole one; how far it may be from `expected` is bounded."""
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
        """Let what is known count for `share` (0..1) of what it did."""
        self._s *= share
        self._su *= share
        self._suu *= share
        self._sy *= share
        self._suy *= share

    def pace(self, prior: Pace) -> Pace:
        """Return the numbers that fit best; neither is negative, both are bounded."""
        base, slope = prior.base_seconds, prior.seconds_a_token * SCALE_TOKENS
        s, suu = self._s + PRIOR_WEIGHT, self._suu + PRIOR_WEIGHT
        sy, suy = self._sy + PRIOR_WEIGHT * base, self._suy + PRIOR_WEIGHT * slope
        # never 0: s x suu >= su x su before the prior's weight came to both
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


# a request that starts within this time waits for nothing but the scheduler's next step
LEAST_WAIT_SECONDS = 0.1
FADING_SECONDS = 30.0  # half-life of the most that ran, and of the starts while others waited
LEAST_SECONDS = 0.3  # of waiting, from which the starts mean something
LESS_SECONDS = 2.0  # half-life of the way down to fewer running requests: memory may be short for a while
STARTS_SECONDS = 1.0  # half-life of the starts
# in which the limit doubles while no request waits. Picks go little beyond it, and what is on its way is open too:
# without this the pod would never be seen to run more
GROWTH_SECONDS = 3.0
# running requests as a share of the limit: it grows above the first and below the second. In between, an empty queue at
# a busy pod may last for a moment only, and must not raise the limit beyond what the pod can run
REACHED_SHARE, QUIET_SHARE = 0.9, 0.5
MOST_LIMIT = 4096.0  # from which it is none
LONGEST_SECONDS = 60.0  # between two reports that the growth counts: 2 ** more is no float at some time


@dataclass(slots=True, eq=False)
class RunningLimit:
    """How many requests one endpoint runs at a time, and how fast it starts those that wait."""

    limit: float | None = None  # requests that run when others wait; None: none was seen to wait
    most_running: float = 0.0  # of late
    starts_a_second: float = 0.0  # of late, whether others waited or not
    is_queued: bool = False  # at the last report: more waited than the next step takes in
    _busy_starts: float = 0.0
    _busy_seconds: float = 0.0

    @property
    def busy_starts_a_second(self) -> float | None:
        """Requests that it starts a second while others wait: how fast its queue moves. None: not seen of late."""
        if self._busy_seconds < LEAST_SECONDS:
            return None
        return self._busy_starts / self._busy_seconds

    def report(self, load: EndpointLoad, *, seconds: float, starts: int) -> None:
        """Take a report, the time since the last one and the requests that got their first token in it.

        A pod that counts none (another server than vLLM) does not show how fast its queue moves.
        """
        share = 0.5 ** (seconds / FADING_SECONDS)
        running = float(load.running_requests)
        self.most_running = max(running, self.most_running * share)
        self._busy_starts *= share
        self._busy_seconds *= share
        self.starts_a_second += (1.0 - 0.5 ** (seconds / STARTS_SECONDS)) * (starts / seconds - self.starts_a_second)
        is_queued = load.waiting_requests > self.starts_a_second * LEAST_WAIT_SECONDS
        # up to the window in which the last one starts: the others alone would show the slow ones
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


FETCHED_SECONDS = 300.0  # after a fetch the prompts of requests that end may have come from another pod
WINDOW_SECONDS = 5.0  # half-life of the sums: requests end in bursts
LEAST_SPAN_SECONDS = 0.05  # between two reports; below, one has overtaken the other
LEAST_WEIGHT = 0.5  # of an endpoint's own samples, from which they count for the pool
TYPICAL_TOKENS = 512.0  # of a request, before any was seen
LEAST_TOKENS, LEAST_WALL_SECONDS = 1.0, 1.0  # computed in so long, from which that is a rate
LEAST_PEAK_SECONDS, LEAST_PEAK_TOKENS = 3.0, 1000.0  # computed in so long, from which that may be the best
PEAK_SECONDS = 10.0  # half-life, in busy seconds, of the best that it has computed in one
# busy share of the time from which an endpoint's throughput begins to show what it can compute, and from which only it
# counts
BUSY_SHARE, FULLY_BUSY_SHARE = 0.85, 1.0
LEAST_GENERATED = 32.0  # tokens, from which their mean time means something
MOST_PROMISES = 1000  # remembered until their first tokens come
LEAST_AHEAD_SHARE = 0.25  # of a backlog's time that counts even where shared steps make it delay no request
LEAST_AHEAD_SECONDS = 0.02  # promised for what is ahead, from which it is compared with what came
AHEAD_GAIN = 0.3  # of the way to what was seen, with each comparison
COMPARE_SECONDS = 1.0  # of what was promised and of what came
ERROR_SHARE = 0.1  # that the newest error has in the moving mean
MOST_SECONDS = 1e6  # whatever is asked


class EndpointPace(msgspec.Struct, frozen=True, kw_only=True):
    """What is expected of one endpoint, until its next report."""

    prefill: Pace  # of one prompt
    backlog_seconds_a_token: float  # of many: what they cost beside their tokens, and decoding, is in it
    request_seconds: float  # of prefill that its average request takes
    starts_a_second: float  # requests that it starts when it has enough of them; at least an optimistic guess
    seen_starts_a_second: float  # that it made of late: while others waited, or at all if that was more; no guess
    queue_starts_a_second: float | None  # the same as seen while others waited; None: not seen of late
    running_limit: float | None  # requests that it runs when others wait; None: none was seen to wait
    most_running: float  # the most that it ran of late
    inter_token_seconds: float | None
    first_token_seconds: float  # mean of what the endpoint itself counted of late; 0: nothing
    streams: StreamPace | None = None  # None: what one more stream costs is not known
    preempted_at: float = float("-inf")  # monotonic seconds at which it was last seen to have pushed a stream back


@dataclass(slots=True, eq=False)
class EndpointSamples:
    """One endpoint's samples, and sums of its reports that fade."""

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
    busy_seconds: float = 0.0  # in which some prompt was being computed
    beside_seconds: float = 0.0  # see `_newly_busy`
    fetched_at: float = float("-inf")  # when it was last seen to have fetched a cache from another pod
    ended_at: float = 0.0  # when prompts that had ended were reported last
    peak: float = 0.0  # prompt tokens a busy second: the most that it has computed of late, over some seconds
    generation_seconds: float = 0.0
    generated: float = 0.0
    request_seconds: float = 0.0
    ahead_share: float = 1.0  # of a backlog's time that really delays the next request
    promises: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_PROMISES))
    error_seconds: float = 0.0
    bias_seconds: float = 0.0
    compared: int = 0

    @property
    def busy_share(self) -> float:
        """How far (0..1) its recent throughput shows what it can compute: it had prompts all the time."""
        if self.peak <= 0.0:
            return 0.0
        share = (self.prefill_seconds / self.wall_seconds - BUSY_SHARE) / (FULLY_BUSY_SHARE - BUSY_SHARE)
        return min(max(share, 0.0), 1.0)

    def report(self, load: EndpointLoad, *, prior: Pace, step: StepTime | None = None) -> None:
        """Take what was counted since the last report; counters that begin anew are a new start.

        `prior` and `step` are what is known of the pool's pods.
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
        # pods that do not count first tokens count ends, of which there are as many
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
            # what other pods have computed counts in vLLM as its own, in next to no time
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
        # tokens of prompts that begin do not belong to the times of those that end
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
            # prompts that are computed in the same steps count them all: together not more than the time there is
            alone = min(self.wall_seconds / self.prefill_seconds, 1.0)
            self.fit.add(
                tokens=tokens / ended,
                seconds=took * alone / ended,
                expected=self.prefill(prior),
                share=min(seconds, 1.0),
            )

    def _newly_busy(self, now: float, *, took: float, ended: int) -> float:
        """Return the seconds in which some prompt was computed, of those that no earlier report has covered.

        Prompts that are computed side by side count more seconds than there are. The excess over the time since the
        last such report stands for prompts that are still computed: as long as one of these, that time was busy, too.
        """
        if not ended:
            return 0.0
        counted = took + self.beside_seconds
        busy = min(counted, now - self.ended_at)
        self.beside_seconds = min(counted - busy, took / ended)
        self.ended_at = now
        return busy

    def _compare(self, load: EndpointLoad) -> None:
        """Compare the mean of what was promised with the mean of what came."""
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
            # prompts that shared their steps have shown this in their own times: a backlog counts twice then
            share = self.ahead_share * max(real - self.request_seconds, 0.0) / ahead
            self.ahead_share += AHEAD_GAIN * (min(max(share, LEAST_AHEAD_SHARE), 1.0) - self.ahead_share)

    def error(self, seconds: float, *, times: int) -> None:
        """Take predicted - real of so many requests."""
        seconds = min(max(seconds, -MOST_SECONDS), MOST_SECONDS)
        share = ERROR_SHARE if self.compared else 1.0
        self.error_seconds += share * (abs(seconds) - self.error_seconds)
        self.bias_seconds += share * (seconds - self.bias_seconds)
        self.compared += times

    def prefill(self, pool: Pace) -> Pace:
        """Return what a prompt costs by its own samples, and without them by its trend or the pool."""
        prior = pool
        if self.trend_rate is not None and self.trend_rate > 0.0:
            prior = Pace(base_seconds=pool.base_seconds, seconds_a_token=1.0 / self.trend_rate)
        return self.fit.pace(prior)

    def _backlog_seconds_a_token(self, prefill: Pace) -> float:
        """Return what a token costs among many: the busier the pod is, the more its own throughput counts."""
        alone = prefill.seconds_a_token * self.ahead_share
        if self.prefill_tokens < LEAST_WEIGHT or self.wall_seconds <= 0.0:
            return alone
        share = self.queued_seconds / self.wall_seconds
        each = min(self.prefill_seconds, self.wall_seconds) / self.prefill_tokens
        each = alone + share * (each - alone)
        if self.prefill_tokens > LEAST_TOKENS and self.wall_seconds > LEAST_WALL_SECONDS:
            # what it has computed it can compute. Times of short prompts are those of whole steps, which take as long
            # with ten times the tokens: taken for what a token costs they would keep the pod half idle, and right
            each = min(each, self.wall_seconds / self.prefill_tokens)
        if (busy := self.busy_share) > 0.0:
            # times of prompts that share their steps show how long these take, and not how much is done in them
            each += busy * (1.0 / self.peak - each)
        return min(max(each, LEAST_SECONDS_A_TOKEN), MOST_SECONDS_A_TOKEN)

    def pace(self, pool: Pace) -> EndpointPace:
        """Return all that is expected of it now."""
        prefill = self.prefill(pool)
        tokens = self.prefill_tokens / self.prefill_requests if self.prefill_requests > LEAST_WEIGHT else TYPICAL_TOKENS
        self.request_seconds = request_seconds = max(prefill.seconds(tokens), 1e-4)
        queue_starts = self.running.busy_starts_a_second
        starts = 1.0 / request_seconds if queue_starts is None else queue_starts
        return EndpointPace(
            prefill=prefill,
            backlog_seconds_a_token=self._backlog_seconds_a_token(prefill),
            request_seconds=request_seconds,
            # what it has just done it can do again
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


# of reports with waiting requests all along: pods count a prompt as a whole when they begin with it, so that a shorter
# time mostly shows how the prompts fell into it
LEAST_WAITED_SECONDS, MOST_WAITED_SECONDS = 0.5, 10.0
LEAST_WAITED_STARTS = 4  # first tokens in it, where the pod counts them: of one or two long prompts any rate may come
MEANS_SECONDS = 2.0  # of reports compared for means; counts of shorter ones are too small
RATE_FADING = 0.01  # a second: a period shows at most what the pod can do, so the best one counts, and fades


class TrendWatch:
    """One endpoint's trend, from one report to the next."""

    def __init__(self) -> None:
        self._previous: EndpointLoad | None = None
        self._waiting_since: EndpointLoad | None = None  # where requests began to wait
        self._rate_then: float | None = None
        self._base: EndpointLoad | None = None  # where the window of the means began
        self._prompt_rate = 0.0  # of the last window
        self.trend = NO_TREND

    def report(self, load: EndpointLoad) -> EndpointTrend:
        """Take a report and return the trend up to it."""
        previous, self._previous = self._previous, load
        if previous is None or restarted(previous, load):
            self._base, self._waiting_since, self.trend, self._prompt_rate = load, None, NO_TREND, 0.0
            self._prefill_rate(load)
            return self.trend
        base = self._base or previous
        rate = self._prefill_rate(load)
        inter_token, moved = self.trend.inter_token_seconds, self.trend.memory_bytes_per_second
        prompts = self.trend.prompt_tokens_per_second
        seconds = load.reported_at - base.reported_at
        if seconds >= MEANS_SECONDS:
            tokens = load.inter_token_count - base.inter_token_count
            inter_token = (
                (load.inter_token_seconds_sum - base.inter_token_seconds_sum) / tokens
                if tokens >= LEAST_GENERATED
                else None
            )
            if load.memory_bytes_moved is not None and base.memory_bytes_moved is not None:
                moved = (load.memory_bytes_moved - base.memory_bytes_moved) / seconds
            # a prompt counts as a whole when it begins, and may take until the next window
            before, self._prompt_rate = self._prompt_rate, _computed(base, load) / seconds
            prompts = max(before, self._prompt_rate)
            self._base = load
        self.trend = EndpointTrend(
            inter_token_seconds=inter_token,
            memory_bytes_per_second=moved,
            prefill_tokens_per_second=rate,
            prompt_tokens_per_second=prompts,
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
        # a request whose cache is on its way waits, too, while nothing is computed
        fetches = start is not None and (load.fetched_tokens, load.fetched_bytes) != (
            start.fetched_tokens,
            start.fetched_bytes,
        )
        if start is None or fetches or load.reported_at - start.reported_at > MOST_WAITED_SECONDS:
            self._waiting_since, self._rate_then = load, known
            return known
        seconds = load.reported_at - start.reported_at
        computed = _computed(start, load)
        if seconds < LEAST_WAITED_SECONDS or computed <= 0:  # none: it waits for memory, not for its turn
            return known
        if load.first_token_count and load.first_token_count - start.first_token_count < LEAST_WAITED_STARTS:
            return known
        sample, earlier = computed / seconds, self._rate_then
        return sample if earlier is None else max(sample, earlier * (1.0 - RATE_FADING * seconds))


def _computed(since: EndpointLoad, load: EndpointLoad) -> int:
    """Return the prompt tokens that it has begun to compute since."""
    return (load.prefix_query_tokens - load.prefix_hit_tokens) - (since.prefix_query_tokens - since.prefix_hit_tokens)


def restarted(previous: EndpointLoad, load: EndpointLoad) -> bool:
    """Tell whether another process reports: its counters have begun anew, its cache is empty."""
    return (
        load.prefix_query_tokens < previous.prefix_query_tokens or load.inter_token_count < previous.inter_token_count
    )
