"""One simulated engine in virtual time, and when a prompt would be begun there in truth.

Nothing here waits; `virtual_world` calls.
"""

from collections import Counter
from collections.abc import Sequence

from bench.routing.one_cache import BLOCK_TOKENS
from bench.routing.plan import PodSettings
from bench.routing.pod_counters import PodCounts
from bench.virtual_pod import VirtualPod
from podsim.core.scheduler import EngineSettings, Generation, State, StepOutcome


class Pod(VirtualPod):
    """A pod, and what only a simulation can know of it."""

    def __init__(self, address: str, settings: PodSettings) -> None:
        self.finished = 0
        self.lost = PodCounts()  # counts of the killed processes
        engine = EngineSettings(
            total_blocks=settings.kv_blocks,
            max_running=settings.max_num_seqs,
            max_step_tokens=settings.max_num_batched_tokens,
            prefill_tokens_per_second=settings.prefill_tokens_per_second,
            inter_token_seconds=settings.inter_token_ms / 1000,
        )
        super().__init__(address, engine)

    def restart(self) -> None:
        """Restart with an empty cache."""
        if hasattr(self, "scheduler"):
            self.lost = self.counts()
        super().restart()
        self._queued: dict[Generation, int] = {}  # without a first token: tokens of each that nobody before it computes
        self._promised: Counter[bytes] = Counter()  # blocks of theirs

    def add(self, generation: Generation, *, prefill_cached_tokens: int | None = None) -> None:
        """Take a request in."""
        self._queued[generation] = self.uncached_tokens(generation.hashes, generation.prompt_tokens)
        self._promised.update(generation.hashes)
        super().add(generation, prefill_cached_tokens=prefill_cached_tokens)

    def finish_step(self, now: float) -> tuple[StepOutcome, list[float]]:
        """End the step that runs."""
        outcome, gaps = super().finish_step(now)
        for generation in outcome.produced:
            if generation in self._queued:
                self._answered(generation)
            self.finished += generation.state is State.FINISHED
        return outcome, gaps

    def _answered(self, generation: Generation) -> None:
        del self._queued[generation]
        for block in generation.hashes[: generation.prompt_tokens // BLOCK_TOKENS]:
            self._promised[block] -= 1
            if not self._promised[block]:
                del self._promised[block]

    def uncached_tokens(self, hashes: Sequence[bytes], prompt_tokens: int) -> int:
        """Tokens of a prompt that the pod neither holds nor is about to compute."""
        most = (prompt_tokens - 1) // BLOCK_TOKENS
        held = len(self.scheduler.pool.cached_prefix(list(hashes), max_blocks=most))
        while held < most and self._promised[hashes[held]] > 0:
            held += 1
        return prompt_tokens - held * BLOCK_TOKENS

    def first_token_seconds(self, hashes: Sequence[bytes], prompt_tokens: int, *, now: float) -> float:
        """When a prompt that comes now would have its first token, if nothing else came and a slot were free."""
        under_way = 0.0 if self.step is None else max(self.step.ends_at - now, 0.0)
        now_computed = 0 if self.step is None else sum(tokens for _, tokens in self.step.work if tokens > 1)
        ahead = max(sum(self._left(each, tokens) for each, tokens in self._queued.items()) - now_computed, 0)
        tokens = ahead + self.uncached_tokens(hashes, prompt_tokens)
        rate = self.engine.prefill_tokens_per_second
        return under_way + max(self.engine.inter_token_seconds, tokens / rate)

    def _left(self, generation: Generation, tokens: int) -> int:
        return min(tokens, generation.prompt_tokens - generation.computed)

    def counts(self) -> PodCounts:
        """As the real pods count."""
        totals = self.scheduler.totals
        return PodCounts(
            requests=self.finished,
            prompt_tokens=totals.queried_tokens + self.lost.prompt_tokens,
            hit_tokens=totals.hit_tokens + self.lost.hit_tokens,
            preemptions=totals.preemptions + self.lost.preemptions,
        )
