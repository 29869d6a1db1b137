"""The engine: continuous batching in steps, over a block pool, with time passed in.

The pod calls `begin_step`, sleeps until the step's end, and calls `finish_step`. Follows vLLM's V1 scheduler: running
sequences first, then first come first served; chunked prefill; blocks are cached when a step is planned; a sequence
that finds no block for its next token pushes the youngest one back into the queue.
"""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

from podsim.core.block_hash import extend_chain
from podsim.core.block_pool import BlockPool
from podsim.core.events import BlockStored, CacheEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """How large and how fast the simulated engine is."""

    block_size: int = 16  # tokens
    total_blocks: int = 2048  # as vLLM's num_gpu_blocks: one of them is never used
    max_running: int = 16  # sequences in one step
    max_step_tokens: int = 2048  # prefill and decode tokens in one step (vLLM's max_num_batched_tokens)
    prefill_tokens_per_second: float = 8000.0
    inter_token_seconds: float = 0.008  # the shortest step

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits into an empty cache."""
        return (self.total_blocks - 1) * self.block_size


class State(Enum):
    """Where a generation stands."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One prompt on its way through the engine. `token_ids` holds the prompt and all that will be generated."""

    token_ids: list[int]
    prompt_tokens: int
    arrived_at: float  # seconds, the clock of `begin_step`
    cache_salt: str | None = None
    reports_hits: bool = False  # announce cached blocks again (kv_cache_report_mode "full")
    state: State = State.WAITING
    produced: int = 0  # output tokens that exist by now
    cached_tokens: int = 0  # prompt tokens that were in the cache when it was first admitted
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    computed: int = 0  # tokens whose keys and values are in blocks
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0  # leading blocks that are in the prefix cache

    @property
    def known_tokens(self) -> int:
        """Prompt tokens plus those generated so far."""
        return self.prompt_tokens + self.produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass: which sequences compute how many tokens, and when it is done."""

    ends_at: float
    work: list[tuple[Generation, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What a step gave: the sequences that have one more token (look at their `state`), and the cache events."""

    produced: list[Generation]
    events: list[CacheEvent]


@dataclass(slots=True, kw_only=True)
class SchedulerTotals:
    """Counters since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Decides which sequences advance. Time is an argument; the caller sleeps."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.total_blocks)
        self.totals = SchedulerTotals()
        self._running: list[Generation] = []
        self._waiting: deque[Generation] = deque()

    @property
    def running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences in the queue."""
        return len(self._waiting)

    def add(self, generation: Generation) -> None:
        """Queue a generation; its prompt must fit into `capacity_tokens`."""
        self._waiting.append(generation)

    def abort(self, generation: Generation) -> None:
        """Drop a generation and free its blocks at once; no effect if it is already complete."""
        if generation.state is State.WAITING:
            self._waiting.remove(generation)
        elif generation.state is State.RUNNING:
            self._leave(generation)
        else:
            return
        generation.state = State.ABORTED

    def begin_step(self, now: float) -> Step | None:
        """Plan the next step, or None if there is nothing to do."""
        work, preempted = self._continue_running()
        if not preempted:
            self._admit_waiting(work, now=now)
        if not work:
            return None
        prefill_tokens = sum(tokens for generation, tokens in work if tokens > 1 or not generation.produced)
        seconds = max(self.settings.inter_token_seconds, prefill_tokens / self.settings.prefill_tokens_per_second)
        return Step(ends_at=now + seconds, work=work)

    def finish_step(self, step: Step, now: float) -> StepOutcome:
        """Account for a step that has been computed: every sequence that caught up gets its next token."""
        produced: list[Generation] = []
        for generation, tokens in step.work:
            if generation.state is not State.RUNNING:
                continue  # aborted while the step ran
            generation.computed += tokens
            if generation.computed < generation.known_tokens:
                continue
            generation.produced += 1
            generation.last_token_at = now
            if generation.first_token_at is None:
                generation.first_token_at = now
            if generation.known_tokens == len(generation.token_ids):
                self._leave(generation)
                generation.state = State.FINISHED
            produced.append(generation)
        return StepOutcome(produced=produced, events=self.pool.take_events())

    def _continue_running(self) -> tuple[list[tuple[Generation, int]], bool]:
        work: list[tuple[Generation, int]] = []
        budget, preempted = self.settings.max_step_tokens, False
        for generation in list(self._running):
            if generation.state is not State.RUNNING or budget <= 0:
                continue
            tokens = min(generation.known_tokens - generation.computed, budget)
            while not self._grow(generation, tokens):
                victim, preempted = self._running[-1], True
                self._preempt(victim)
                if victim is generation:
                    break
            else:
                budget -= tokens
                work.append((generation, tokens))
        return work, preempted

    def _admit_waiting(self, work: list[tuple[Generation, int]], *, now: float) -> None:
        budget = self.settings.max_step_tokens - sum(tokens for _, tokens in work)
        while self._waiting and budget > 0 and len(self._running) < self.settings.max_running:
            generation = self._waiting[0]
            if not self._take_cached_prefix(generation):
                break
            self._waiting.popleft()
            self._running.append(generation)
            generation.state = State.RUNNING
            if generation.reports_hits and generation.cached_blocks:
                self.pool.report(self._stored(generation, 0, generation.cached_blocks))
            if generation.admitted_at is None:
                generation.admitted_at = now
                generation.cached_tokens = generation.computed
                self.totals.queried_tokens += generation.prompt_tokens
                self.totals.hit_tokens += generation.computed
            tokens = min(generation.known_tokens - generation.computed, budget)
            self._grow(generation, tokens)
            budget -= tokens
            work.append((generation, tokens))

    def _take_cached_prefix(self, generation: Generation) -> bool:
        """Reference the cached prefix, if the rest of the sequence fits as well."""
        size, tokens = self.settings.block_size, generation.known_tokens
        self._extend_hashes(generation, tokens)
        # the last token is always computed: its logits give the next one
        hits = self.pool.cached_prefix(generation.hashes, max_blocks=(tokens - 1) // size)
        new_blocks = -(-tokens // size) - len(hits)
        if new_blocks + self.pool.unused(hits) > self.pool.free_blocks:
            return False
        self.pool.touch(hits)
        generation.blocks = hits
        generation.cached_blocks = len(hits)
        generation.computed = len(hits) * size
        return True

    def _grow(self, generation: Generation, tokens: int) -> bool:
        """Make room for `tokens` more tokens and cache the blocks they fill; False if blocks are short."""
        upto = generation.computed + tokens
        missing = -(-upto // self.settings.block_size) - len(generation.blocks)
        if missing > self.pool.free_blocks:
            return False
        if missing > 0:
            generation.blocks += self.pool.allocate(missing)
        self._cache_full_blocks(generation, upto)
        return True

    def _cache_full_blocks(self, generation: Generation, upto: int) -> None:
        size = self.settings.block_size
        first, full = generation.cached_blocks, upto // size
        if full <= first:
            return
        self._extend_hashes(generation, upto)
        self.pool.cache(generation.blocks[first:full], self._stored(generation, first, full))
        generation.cached_blocks = full

    def _stored(self, generation: Generation, first: int, end: int) -> BlockStored:
        size = self.settings.block_size
        return BlockStored(
            block_hashes=generation.hashes[first:end],
            parent_hash=generation.hashes[first - 1] if first else None,
            token_ids=generation.token_ids[first * size : end * size],
            block_size=size,
            cache_salt=generation.cache_salt if first == 0 else None,
        )

    def _extend_hashes(self, generation: Generation, tokens: int) -> None:
        extend_chain(
            generation.hashes,
            generation.token_ids,
            block_size=self.settings.block_size,
            tokens=tokens,
            cache_salt=generation.cache_salt,
        )

    def _preempt(self, generation: Generation) -> None:
        self._leave(generation)
        generation.state = State.WAITING
        generation.computed = generation.cached_blocks = 0
        self._waiting.appendleft(generation)
        self.totals.preemptions += 1

    def _leave(self, generation: Generation) -> None:
        self._running.remove(generation)
        self.pool.release(generation.blocks)
        generation.blocks = []
