"""Connects the picker: builds the adapters, runs them until told to stop, and opens an exchange for each pick."""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from extproc.adapters.admin_http import AdminServer
from extproc.adapters.degradation_log import DegradationLog
from extproc.adapters.grpc_server import ExtProcServer
from extproc.adapters.metrics_scraper import MetricsScraper
from extproc.adapters.overload_telemetry import OverloadTelemetry
from extproc.adapters.pod_render import PodRender, RenderSettings
from extproc.adapters.prefix_index import RedisPrefixIndex
from extproc.adapters.prompt_tokens import PromptTokenSource, TokenSettings
from extproc.adapters.quota_telemetry import QuotaMetrics
from extproc.adapters.quotas import Quotas
from extproc.adapters.shared_state import SharedState, SharedStateSettings
from extproc.adapters.telemetry import PickerTelemetry
from extproc.admin_pages import RECENT_DECISIONS, PickerPages, record_of
from extproc.admission_queue import AdmissionQueue
from extproc.admit_request import RequestAdmission
from extproc.booked_exchange import BookedExchange, ReadResponse
from extproc.config import PickerSettings
from extproc.core.classify import claims_named, headers_named
from extproc.core.decision import Decision
from extproc.core.degradation import Degradation
from extproc.core.endpoint import Reachability
from extproc.core.exchange import RequestFacts
from extproc.core.flow_queue import FlowQueue
from extproc.core.hotspot import HotPrefixes
from extproc.core.models import ModelTable, ServedModel, TokensFrom
from extproc.core.pace import Pace
from extproc.core.policy import Steering
from extproc.core.response_plan import PASS_PLAN, Prediction, ResponsePlan
from extproc.core.shared_load import EndpointBookings
from extproc.core.turns import Turns
from extproc.doctor.examine import run_startup_checks
from extproc.errors import ConfigError, InternalPickError, PickError, PromptTokensError
from extproc.pick_endpoint import EndpointPicker, Picked
from extproc.picker_books import PickerBooks
from extproc.pool_pressure import PoolPressure
from extproc.watch_matches import MatchReporter
from extproc.watch_realised import RealisedReporter
from extproc.wire.admin_json import DecisionRecord

if TYPE_CHECKING:
    from extproc.adapters.tracing import PickTracing

log = logging.getLogger(__name__)

READS_BURST_SECONDS = 5.0  # so many seconds' worth of reads may come at once
GRACE_SECONDS = 5.0  # for exchanges that are being picked, or wait for their pod's first byte


class PickerService:
    """Picks, books, counts; what the gRPC server talks to."""

    def __init__(self, settings: PickerSettings) -> None:
        self.settings = settings
        self.telemetry = PickerTelemetry()
        self.overload = OverloadTelemetry(self.telemetry.registry, classes=settings.policy.priorities.classes)
        self.models = settings.model_table
        self.recent: deque[DecisionRecord] = deque(maxlen=RECENT_DECISIONS)
        self.degradations = DegradationLog()
        self.books = PickerBooks(
            settings.endpoints,
            policy=settings.policy,
            telemetry=self.telemetry,
            overload=self.overload,
            degradations=self.degradations,
        )
        self.endpoints = MetricsScraper(
            settings.endpoints,
            interval_seconds=settings.scrape_interval_seconds,
            timeout_seconds=settings.scrape_timeout_seconds,
            stale_after_seconds=settings.policy.stale_after_seconds,
            restarted=self.books.restarted,
            reported=self.books.reported,
            changed=self.books.changed,
        )
        self.shared = _shared(settings, self.books)
        self.quotas = Quotas(
            url=settings.redis_url,
            hash_seed=settings.hash_seed,
            quotas=settings.policy.priorities.quotas,
            others=lambda: self.shared.replicas if self.shared is not None else 0,
        )
        self.books.quotas = self.quotas
        self.telemetry.registry.register(QuotaMetrics(self.quotas))
        self.index = RedisPrefixIndex(
            url=settings.redis_url,
            hash_seed=settings.hash_seed,
            timeout_seconds=settings.index_timeout_seconds,
            shared=self.shared,
            quotas=self.quotas,
        )
        self.match_reporter = MatchReporter(
            watch=self.books.matches,
            endpoints=lambda now: self.endpoints.snapshot(now=now),
            display=self.telemetry,
            clock=time.monotonic,
        )
        self.realised_reporter = RealisedReporter(
            watch=self.books.realised_watch, display=self.telemetry, clock=time.monotonic
        )
        self.tracing = _tracing(settings.otlp_endpoint)
        self.render = PodRender(
            endpoints=self._rendering_endpoints,
            settings=RenderSettings(
                timeout_seconds=settings.render_timeout_seconds,
                media_timeout_seconds=4 * settings.render_timeout_seconds,
            ),
        )
        self.prompts = _prompt_source(self.models, self.render, budget_tokens=settings.token_budget)
        priorities = settings.policy.priorities
        order = FlowQueue(priorities)
        self.queue = AdmissionQueue(order, clock=time.monotonic, telemetry=self.overload)
        self.books.freed = self.queue.wake
        self.degradation = Degradation(priorities, on_change=self.overload.step_changed)
        self.overload.show(
            queued=lambda: self.queue.depth,
            steps_in_force=lambda: {
                ((step.class_name, step.step.step.value), 1.0)
                for step in self.degradation.in_force(now=time.monotonic())
            },
            estimate_errors=lambda: (
                ((endpoint,), error.mean_seconds) for endpoint, error in self.books.estimates.errors().items()
            ),
        )
        self.pressure = PoolPressure(
            policy=priorities,
            estimates=self.books.estimates,
            degradation=self.degradation,
            waiting=order,
            clock=time.monotonic,
            random=random.random,
            replicas=lambda: 1 + (self.shared.replicas if self.shared is not None else 0),
        )
        self.picker = EndpointPicker(
            endpoints=self.endpoints,
            bookings=self.books.bookings,
            index=self.index,
            prompts=self.prompts,
            models=self.models,
            known_models=settings.known_models,
            policy=settings.policy,
            pressure=self.pressure,
            quotas=self.quotas,
            health=self.books.health,
            memory=self.books.memory,
            hot=HotPrefixes(settings.policy.hotspot),
            telemetry=self.telemetry,
            clock=time.monotonic,
            random=random.random,
            turns=Turns(),
            max_body_bytes=settings.max_body_bytes,
        )
        self.admission = RequestAdmission(
            picker=self.picker,
            policy=priorities,
            pressure=self.pressure,
            estimates=self.books.estimates,
            health=self.books.health,
            queue=self.queue,
            book=self._booked,
            unbook=lambda booked: booked.exchange.finish(),
            others=self._others,
            telemetry=self.overload,
            clock=time.monotonic,
        )
        self.pages = PickerPages(
            picker=self.picker,
            admission=self.admission,
            degradation=self.degradation,
            quotas=self.quotas,
            books=self.books,
            index=self.index,
            endpoints=self.endpoints,
            telemetry=self.telemetry,
            recent=self.recent,
            render=self.render,
            prompts=self.prompts,
        )
        self._labels = self.models.names()
        self._reads = Pace(per_second=settings.reads_per_second, burst_seconds=READS_BURST_SECONDS)
        self._one_address = settings.steering is Steering.ORIGINAL_DST

    # --- ext_proc_call.Picks --------------------------------------------------------------------------------------

    async def pick(self, facts: RequestFacts, body: bytes | None) -> BookedExchange:
        """Decide and book, at once or when there is room; raise PickError with the answer for the client."""
        started_unix_ns = time.time_ns() if self.tracing is not None else 0
        try:
            booked = await self.admission.admit(facts, body)
        except PickError as refusal:
            self._refused(facts, refusal, started_unix_ns)
            raise
        except Exception as defect:
            log.exception("a pick failed; the client gets a 500", extra={"request_id": facts.request_id})
            internal = InternalPickError("kvmesh failed to route this request; its log says why")
            self._refused(facts, internal, started_unix_ns)
            raise internal from defect
        self._trace(facts, booked.decision, started_unix_ns)
        return booked.exchange

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response whose pick, here or on another picker, made this plan."""
        return ReadResponse(books=self.books, plan=plan)

    # --------------------------------------------------------------------------------------------------------------

    def _refused(self, facts: RequestFacts, refusal: PickError, started_unix_ns: int) -> None:
        self._trace(facts, refusal, started_unix_ns)
        self.telemetry.refused(refusal.reason)
        self.recent.appendleft(DecisionRecord(at=time.time(), facts=facts, model=None, outcome=refusal))

    def _booked(self, picked: Picked) -> "_Booked":
        decision, prepared = picked.decision, picked.prepared
        resolved = prepared.resolved
        plan = self._plan(picked)  # before the booking, as all that may fail: nobody would release it
        exchange = BookedExchange(
            books=self.books,
            endpoints=decision.endpoints[:1] if self._one_address else decision.endpoints,
            booking=self.books.book(picked),
            model=resolved.requested if resolved.requested is not None and resolved.requested in self._labels else "",
            arm=resolved.arm,
            body=prepared.sent.changed,
            removed_headers=prepared.sent.removed_headers,
            response_headers=prepared.told,
            plan=plan,
        )
        # the answer leaves in this turn of the loop; what nobody waits for comes after it
        asyncio.get_running_loop().call_soon(self._remember, prepared.facts, picked)
        return _Booked(exchange=exchange, decision=decision)

    def _others(self) -> Mapping[str, EndpointBookings] | None:
        """Return what the other replicas have booked, as they last told."""
        return self.shared.others if self.shared is not None else None

    def _remember(self, facts: RequestFacts, picked: Picked) -> None:
        decision = picked.decision
        if decision.degraded:
            self.degradations.note(decision.degraded, now=time.monotonic())
        self.books.remember(picked)
        self.recent.appendleft(record_of(picked, facts, at=time.time()))

    def _plan(self, picked: Picked) -> ResponsePlan:
        """Return what is to be done with the response; mostly nothing."""
        settings, prepared, decision = self.settings, picked.prepared, picked.decision
        resolved = prepared.resolved
        # a model that the load has put in the place of another one keeps its name
        rewritten = resolved.requested if resolved.is_rewritten and not prepared.has_smaller_model else None
        rewritten = rewritten if prepared.sent.changed is not None else None
        sampled = random.random() < settings.sample_share  # noqa: S311
        read_below = 0 if prepared.request.stream else settings.read_below_bytes
        if read_below and not sampled and not (picked.is_comparable and self._reads.take(now=time.monotonic())):
            read_below = 0
        prediction = None
        if picked.is_comparable and (sampled or read_below):
            prediction = Prediction(
                model=resolved.base.name if resolved.base is not None else "",
                arm=resolved.arm,
                endpoint=decision.endpoints[0],
                prompt_tokens=decision.prompt_tokens,
                matched_tokens=decision.matched_tokens,
                best_matched_tokens=decision.best_matched_tokens,
            )
        quota = prepared.quota.note if prepared.quota is not None else None
        if rewritten is None and prediction is None and quota is None:
            return PASS_PLAN
        return ResponsePlan(
            requested_model=rewritten,
            prediction=prediction,
            sampled=sampled,
            read_below_bytes=read_below,
            quota=quota,
        )

    def _trace(self, facts: RequestFacts, outcome: Decision | PickError, started_unix_ns: int) -> None:
        if self.tracing is not None:
            self.tracing.record(facts, outcome, started_unix_ns=started_unix_ns, ended_unix_ns=time.time_ns())

    def _rendering_endpoints(self, model: ServedModel) -> Sequence[str]:
        """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
        return [
            status.address
            for status in self.endpoints.snapshot(now=time.monotonic())
            if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model.name))
        ]

    def background(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return what runs beside the requests, by name."""
        tasks = {
            "scrape endpoints": self.endpoints.run(),
            "watch matches": self.match_reporter.run(),
            "watch realised": self.realised_reporter.run(),
            "check once": self._check_once(),
            "share quotas": self.quotas.run(),
        }
        return tasks if self.shared is None else tasks | {"share load": self.shared.run()}

    async def _check_once(self) -> None:
        """Look for what is wrong though everything runs, once the pods have had time to start."""
        self.pages.findings = await run_startup_checks(self.settings, tokenizers=self.prompts.tokenizers)

    async def close(self) -> None:
        """Let go of Redis, of the pods and of the tokenizers' thread."""
        self.admission.close()
        await self.quotas.close()
        await self.index.close()
        if self.shared is not None:
            await self.shared.close()
        await self.render.close()
        self.prompts.close()
        if self.tracing is not None:
            await asyncio.to_thread(self.tracing.close)  # its last export may take a while


class _Booked(msgspec.Struct, frozen=True, kw_only=True):
    exchange: BookedExchange
    decision: Decision


def _shared(settings: PickerSettings, books: PickerBooks) -> SharedState | None:
    if not settings.shares_load:
        return None
    shared = SharedState(
        url=settings.redis_url,
        hash_seed=settings.hash_seed,
        bookings=books.own_bookings,
        settings=SharedStateSettings(session_ttl_seconds=settings.policy.session_seconds),
        heard=books.changed,
    )
    books.shared = shared
    return shared


def _prompt_source(models: ModelTable, render: PodRender, *, budget_tokens: int) -> PromptTokenSource:
    if all(model.tokens_from is TokensFrom.TEXT for model in models.served):
        log.warning(
            "no tokenizer: prompts are not tokenized, requests are routed on load and on what was routed before"
        )
    try:
        return PromptTokenSource(models.served, render=render, settings=TokenSettings(budget_tokens=budget_tokens))
    except PromptTokensError as error:
        raise ConfigError(str(error)) from error


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
    priorities = settings.policy.priorities
    server = ExtProcServer(
        picks=service,
        max_body_bytes=settings.max_body_bytes,
        further_headers=service.models.sticky_headers() | headers_named(priorities),
        claims=claims_named(priorities),
    )
    admin = AdminServer(service.pages, max_body_bytes=settings.max_body_bytes)
    try:
        await admin.start(host=settings.host, port=settings.admin_port)
        await server.start(host=settings.host, port=settings.grpc_port)
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(work, name=name) for name, work in service.background().items()]
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
    service.pages.ready = True
    await server.set_serving(True)
    log.info("ready", extra={"grpc_port": service.settings.grpc_port, "endpoints": len(service.settings.endpoints)})
    await stop.wait()
    log.info("stopping", extra={"open_streams": server.open_streams})
    service.pages.ready = False
    await server.set_serving(False)
    # Envoys go on sending until they have seen that; an exchange that is refused meanwhile is a 503 for its client
    await asyncio.sleep(service.settings.drain_seconds)
    service.admission.close()  # whoever still waits is sent to another picker
    server.release_answered()
    await server.stop(grace_seconds=GRACE_SECONDS)
