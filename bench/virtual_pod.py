"""The simulated pod of the benchmarks in virtual time: podsim's own scheduler, and what a scrape of it shows.

The counters are those of vLLM 0.32: times and tokens of prefill are of requests that have ended, and a prompt that came
from another pod counts among the computed ones but for what was cached there, in next to no time.
"""

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.scrape_target import TrendWatch
from kvmesh.pods.pod_report import EndpointLoad
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, State, Step, StepOutcome


class VirtualPod:
    """One engine and its counters. Nothing here waits: the caller has the clock."""

    def __init__(self, address: str, engine: EngineSettings) -> None:
        self.address = address
        self.engine = engine
        self.restart()

    def restart(self) -> None:
        """Begin anew with an empty cache."""
        self.scheduler = Scheduler(self.engine)
        self.step: Step | None = None
        self.step_began = 0.0
        self._trend = TrendWatch()
        self._inter_token_seconds = self._prefill_seconds = self._first_token_seconds = 0.0
        self._inter_tokens = self._prefills = self._computed_tokens = self._first_tokens = 0
        self._fetched_bytes = self._fetch_seconds = 0.0
        self._told: dict[Generation, int] = {}  # the prefill pods' hits, of prompts that come from there

    def add(self, generation: Generation, *, prefill_cached_tokens: int | None = None) -> None:
        """Queue a generation; of one whose prompt comes from a prefill pod, with what that pod held of it."""
        if prefill_cached_tokens is not None:
            self._told[generation] = prefill_cached_tokens
        self.scheduler.add(generation)

    def begin_step(self, now: float) -> Step | None:
        """Plan the next step; None if there is nothing to do."""
        self.step = self.scheduler.begin_step(now)
        self.step_began = now
        return self.step

    def finish_step(self, now: float) -> tuple[StepOutcome, list[float]]:
        """End the step that runs; return what it gave, and the times between a sequence's tokens."""
        step = self.step
        assert step is not None, "a step that ends has begun"
        before = [generation.last_token_at for generation, _ in step.work]
        outcome = self.scheduler.finish_step(step, now)
        gaps = [
            now - last
            for (generation, _), last in zip(step.work, before, strict=True)
            if last is not None and generation.last_token_at != last
        ]
        self._inter_tokens += len(gaps)
        self._inter_token_seconds += sum(gaps)
        for generation in outcome.produced:
            if generation.produced == 1:
                self._first_tokens += 1
                self._first_token_seconds += now - generation.arrived_at
            if generation.state is State.FINISHED:
                self._count_ended(generation)
        return outcome, gaps

    def fetched(self, *, size: float, seconds: float) -> None:
        """Count a prompt's cache that has come from another pod."""
        self._fetched_bytes += size
        self._fetch_seconds += seconds

    def report(self, now: float) -> EndpointStatus:
        """Return what a scrape gets."""
        scheduler = self.scheduler
        totals = scheduler.totals
        load = EndpointLoad(
            waiting_requests=scheduler.waiting - scheduler.loading,
            fetching_requests=scheduler.loading,
            running_requests=scheduler.running,
            kv_usage=scheduler.pool.usage,
            prefix_hit_tokens=totals.hit_tokens,
            prefix_query_tokens=totals.queried_tokens,
            reported_at=now,
            kv_capacity_tokens=self.engine.capacity_tokens,
            preemptions=totals.preemptions,
            inter_token_seconds_sum=self._inter_token_seconds,
            inter_token_count=self._inter_tokens,
            prefill_seconds_sum=self._prefill_seconds,
            prefill_count=self._prefills,
            prefill_computed_tokens=self._computed_tokens,
            first_token_seconds_sum=self._first_token_seconds,
            first_token_count=self._first_tokens,
            fetched_tokens=totals.loaded_tokens,
            fetched_bytes=self._fetched_bytes,
            fetch_seconds_sum=self._fetch_seconds,
        )
        return EndpointStatus(
            address=self.address, reachability=Reachability.READY, load=load, trend=self._trend.report(load)
        )

    def _count_ended(self, generation: Generation) -> None:
        admitted_at, first_token_at = generation.admitted_at, generation.first_token_at
        assert admitted_at is not None, "what has ended has run"
        assert first_token_at is not None, "what has ended has run"
        self._prefills += 1
        self._prefill_seconds += first_token_at - admitted_at
        cached = self._told.pop(generation, generation.cached_tokens)
        self._computed_tokens += generation.prompt_tokens - cached
