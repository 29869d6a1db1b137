"""Connects the picker: builds the adapters, runs them until told to stop, and keeps the books of what was picked."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from extproc.adapters.admin_http import AdminServer
from extproc.adapters.degradation_log import DegradationLog
from extproc.adapters.grpc_server import ExtProcServer
from extproc.adapters.metrics_scraper import MetricsScraper
from extproc.adapters.prefix_index import NO_INDEXER, RedisPrefixIndex
from extproc.adapters.prompt_tokens import PromptTokens
from extproc.adapters.telemetry import NoTelemetry, PickerTelemetry
from extproc.adapters.tokenizer import ModelTokenizer
from extproc.config import PickerSettings
from extproc.core.decision import Decision
from extproc.core.exchange import RequestFacts
from extproc.core.inflight import Booking, Bookings
from extproc.core.match_watch import MatchWatch
from extproc.core.policy import Steering
from extproc.core.prompt_match import NO_HITS, match_prompts
from extproc.errors import ConfigError, InternalPickError, PickError, PrefixIndexUnavailableError
from extproc.pick_endpoint import EndpointPicker, Picked
from extproc.watch_matches import MatchReporter
from extproc.wire.admin_json import (
    DecisionRecord,
    decision_json,
    endpoint_json,
    explanation_json,
    refusal_json,
    state_json,
)
from kv_indexer.api import SourceStatus

if TYPE_CHECKING:
    from extproc.adapters.tracing import PickTracing

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # for exchanges that are being picked, or wait for their pod's first byte
RECENT_DECISIONS = 50
ADMIN_INDEX_TIMEOUT_SECONDS = 1.0


@dataclass(slots=True, kw_only=True)
class BookedExchange:
    """One routed request until its exchange ends."""

    service: "PickerService"
    endpoints: Sequence[str]
    booking: Booking
    status: int = 0  # the pod's answer, 0 until it came

    def responded(self, *, status: int, served_by: str | None) -> None:
        """Take note of the pod's HTTP status; after a retry the booking moves to the pod that took the request."""
        self.status = status
        if served_by is not None and served_by != self.booking.endpoint and served_by in self.service.picks:
            self.service.rebook(self, served_by)

    def finish(self) -> None:
        """Release the booking."""
        self.service.bookings.release(self.booking)
        self.service.telemetry.exchange_ended(endpoint=self.booking.endpoint, status=self.status)


class PickerService:
    """Picks, books, counts; what the gRPC server and the admin pages talk to."""

    def __init__(self, settings: PickerSettings) -> None:
        self.settings = settings
        self.ready = False
        self.telemetry = PickerTelemetry()
        self.bookings = Bookings()
        self.picks: dict[str, int] = dict.fromkeys(settings.endpoints, 0)
        self.recent: deque[DecisionRecord] = deque(maxlen=RECENT_DECISIONS)
        self.endpoints = MetricsScraper(
            settings.endpoints,
            interval_seconds=settings.scrape_interval_seconds,
            timeout_seconds=settings.scrape_timeout_seconds,
            stale_after_seconds=settings.policy.stale_after_seconds,
        )
        self.index = RedisPrefixIndex(
            url=settings.redis_url, hash_seed=settings.hash_seed, timeout_seconds=settings.index_timeout_seconds
        )
        self.degradations = DegradationLog()
        self.matches = MatchWatch()
        self.match_reporter = MatchReporter(
            watch=self.matches,
            endpoints=lambda now: self.endpoints.snapshot(now=now),
            display=self.telemetry,
            clock=time.monotonic,
        )
        self.tracing = _tracing(settings.otlp_endpoint)
        folder = settings.tokenizer_folder
        self.tokens = PromptTokens(ModelTokenizer.load(folder)) if folder is not None else None
        if self.tokens is None:
            log.warning("no --tokenizer: prompts are not tokenized and every request is routed on load alone")
        self.picker = EndpointPicker(
            endpoints=self.endpoints,
            bookings=self.bookings,
            index=self.index,
            tokens=self.tokens,
            model=settings.model,
            known_models=settings.known_models,
            policy=settings.policy,
            telemetry=self.telemetry,
            clock=time.monotonic,
            random=random.random,
        )

    async def pick(self, facts: RequestFacts, body: bytes | None) -> BookedExchange:
        """Decide and book; raise PickError with the answer for the client."""
        started_unix_ns = time.time_ns() if self.tracing is not None else 0
        try:
            picked = await self.picker.pick(facts, body)
        except PickError as refusal:
            self._refused(facts, refusal, started_unix_ns)
            raise
        except Exception as defect:
            log.exception("a pick failed; the client gets a 500", extra={"request_id": facts.request_id})
            internal = InternalPickError("kvmesh failed to route this request; its log says why")
            self._refused(facts, internal, started_unix_ns)
            raise internal from defect
        return self._booked(facts, picked, started_unix_ns)

    def _refused(self, facts: RequestFacts, refusal: PickError, started_unix_ns: int) -> None:
        self._trace(facts, refusal, started_unix_ns)
        self.telemetry.refused(refusal.reason)
        self.recent.appendleft(DecisionRecord(at=time.time(), facts=facts, model=None, outcome=refusal))

    def _booked(self, facts: RequestFacts, picked: Picked, started_unix_ns: int) -> BookedExchange:
        decision = picked.decision
        self._trace(facts, decision, started_unix_ns)
        self.degradations.note(decision.degraded, now=time.monotonic())
        winner = decision.endpoints[0]
        booking = self.bookings.book(winner, now=time.monotonic())
        self.picks[winner] += 1
        self.matches.routed(winner, prompt_tokens=decision.prompt_tokens, matched_tokens=decision.matched_tokens)
        self.telemetry.routed(
            endpoint=winner,
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            degraded=decision.degraded,
        )
        self.recent.appendleft(
            DecisionRecord(at=time.time(), facts=facts, model=picked.request.model, outcome=decision)
        )
        one_address = self.settings.steering is Steering.ORIGINAL_DST
        return BookedExchange(
            service=self, endpoints=decision.endpoints[:1] if one_address else decision.endpoints, booking=booking
        )

    def _trace(self, facts: RequestFacts, outcome: Decision | PickError, started_unix_ns: int) -> None:
        if self.tracing is not None:
            self.tracing.record(facts, outcome, started_unix_ns=started_unix_ns, ended_unix_ns=time.time_ns())

    async def close(self) -> None:
        """Let go of Redis and of the tokenizer's thread."""
        await self.index.close()
        if self.tokens is not None:
            self.tokens.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)  # its last export may take a while

    def rebook(self, exchange: BookedExchange, endpoint: str) -> None:
        """Move a booking to the pod that Envoy's retry went to."""
        self.telemetry.rerouted(picked=exchange.booking.endpoint, served_by=endpoint)
        self.bookings.release(exchange.booking)
        exchange.booking = self.bookings.book(endpoint, now=time.monotonic())

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come. A missing index does not count: the picker serves without it."""
        facts = {"endpoint_problems": self.endpoints.problems(), "index_problem": self.index.problem}
        return self.ready, facts

    def metrics(self) -> bytes:
        """Return Prometheus text."""
        return self.telemetry.exposition()

    async def state(self) -> dict[str, Any]:
        """Return endpoints, index and recent decisions."""
        sources, index = await self._index()
        blocks: dict[str, int] = {}
        for source in sources:
            blocks[source.endpoint] = blocks.get(source.endpoint, 0) + source.cached_blocks
        bookings = self.bookings.by_endpoint()
        return state_json(
            now=time.time(),
            endpoints=[
                endpoint_json(
                    status,
                    cached_blocks=blocks.get(status.address, 0),
                    bookings=bookings.get(status.address, 0),
                    picks=self.picks[status.address],
                    all_picks=sum(self.picks.values()),
                )
                for status in self.endpoints.snapshot(now=time.monotonic())
            ],
            index=index,
            decisions=[decision_json(record) for record in self.recent],
        )

    async def explain(self, facts: RequestFacts, body: bytes) -> dict[str, Any]:
        """Decide without booking, and return what the decision rests on."""
        sources, _ = await self._index()
        # what nobody sent must not be in the metrics
        picker = replace(self.picker, telemetry=NoTelemetry())
        try:
            picked = await picker.pick(facts, body)
        except PickError as refusal:
            candidates = picker.candidates(match_prompts([], NO_HITS), now=time.monotonic())
            return refusal_json(refusal, candidates, policy=self.settings.policy)
        return explanation_json(
            picked.request,
            picked.decision,
            policy=self.settings.policy,
            blocks={source.endpoint: source.block_size for source in sources if source.block_size},
        )

    async def _index(self) -> tuple[Sequence[SourceStatus], dict[str, Any]]:
        """Return the index's sources, none where it cannot be read, and its state for the page."""
        try:
            async with asyncio.timeout(ADMIN_INDEX_TIMEOUT_SECONDS):
                status = await self.index.status()
        except (PrefixIndexUnavailableError, TimeoutError) as error:
            return (), {"state": "unavailable", "problem": str(error) or "no answer in time", "sources": 0}
        problem = None if status.indexer_alive else NO_INDEXER
        state = {"state": "stale" if problem else "ok", "problem": problem, "sources": len(status.sources)}
        return status.sources, state


def _tracing(otlp_endpoint: str | None) -> "PickTracing | None":
    if otlp_endpoint is None:
        return None
    try:
        from extproc.adapters.tracing import PickTracing  # noqa: PLC0415 - an optional extra
    except ImportError as error:
        raise ConfigError(f"--otlp-endpoint needs: pip install 'kvmesh[otel]' ({error})") from error
    return PickTracing(otlp_endpoint=otlp_endpoint)


async def serve(settings: PickerSettings, *, stop: asyncio.Event) -> None:
    """Run the picker until `stop` is set. Raise ConfigError where a port is taken or a tokenizer cannot be used."""
    service = PickerService(settings)
    server = ExtProcServer(picks=service, max_body_bytes=settings.max_body_bytes)
    admin = AdminServer(service, max_body_bytes=settings.max_body_bytes)
    try:
        await admin.start(host=settings.host, port=settings.admin_port)
        await server.start(host=settings.host, port=settings.grpc_port)
        async with asyncio.TaskGroup() as tasks:
            background = (
                tasks.create_task(service.endpoints.run(), name="scrape endpoints"),
                tasks.create_task(service.match_reporter.run(), name="watch matches"),
            )
            await service.endpoints.first_scrapes()
            await _take_traffic(service, server, stop=stop)
            for task in background:
                task.cancel()
    finally:
        await server.stop(grace_seconds=0)
        await admin.stop()
        await service.close()


async def _take_traffic(service: PickerService, server: ExtProcServer, *, stop: asyncio.Event) -> None:
    """Be ready until `stop` is set, then let the open exchanges end within the grace."""
    service.ready = True
    await server.set_serving(True)
    log.info("ready", extra={"grpc_port": service.settings.grpc_port, "endpoints": len(service.settings.endpoints)})
    await stop.wait()
    log.info("stopping", extra={"open_streams": server.open_streams})
    service.ready = False
    await server.set_serving(False)
    # Envoys go on sending until they have seen that; an exchange that is refused meanwhile is a 503 for its client
    await asyncio.sleep(service.settings.drain_seconds)
    server.release_answered()
    await server.stop(grace_seconds=GRACE_SECONDS)
