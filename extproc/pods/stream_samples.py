"""One endpoint's decode speed from its reports: the inter-token time by load, and preemptions. Pure.

`endpoint_samples` passes in each report; the pool's fit, from `latency_estimate`, fills in what the pod has not shown.
A window lasts at least a second: a report counts a whole prompt when it starts, but its steps take longer.
"""

from dataclasses import dataclass, field

import msgspec

from extproc.pods.step_times import FAR, StepTime, StepTimes
from kvmesh.pods.pod_report import EndpointLoad

WINDOW_SECONDS = 1.0
LEAST_WINDOW_TOKENS = 8.0  # output tokens that make a window a sample
HALF_LIFE_SECONDS = 120.0  # of the samples
BESIDE_SECONDS = 2.0  # half-life of the mean prompt tokens in a step
LONGEST_SECONDS = 5.0  # between two reports; beyond, the load in between is unknown
MOST_TOKENS_A_SECOND = 1e7  # more is nonsense


class StreamPace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The inter-token time at one endpoint until its next report; made by `pace_of`, used by each pick."""

    level_seconds: float  # a step with the recent mean of prompt tokens and no stream
    seconds_a_stream: float
    seconds_a_context_token: float
    far_streams: float  # the estimate stops growing beyond these two bounds
    far_context_tokens: float
    alone_seconds: float  # of a single stream: no target below can be met

    def seconds(self, streams: float, context_tokens: float) -> float:
        """Return the mean inter-token time with this many streams and context tokens."""
        if streams > self.far_streams:  # noqa: PLR1730  (a call costs more)
            streams = self.far_streams
        if context_tokens > self.far_context_tokens:  # noqa: PLR1730
            context_tokens = self.far_context_tokens
        return self.level_seconds + self.seconds_a_stream * streams + self.seconds_a_context_token * context_tokens

    def seconds_after(self, load: EndpointLoad) -> float:
        """Return the inter-token time with one more stream than reported."""
        return self.seconds(load.unfinished_requests + 1.0, context_tokens(load))


def pace_of(step: StepTime, *, prompt_tokens: float) -> StreamPace:
    """Return the endpoint's pace while each step also computes this many prompt tokens."""
    return StreamPace(
        level_seconds=step.alone_seconds + step.seconds_a_prompt_token * prompt_tokens,
        seconds_a_stream=step.seconds_a_stream,
        seconds_a_context_token=step.seconds_a_context_token,
        far_streams=FAR * step.most_streams,
        far_context_tokens=FAR * step.most_context_tokens,
        alone_seconds=step.alone_seconds + step.seconds_a_stream,
    )


@dataclass(slots=True, eq=False)
class StreamSamples:
    """The stream samples of one endpoint."""

    times: StepTimes = field(default_factory=lambda: StepTimes(half_life_seconds=HALF_LIFE_SECONDS))
    preempted_at: float = float("-inf")  # monotonic seconds of the last report with a new preemption
    pace: StreamPace | None = None  # None while the cost of a stream is unknown
    prompt_tokens: float = 0.0
    # the window's seconds, the seconds with running streams, and sums over the latter
    _seconds: float = 0.0
    _busy: float = 0.0
    _running: float = 0.0
    _context: float = 0.0
    _tokens: float = 0.0
    _token_seconds: float = 0.0
    _prompts: float = 0.0

    def report(self, last: EndpointLoad, load: EndpointLoad, *, pool: StepTime | None) -> None:
        """Add the counts between two reports of one process; `pool`: the fit over the pool's pods."""
        seconds = load.reported_at - last.reported_at
        if load.preemptions > last.preemptions:
            self.preempted_at = load.reported_at
        if not 0.0 < seconds <= LONGEST_SECONDS:
            self._clear()
            return
        running = (last.running_requests + load.running_requests) / 2
        self._seconds += seconds
        if running:
            self._busy += seconds
            self._running += seconds * running
            self._context += seconds * (context_tokens(last) + context_tokens(load)) / 2
        self._tokens += load.inter_token_count - last.inter_token_count
        self._token_seconds += load.inter_token_seconds_sum - last.inter_token_seconds_sum
        self._prompts += _prompt_tokens(last, load)
        if self._seconds >= WINDOW_SECONDS:
            self._end_window(pool)

    def _end_window(self, pool: StepTime | None) -> None:
        seconds, busy, tokens = self._seconds, self._busy, self._tokens
        share = 0.5 ** (seconds / BESIDE_SECONDS)
        beside = 0.0
        self.times.fade(seconds)
        if busy > 0.0 and LEAST_WINDOW_TOKENS <= tokens <= MOST_TOKENS_A_SECOND * seconds and self._token_seconds > 0.0:
            each = self._token_seconds / tokens
            beside = max(self._prompts, 0.0) * each / busy  # prompt tokens per step: steps are back to back
            self.times.add(
                running=self._running / busy,
                context_tokens=self._context / busy,
                prompt_tokens=beside,
                tokens=tokens,
                seconds_a_token=each,
            )
        self.prompt_tokens = self.prompt_tokens * share + beside * (1.0 - share)
        self._clear()
        step = self.times.fit(pool)
        self.pace = None if step is None else pace_of(step, prompt_tokens=self.prompt_tokens)

    def _clear(self) -> None:
        self._seconds = self._busy = self._running = self._context = 0.0
        self._tokens = self._token_seconds = self._prompts = 0.0


def context_tokens(load: EndpointLoad) -> float:
    """Return the context tokens of the streams there; a shared prefix counts once."""
    return load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0


def _prompt_tokens(last: EndpointLoad, load: EndpointLoad) -> float:
    if not load.prefix_query_tokens:  # without a prefix cache, only prompts of ended requests are counted
        return load.prefill_computed_tokens - last.prefill_computed_tokens
    queried = load.prefix_query_tokens - last.prefix_query_tokens
    hits = load.prefix_hit_tokens - last.prefix_hit_tokens
    return queried - hits - (load.fetched_tokens - last.fetched_tokens)
