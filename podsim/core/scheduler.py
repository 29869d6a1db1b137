"""The engine: continuous batching in steps, over a block pool, with the time passed in.

The pod calls `begin_step`, sleeps until the step's end, and calls `finish_step`. It follows vLLM's V1 scheduler:
running sequences come first, then new ones in order of arrival; long prompts are computed in chunks; blocks are cached
when a step is planned. If a sequence finds no block for its next token, the youngest one goes back to the queue. A
prompt whose KV is on another pod gets its blocks at once and waits until they are filled. Blocks that another pod will
read are kept after their generation ends.
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
    total_blocks: int = 2048  # as in vLLM's num_gpu_blocks, one is never used
    max_running: int = 16  # sequences in one step
    max_step_tokens: int = 2048  # prefill and decode tokens in one step (vLLM's max_num_batched_tokens)
    prefill_tokens_per_second: float = 8000.0
    inter_token_seconds: float = 0.008  # the shortest step, since each step reads all weights once
    stream_seconds: float = 0.0  # added to its step by each sequence
    context_token_seconds: float = 0.0  # added by each token attended to, to read its keys and values

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits into an empty cache."""
        return (self.total_blocks - 1) * self.block_size


class State(Enum):
    """The stages of a generation."""

    WAITING = "waiting"
    LOADING = "loading"  # its prompt's KV is being read from another pod
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"  # its prompt's KV did not arrive


@dataclass(slots=True, kw_only=True, eq=False)
class Generation:
    """One prompt in the engine. `token_ids` holds the prompt and all tokens that will be generated."""

    token_ids: list[int]
    prompt_tokens: int
    arrived_at: float  # seconds, the clock of `begin_step`
    cache_salt: str | None = None
    reports_hits: bool = False  # announce cached blocks again (kv_cache_report_mode "full")
    loads_prompt: bool = False  # the prompt's KV is on another pod; cleared when its load starts
    keeps_blocks: bool = False  # another pod will read its blocks: keep them until `release_kept`
    state: State = State.WAITING
    produced: int = 0  # output tokens so far
    cached_tokens: int = 0  # prompt tokens that need no computing: cached when first admitted, or loaded
    loaded_tokens: int = 0  # how many of them another pod provides
    admitted_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    computed: int = 0  # tokens whose keys and values are in blocks
    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    cached_blocks: int = 0  # leading blocks that are in the prefix cache

    @property
    def known_tokens(self) -> int:
        """The prompt tokens plus those generated so far."""
        return self.prompt_tokens + self.produced


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass: how many tokens each sequence computes, and when the pass ends."""

    ends_at: float
    work: list[tuple[Generation, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step: the sequences that got a token (see their `state`), and the cache events."""

    produced: list[Generation]
    events: list[CacheEvent]


@dataclass(slots=True, kw_only=True)
class SchedulerTotals:
    """Counts since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0  # requested from other pods, whether they arrived or not
    preemptions: int = 0


class Scheduler:
    """Decides which sequences advance. The caller passes in the time and sleeps."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.pool = BlockPool(settings.total_blocks)
        self.totals = SchedulerTotals()
        self._running: list[Generation] = []
        self._waiting: deque[Generation] = deque()
        self._with_load: dict[Generation, None] = {}  # in the order their loads began; once loaded, they run first
        self._started_loads: list[Generation] = []

    @property
    def running(self) -> int:
        """The number of running sequences."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """The number of sequences that do not run: those in the queue and those with a load."""
        return len(self._waiting) + len(self._with_load)

    @property
    def loading(self) -> int:
        """The number of sequences whose prompt's KV is being loaded."""
        return sum(generation.state is State.LOADING for generation in self._with_load)

    @property
    def loaded(self) -> int:
        """The number of sequences whose load has ended and that do not run yet."""
        return len(self._with_load) - self.loading

    def waiting_to_load(self) -> int:
        """Count the sequences in the queue whose load has not started."""
        return sum(generation.loads_prompt for generation in self._waiting)

    def add(self, generation: Generation) -> None:
        """Queue a generation; its prompt must fit into `capacity_tokens`."""
        self._waiting.append(generation)

    def abort(self, generation: Generation) -> None:
        """Remove a generation and free its blocks at once; does nothing if it is finished.

        Blocks that a load is still writing are freed when the load ends.
        """
        if generation.state is State.LOADING:
            del self._with_load[generation]
        elif generation.state is State.WAITING:
            self._dequeue(generation)
            self._release(generation)
        elif generation.state is State.RUNNING:
            self._leave(generation)
        else:
            return
        generation.state = State.ABORTED

    def begin_step(self, now: float) -> Step | None:
        """Plan the next step; return None if there is nothing to do."""
        work, preempted = self._continue_running()
        if not preempted:
            self._admit_waiting(work, now=now)
        if not work:
            return None
        prefill_tokens = sum(tokens for generation, tokens in work if tokens > 1 or not generation.produced)
        return Step(ends_at=now + self._step_seconds(work, prefill_tokens), work=work)

    def _step_seconds(self, work: list[tuple[Generation, int]], prefill_tokens: int) -> float:
        settings = self.settings
        seconds = max(settings.inter_token_seconds, prefill_tokens / settings.prefill_tokens_per_second)
        if settings.stream_seconds or settings.context_token_seconds:
            seconds += settings.stream_seconds * len(work)
            context = sum(generation.computed + tokens for generation, tokens in work)
            seconds += settings.context_token_seconds * context
        return seconds

    def finish_step(self, step: Step, now: float) -> StepOutcome:
        """Record that a step was computed: each sequence with all its tokens computed gets its next token."""
        produced: list[Generation] = []
        for generation, tokens in step.work:
            if generation.state is not State.RUNNING:
                continue  # it was aborted during the step
            generation.computed += tokens
            if generation.computed < generation.known_tokens:
                continue
            generation.produced += 1
            generation.last_token_at = now
            if generation.first_token_at is None:
                generation.first_token_at = now
            if generation.known_tokens == len(generation.token_ids):
                self._running.remove(generation)
                if not generation.keeps_blocks:
                    self._release(generation)
                generation.state = State.FINISHED
            produced.append(generation)
        return StepOutcome(produced=produced, events=self.pool.take_events())

    def take_started_loads(self) -> list[Generation]:
        """Return the generations given blocks to load into since the last call; end each load with `finish_load`."""
        started, self._started_loads = self._started_loads, []
        return started

    def finish_load(self, generation: Generation) -> None:
        """Record that the prompt's KV has arrived; the generation runs as soon as there is room."""
        if self._ends_its_load(generation):
            generation.state = State.WAITING

    def fail_load(self, generation: Generation, *, recompute: bool) -> None:
        """Record that the prompt's KV will not arrive; fail the generation, or compute the missing tokens instead."""
        if not self._ends_its_load(generation):
            return
        if recompute:
            generation.state = State.WAITING
            generation.computed = generation.loaded_tokens = 0
        else:
            self._dequeue(generation)
            self._release(generation)
            generation.state = State.FAILED

    def release_kept(self, generation: Generation) -> None:
        """Free the blocks of a finished generation with `keeps_blocks`."""
        self._release(generation)

    def _ends_its_load(self, generation: Generation) -> bool:
        """Tell whether the generation still needs its load; if it was aborted, free its blocks now."""
        if generation.state is not State.LOADING:
            self._release(generation)
        return generation.state is State.LOADING

    def _next_waiting(self) -> Generation | None:
        for generation in self._with_load:
            if generation.state is State.WAITING:
                return generation
        return self._waiting[0] if self._waiting else None

    def _dequeue(self, generation: Generation) -> None:
        if generation in self._with_load:
            del self._with_load[generation]
        else:
            self._waiting.remove(generation)

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
        while budget > 0 and len(self._running) < self.settings.max_running:
            generation = self._next_waiting()
            if generation is None:
                break
            if not generation.computed:
                self._release(generation)  # blocks of a failed load
            if generation.blocks:  # its load has ended
                generation.computed = generation.known_tokens - 1  # the last token is computed again, for the next one
            elif not self._take_cached_prefix(generation):
                break
            elif self._count_hits(generation):
                self._dequeue(generation)
                self._start_load(generation)
                continue
            self._dequeue(generation)
            if generation.admitted_at is None:
                generation.admitted_at = now
            budget -= self._run(generation, work, budget=budget)

    def _count_hits(self, generation: Generation) -> bool:
        """Count the cached prefix just found; return whether the rest of the prompt must be loaded."""
        if generation.reports_hits and generation.cached_blocks:
            self.pool.report(self._stored(generation, 0, generation.cached_blocks))
        if generation.admitted_at is None:
            generation.cached_tokens = generation.computed
            self.totals.queried_tokens += generation.prompt_tokens
            self.totals.hit_tokens += generation.computed
        return generation.loads_prompt

    def _run(self, generation: Generation, work: list[tuple[Generation, int]], *, budget: int) -> int:
        self._running.append(generation)
        generation.state = State.RUNNING
        tokens = min(generation.known_tokens - generation.computed, budget)
        self._grow(generation, tokens)
        work.append((generation, tokens))
        return tokens

    def _start_load(self, generation: Generation) -> None:
        """Give a generation all blocks of its prompt; they count as cached once they are filled."""
        size, tokens = self.settings.block_size, generation.prompt_tokens
        generation.blocks += self.pool.allocate(-(-tokens // size) - len(generation.blocks))
        generation.loaded_tokens = tokens - generation.computed
        generation.cached_tokens = generation.computed = tokens
        self.totals.loaded_tokens += generation.loaded_tokens
        generation.loads_prompt = False
        generation.state = State.LOADING
        self._with_load[generation] = None
        self._started_loads.append(generation)

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
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        self.pool.release(generation.blocks)
        generation.blocks = []
