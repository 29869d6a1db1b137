"""One simulated pod without its HTTP side: the engine's loop, its metrics and its events.

The server submits prompts and waits for their tokens; `run` is the engine's loop and runs as a task.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from podsim.core.generate import Answer, Limits, generate_answer, prompt_seed
from podsim.core.link import LinkSettings
from podsim.core.scheduler import EngineSettings, Generation, Scheduler, State, Step
from podsim.errors import (
    MAX_QUEUED_REQUESTS,
    MAX_QUEUED_TOKENS,
    PodFullError,
    RequestRefusedError,
    SettingsError,
)
from podsim.kv_transfer import KvTransfer
from podsim.model_folder import ModelFolder
from podsim.publisher import EventPublisher
from podsim.wire.kv_transfer import KvTransferConfig, remote_cached_tokens
from podsim.wire.metrics_text import EngineState, PodMetrics

log = logging.getLogger(__name__)

_CATCH_UP_SECONDS = 0.02  # a timer that fires up to this late does not slow the engine down


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSettings:
    """What one pod serves and how fast."""

    model: str = "tiny"
    max_model_len: int = 16_384  # tokens
    seed: int = 0
    max_queued_requests: int | None = None  # waiting or running; vLLM's --max-num-queued-reqs; None: no limit
    max_queued_tokens: int | None = None  # in prompts without a first token; vLLM's --max-num-queued-tokens
    scale_out: bool = True  # whether /render answers; vLLM's --enable-scale-out
    tokenizes: bool = True  # whether /tokenize answers; false for a proxy that passes only /v1
    kv_transfer: KvTransferConfig | None = None  # if None, `kv_transfer_params` are ignored, as in vLLM
    kv_link: LinkSettings = field(default_factory=LinkSettings)
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # vLLM's --api-key: guarded paths need one of these
    engine: EngineSettings

    def check(self) -> None:
        """Raise SettingsError unless the longest sequence fits into the cache, as vLLM requires."""
        if self.engine.block_size < 1 or self.engine.total_blocks < 2:
            raise SettingsError("the cache needs a block size of at least 1 token and at least 2 blocks")
        if self.max_model_len > self.engine.capacity_tokens:
            raise SettingsError(
                f"max-model-len {self.max_model_len} does not fit into the KV cache of "
                f"{self.engine.capacity_tokens} tokens: raise kv-blocks or lower max-model-len"
            )


class Ticket:
    """A submitted prompt; the server reads its answer here as the engine produces it."""

    __slots__ = (
        *("_waiter", "answer", "failure", "generation", "kv_transfer_params", "prefill_cached_tokens"),
        "streamed",
    )

    def __init__(
        self, generation: Generation, answer: Answer, *, streamed: bool, prefill_cached_tokens: int | None = None
    ) -> None:
        self.generation: Final = generation
        self.answer: Final = answer
        self.streamed: Final = streamed
        self.prefill_cached_tokens: Final = prefill_cached_tokens  # of its prefill request, if this is a decode request
        self.kv_transfer_params: dict[str, Any] | None = None  # for the answer of a prefill request
        self.failure: RequestRefusedError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def cached_tokens(self) -> int:
        """Return the count for `usage`; for a decode request vLLM reports what its prefill request found cached."""
        told = self.prefill_cached_tokens
        return self.generation.cached_tokens if told is None else told

    @property
    def finished(self) -> bool:
        """Tell whether the last token has been generated."""
        return self.generation.state is State.FINISHED

    async def progress(self, seen: int) -> int:
        """Wait until more than `seen` tokens exist (or all, if not streamed) and return their number.

        If the generation failed, raise the error that ended it.
        """
        while self.generation.produced <= seen or not (self.streamed or self.finished):
            if self.failure is not None:
                raise self.failure
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self.generation.produced

    def wake(self) -> None:
        """Tell waiting readers that there is something new; the engine calls this."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Pod:
    """An engine that computes nothing but takes as long as a real one."""

    def __init__(
        self,
        settings: PodSettings,
        *,
        folder: ModelFolder,
        publisher: EventPublisher,
        monotonic: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        settings.check()
        self.settings = settings
        self.folder = folder
        self.publisher = publisher
        self.scheduler = Scheduler(settings.engine)
        self.metrics = PodMetrics(
            model=settings.model,
            max_model_len=settings.max_model_len,
            block_size=settings.engine.block_size,
            total_blocks=settings.engine.total_blocks,
            started_at=wall_clock(),
        )
        self.kv_transfer: KvTransfer | None = None
        if settings.kv_transfer is not None:
            self.kv_transfer = KvTransfer(
                settings.kv_transfer,
                settings.kv_link,
                model=settings.model,
                metric_labels=self.metrics.labels,
                scheduler=self.scheduler,
                on_change=self._wake,
                on_failed=self._fail,
            )
        self._monotonic = monotonic
        self._wall_clock = wall_clock
        self._tickets: dict[Generation, Ticket] = {}
        self._work = asyncio.Event()

    def check_admission(self, sequences: int) -> None:
        """Raise and count PodFullError if a queue limit is reached; as in vLLM, checked once, as a request starts."""
        settings = self.settings
        if settings.max_queued_requests is not None and len(self._tickets) + sequences > settings.max_queued_requests:
            self._refuse(MAX_QUEUED_REQUESTS)
        if settings.max_queued_tokens is not None:
            # count whole prompts, as vLLM does, including tokens that are already computed or cached
            tokens = sum(generation.prompt_tokens for generation in self._tickets if not generation.produced)
            if tokens >= settings.max_queued_tokens:
                self._refuse(MAX_QUEUED_TOKENS)

    def _refuse(self, reason: str) -> None:
        self.metrics.rejections[reason] += 1
        raise PodFullError(reason)

    def submit(
        self,
        prompt: list[int],
        limits: Limits,
        *,
        choice: int = 0,
        cache_salt: str | None = None,
        reports_hits: bool = False,
        streamed: bool = False,
        kv_transfer_params: Mapping[str, Any] | None = None,
        request_id: str = "",
    ) -> Ticket:
        """Queue a prompt whose length the caller has checked; `choice` makes the n answers differ.

        `request_id` is the engine's id, which ends in random digits; only KV transfers need it.
        """
        rng = random.Random(prompt_seed(prompt, seed=self.settings.seed) + choice)  # noqa: S311 - reproducible text
        answer = generate_answer(rng, self.folder.vocabulary, limits)
        generation = Generation(
            token_ids=prompt + answer.token_ids,
            prompt_tokens=len(prompt),
            arrived_at=self._monotonic(),
            cache_salt=cache_salt,
            reports_hits=reports_hits,
        )
        ticket = self._tickets[generation] = Ticket(
            generation,
            answer,
            streamed=streamed,
            prefill_cached_tokens=remote_cached_tokens(kv_transfer_params) if kv_transfer_params else None,
        )
        if kv_transfer_params:
            # vLLM finds stop strings outside its engine and then aborts the generation there, which frees its blocks
            pins = answer.stop_reason is None or len(answer.token_ids) == limits.max_tokens
            self._admit(generation, kv_transfer_params, request_id=request_id, pins=pins)
        self.scheduler.add(generation)
        self._work.set()
        return ticket

    def _admit(
        self, generation: Generation, kv_transfer_params: Mapping[str, Any], *, request_id: str, pins: bool
    ) -> None:
        if self.kv_transfer is None:
            log.warning("Got kv_transfer_params, but no KVConnector found. Disabling KVTransfer for this request.")
        else:
            self.kv_transfer.admit(generation, kv_transfer_params, request_id=request_id, pins=pins)

    def reject_kv(self, kv_transfer_params: Mapping[str, Any] | None) -> None:
        """Free the blocks that a prefill pod keeps for a request that ended before its answer began."""
        if kv_transfer_params and self.kv_transfer is not None:
            self.kv_transfer.reject(kv_transfer_params)

    def abort(self, ticket: Ticket) -> None:
        """Free the ticket's slot and blocks after its client left; does nothing if it has finished."""
        if self._tickets.pop(ticket.generation, None) is not None:
            if self.kv_transfer is not None:
                self.kv_transfer.abort(ticket.generation)
            self.scheduler.abort(ticket.generation)
            self.metrics.finished["abort"] += 1

    def reset_prefix_cache(self) -> bool:
        """Empty the cache unless a generation is running; as in vLLM, the next step sends the event."""
        return self.scheduler.pool.reset()

    def engine_state(self) -> EngineState:
        """Return the engine's current numbers for /metrics."""
        totals = self.scheduler.totals
        return EngineState(
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            deferred=self.scheduler.loading + self.scheduler.loaded,
            kv_usage=self.scheduler.pool.usage,
            prefix_queries=totals.queried_tokens,
            prefix_hits=totals.hit_tokens,
            # vLLM asks its connector about every token missing from the pod's own cache, whatever the request says
            external_queries=totals.queried_tokens - totals.hit_tokens if self.kv_transfer is not None else 0,
            external_hits=totals.loaded_tokens,
            preemptions=totals.preemptions,
        )

    async def run(self) -> None:
        """Run the engine's loop until cancelled."""
        due = 0.0
        while True:
            now = self._monotonic()
            step = self.scheduler.begin_step(due if now - due < _CATCH_UP_SECONDS else now)
            if self.kv_transfer is not None:
                self.kv_transfer.start_loads()
            if step is None:
                self._work.clear()
                await self._work.wait()
                due = 0.0
                continue
            due = step.ends_at
            await asyncio.sleep(max(0.0, due - now))
            self._finish(step, now=self._monotonic())

    def _finish(self, step: Step, *, now: float) -> None:
        last_tokens_at = [generation.last_token_at for generation, _ in step.work]
        outcome = self.scheduler.finish_step(step, now)
        self.metrics.step_tokens.observe(sum(tokens for _, tokens in step.work))
        for (generation, _), last_token_at in zip(step.work, last_tokens_at, strict=True):
            if last_token_at is not None and generation.last_token_at != last_token_at:
                self.metrics.inter_token_latency.observe(now - last_token_at)
        for generation in outcome.produced:
            self._count_token(generation, now=now)
            ticket = self._tickets[generation]
            if generation.state is State.FINISHED:
                del self._tickets[generation]
                if generation.keeps_blocks and self.kv_transfer is not None:
                    ticket.kv_transfer_params = self.kv_transfer.hand_over(generation)
                self._count_finished(ticket, now=now)
                ticket.wake()
            elif ticket.streamed:
                ticket.wake()
        if outcome.events:
            self.publisher.publish(outcome.events, timestamp=self._wall_clock())

    def _wake(self) -> None:
        self._work.set()

    def _fail(self, generation: Generation, failure: RequestRefusedError) -> None:
        ticket = self._tickets.pop(generation, None)
        if ticket is None:
            return  # its client has already left
        metrics = self.metrics
        metrics.finished["error"] += 1
        metrics.request_prompt_tokens.observe(generation.prompt_tokens)
        metrics.request_generation_tokens.observe(0)
        metrics.request_latency.observe(self._monotonic() - generation.arrived_at)
        metrics.prefill_computed_tokens.observe(generation.prompt_tokens)
        ticket.failure = failure
        ticket.wake()

    def _count_token(self, generation: Generation, *, now: float) -> None:
        metrics = self.metrics
        metrics.generation_tokens += 1
        if generation.produced == 1:
            metrics.prompt_tokens += generation.prompt_tokens
            metrics.cached_prompt_tokens += generation.cached_tokens
            metrics.loaded_prompt_tokens += generation.loaded_tokens
            metrics.time_to_first_token.observe(now - generation.arrived_at)

    def _count_finished(self, ticket: Ticket, *, now: float) -> None:
        metrics, generation = self.metrics, ticket.generation
        metrics.finished[ticket.answer.finish_reason] += 1
        metrics.request_prompt_tokens.observe(generation.prompt_tokens)
        metrics.request_generation_tokens.observe(generation.produced)
        metrics.request_latency.observe(now - generation.arrived_at)
        admitted_at = generation.admitted_at if generation.admitted_at is not None else now
        first_token_at = generation.first_token_at if generation.first_token_at is not None else now
        metrics.queue_time.observe(admitted_at - generation.arrived_at)
        metrics.prefill_time.observe(first_token_at - admitted_at)
        metrics.decode_time.observe(now - first_token_at)
        metrics.inference_time.observe(now - admitted_at)
        metrics.prefill_computed_tokens.observe(generation.prompt_tokens - ticket.cached_tokens)
