"""A pod that computes by a few numbers: continuous batching in steps, many alike ones at once. Pure.

In a step each running generation gets a token, and prompts are computed up to a number of tokens. While there is no
prompt to compute, the steps until the next generation ends are taken as one, and cut short where a request comes.
"""

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from kvmesh.pods.pod_report import EndpointLoad

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPace:
    """How large and how fast a pod is; seconds."""

    alone_seconds: float  # of a step, whatever is in it
    seconds_a_stream: float = 0.0
    seconds_a_prompt_token: float
    base_seconds: float = 0.0  # of a request, before its prompt is taken in
    most_running: int = 256
    step_tokens: int = 2048  # of prompts and streams, in one step
    cache_tokens: int = 500_000


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One request at a pod."""

    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    arrived_at: float
    left: int = 0  # prompt tokens to be computed
    produced: int = 0
    admitted_at: float | None = None
    first_at: float | None = None
    ended_at: float | None = None

    def __post_init__(self) -> None:
        """What is cached need not be computed, but for the last token."""
        self.left = max(self.prompt_tokens - self.cached_tokens, 1)

    @property
    def held_tokens(self) -> int:
        """What it takes of the cache."""
        return self.prompt_tokens + self.produced


@dataclass(slots=True, kw_only=True)
class _Batch:
    """Steps that are under way, all alike."""

    began_at: float
    step_seconds: float
    steps: int
    work: dict[Generation, int]  # prompt tokens of each, in the one step that has some


@dataclass(slots=True)
class SimulatedPod:
    """One pod. `ends_at` says when `advance` is due."""

    pace: PodPace
    running: list[Generation] = field(default_factory=list)
    waiting: deque[Generation] = field(default_factory=deque)
    _batch: _Batch | None = None
    _held: int = 0  # tokens in the cache of those that run
    _hit_tokens: int = 0
    _query_tokens: int = 0
    _decode_seconds: float = 0.0
    _decoded: int = 0
    _prefill_seconds: float = 0.0
    _prefills: int = 0
    _computed: int = 0
    _first_seconds: float = 0.0
    _firsts: int = 0

    @property
    def ends_at(self) -> float | None:
        """When the steps under way are over; None: it is idle."""
        batch = self._batch
        return None if batch is None else batch.began_at + batch.steps * batch.step_seconds

    def add(self, generation: Generation, *, now: float) -> None:
        """Take a request in; it is begun with the next step."""
        self.waiting.append(generation)
        self._query_tokens += generation.prompt_tokens
        self._hit_tokens += min(generation.cached_tokens, generation.prompt_tokens)
        batch = self._batch
        if batch is None:
            self._begin(now)
        elif batch.steps > 1:
            batch.steps = max(min(ceil((now - batch.began_at) / batch.step_seconds), batch.steps), 1)

    def leave(self, generation: Generation) -> None:
        """Let a request go whose client has left."""
        if generation in self.waiting:
            self.waiting.remove(generation)
        elif generation in self.running:
            self.running.remove(generation)
            self._held -= generation.held_tokens
            if self._batch is not None:
                self._batch.work.pop(generation, None)

    def advance(self, *, now: float) -> list[Generation]:
        """End the steps under way, begin the next; return those that have a first token or have ended by it."""
        batch, changed = self._batch, []
        assert batch is not None, "it is due"
        for generation in list(self.running):
            if generation.left:
                generation.left -= batch.work.get(generation, 0)
                if generation.left:
                    continue
                self._answered(generation, now)
                changed.append(generation)
                produced = 1
            else:
                produced = batch.steps
                self._decoded += produced
                self._decode_seconds += produced * batch.step_seconds
            generation.produced += produced
            self._held += produced
            if generation.produced >= generation.output_tokens:
                self._ended(generation, now)
                changed.append(generation)
        self._batch = None
        self._begin(now)
        return list(dict.fromkeys(changed))

    def report(self, *, now: float) -> EndpointLoad:
        """Return what a scrape gets."""
        tokens, seconds = self._under_way(now)
        return EndpointLoad(
            waiting_requests=len(self.waiting),
            running_requests=len(self.running),
            kv_usage=min(self._held / self.pace.cache_tokens, 1.0),
            prefix_hit_tokens=self._hit_tokens,
            prefix_query_tokens=self._query_tokens,
            reported_at=now,
            kv_capacity_tokens=self.pace.cache_tokens,
            inter_token_seconds_sum=self._decode_seconds + seconds,
            inter_token_count=self._decoded + tokens,
            prefill_seconds_sum=self._prefill_seconds,
            prefill_count=self._prefills,
            prefill_computed_tokens=self._computed,
            first_token_seconds_sum=self._first_seconds,
            first_token_count=self._firsts,
        )

    def _under_way(self, now: float) -> tuple[int, float]:
        """Return the tokens of the steps that are over but not accounted for, and the seconds that they took."""
        batch = self._batch
        if batch is None or batch.work:
            return 0, 0.0
        tokens = min(int((now - batch.began_at) / batch.step_seconds), batch.steps) * len(self.running)
        return tokens, tokens * batch.step_seconds

    def _begin(self, now: float) -> None:
        pace, work = self.pace, {}
        streams = sum(not generation.left for generation in self.running)
        budget = max(pace.step_tokens - streams, 1)
        for generation in self.running:
            if generation.left and budget > 0:
                work[generation] = taken = min(generation.left, budget)
                budget -= taken
        while budget > 0 and (admitted := self._next_admitted()) is not None:
            admitted.admitted_at = now
            self.running.append(admitted)
            self._held += admitted.prompt_tokens
            work[admitted] = taken = min(admitted.left, budget)
            budget -= taken
        if not self.running:
            return
        seconds = pace.alone_seconds + pace.seconds_a_stream * (streams + len(work))
        steps = 1
        if work:
            seconds += pace.seconds_a_prompt_token * sum(work.values())
        else:
            steps = min(generation.output_tokens - generation.produced for generation in self.running)
        self._batch = _Batch(began_at=now, step_seconds=max(seconds, 1e-6), steps=max(steps, 1), work=work)

    def _next_admitted(self) -> Generation | None:
        """Take the next one from the queue, if there is a place for it and room in the cache."""
        if not self.waiting or len(self.running) >= self.pace.most_running:
            return None
        if self.running and self._held + self.waiting[0].prompt_tokens > self.pace.cache_tokens:
            return None
        return self.waiting.popleft()

    def _answered(self, generation: Generation, now: float) -> None:
        generation.first_at = now
        self._firsts += 1
        self._first_seconds += now - generation.arrived_at

    def _ended(self, generation: Generation, now: float) -> None:
        assert generation.first_at is not None, "it has run"
        assert generation.admitted_at is not None, "it has run"
        generation.ended_at = now
        self.running.remove(generation)
        self._held -= generation.held_tokens
        self._prefills += 1
        self._prefill_seconds += generation.first_at - generation.admitted_at
        self._computed += max(generation.prompt_tokens - generation.cached_tokens, 1)
