"""One simulated engine in virtual time: what it reports to a router, and when a prompt would be begun there in truth.

Nothing here waits; `virtual_world` calls.
"""

from collections import Counter
from collections.abc import Sequence

from bench.routing.one_cache import BLOCK_TOKENS
from bench.routing.plan import PodSettings
from bench.routing.pod_counters import PodCounts
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.endpoint_samples import TrendWatch
from kvmesh.pods.pod_report import EndpointLoad
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, Step


class Pod:
    """The pods' own scheduler, its counters as vLLM has them, and what only a simulation can know."""

    def __init__(self, address: str, settings: PodSettings) -> None:
        self.address = address
        self.engine = EngineSettings(
            total_blocks=settings.kv_blocks,
            max_running=settings.max_num_seqs,
            max_step_tokens=settings.max_num_batched_tokens,
            prefill_tokens_per_second=settings.prefill_tokens_per_second,
            inter_token_seconds=settings.inter_token_ms / 1000,
        )
        self.finished = 0
        self.lost = PodCounts()  # counted by those who were killed
        self.restart()

    def restart(self) -> None:
        """Begin anew with an empty cache."""
        if hasattr(self, "scheduler"):
            self.lost = self.counts()
        self.scheduler = Scheduler(self.engine)
        self.step: Step | None = None
        self.trend = TrendWatch()
        self._latencies = _Latencies()
        self._queued: dict[Generation, int] = {}  # without a first token: tokens of each that nobody before it computes
        self._promised: Counter[bytes] = Counter()  # blocks of theirs

    def add(self, generation: Generation) -> None:
        """Take a request in."""
        self._queued[generation] = self.uncached_tokens(generation.hashes, generation.prompt_tokens)
        self._promised.update(generation.hashes)
        self.scheduler.add(generation)

    def answered(self, generation: Generation) -> None:
        """Count a first token."""
        del self._queued[generation]
        for block in generation.hashes[: generation.prompt_tokens // BLOCK_TOKENS]:
            self._promised[block] -= 1
            if not self._promised[block]:
                del self._promised[block]
        self._latencies.answered(generation)

    def ended(self, generation: Generation) -> None:
        """Count a request that was answered."""
        self.finished += 1
        self._latencies.ended(generation)

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

    def report(self, now: float) -> EndpointStatus:
        """What a scrape gets."""
        totals, latencies = self.scheduler.totals, self._latencies
        load = EndpointLoad(
            waiting_requests=self.scheduler.waiting,
            running_requests=self.scheduler.running,
            kv_usage=self.scheduler.pool.usage,
            prefix_hit_tokens=totals.hit_tokens,
            prefix_query_tokens=totals.queried_tokens,
            reported_at=now,
            kv_capacity_tokens=self.engine.capacity_tokens,
            inter_token_seconds_sum=latencies.decode_seconds,
            inter_token_count=latencies.decoded,
            prefill_seconds_sum=latencies.prefill_seconds,
            prefill_count=latencies.prefills,
            prefill_computed_tokens=latencies.computed_tokens,
            first_token_seconds_sum=latencies.first_seconds,
            first_token_count=latencies.first_tokens,
        )
        return EndpointStatus(
            address=self.address, reachability=Reachability.READY, load=load, trend=self.trend.report(load)
        )


class _Latencies:
    """Sums since the pod's start, as vLLM's histograms have them."""

    def __init__(self) -> None:
        self.first_seconds = self.prefill_seconds = self.decode_seconds = 0.0
        self.first_tokens = self.prefills = self.computed_tokens = self.decoded = 0

    def answered(self, generation: Generation) -> None:
        assert generation.first_token_at is not None
        self.first_tokens += 1
        self.first_seconds += generation.first_token_at - generation.arrived_at

    def ended(self, generation: Generation) -> None:
        """Prefill and decode are counted at a request's end."""
        first, last, admitted = generation.first_token_at, generation.last_token_at, generation.admitted_at
        assert first is not None
        assert last is not None
        assert admitted is not None
        self.prefills += 1
        self.prefill_seconds += first - admitted
        self.computed_tokens += generation.prompt_tokens - generation.cached_tokens
        self.decoded += generation.produced - 1
        self.decode_seconds += last - first
