"""What one endpoint's reports show of its streams: the inter-token time by what runs there, and preemptions. Pure.

`endpoint_samples` hands in each report; `latency_estimate` has the pool's fit, which stands in for what one pod has not
shown. Windows of a second: a report counts a prompt as a whole when it begins, whose steps last longer.
"""

from dataclasses import dataclass, field

import msgspec

from extproc.pods.step_times import FAR, StepTime, StepTimes
from kvmesh.pods.pod_report import EndpointLoad

WINDOW_SECONDS = 1.0
LEAST_WINDOW_TOKENS = 8.0  # of an answer, from which a window is a sample
HALF_LIFE_SECONDS = 120.0  # of the samples
BESIDE_SECONDS = 2.0  # half-life of what prompts cost the streams beside them
LONGEST_SECONDS = 5.0  # between two reports: what ran meanwhile is not known
MOST_TOKENS_A_SECOND = 1e7  # more is nonsense


class StreamPace(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a token takes on one endpoint, until its next report; `pace_of` makes it, and each pick asks."""

    level_seconds: float  # with nothing in a step but prompt tokens, as they came of late
    seconds_a_stream: float
    seconds_a_context_token: float
    far_streams: float  # beyond these two nothing is known, and nothing is added
    far_context_tokens: float
    alone_seconds: float  # of one stream that nothing is beside: no promise below it can be kept

    def seconds(self, streams: float, context_tokens: float) -> float:
        """Return the mean inter-token time while so many streams with so much context run there."""
        if streams > self.far_streams:  # noqa: PLR1730  (a call costs more)
            streams = self.far_streams
        if context_tokens > self.far_context_tokens:  # noqa: PLR1730
            context_tokens = self.far_context_tokens
        return self.level_seconds + self.seconds_a_stream * streams + self.seconds_a_context_token * context_tokens

    def seconds_after(self, load: EndpointLoad) -> float:
        """Return the inter-token time once one stream more runs beside those that were reported."""
        return self.seconds(load.unfinished_requests + 1.0, context_tokens(load))


def pace_of(step: StepTime, *, prompt_tokens: float) -> StreamPace:
    """Return what a step of the endpoint takes while so many prompt tokens are computed in it."""
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
    """Of one endpoint."""

    times: StepTimes = field(default_factory=lambda: StepTimes(half_life_seconds=HALF_LIFE_SECONDS))
    preempted_at: float = float("-inf")  # when it was last seen to have pushed a stream back
    pace: StreamPace | None = None  # None: what a stream costs is not known yet
    prompt_tokens: float = 0.0
    # of the window: seconds, those of them in which any stream ran, and sums over these
    _seconds: float = 0.0
    _busy: float = 0.0
    _running: float = 0.0
    _context: float = 0.0
    _tokens: float = 0.0
    _token_seconds: float = 0.0
    _prompts: float = 0.0

    def report(self, last: EndpointLoad, load: EndpointLoad, *, pool: StepTime | None) -> None:
        """Take what was counted between two reports of one process; `pool` is what is known of its pool's pods."""
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
            beside = max(self._prompts, 0.0) * each / busy  # of steps that take as long as they are apart
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
    """Return the tokens that the streams there attend to; a prefix that several share counts once."""
    return load.kv_usage * load.kv_capacity_tokens if load.kv_capacity_tokens is not None else 0.0


def _prompt_tokens(last: EndpointLoad, load: EndpointLoad) -> float:
    """Return the prompt tokens that were begun to be computed in between."""
    if not load.prefix_query_tokens:  # it keeps no prefixes: those of requests that have ended
        return load.prefill_computed_tokens - last.prefill_computed_tokens
    queried = load.prefix_query_tokens - last.prefix_query_tokens
    hits = load.prefix_hit_tokens - last.prefix_hit_tokens
    return queried - hits - (load.fetched_tokens - last.fetched_tokens)
