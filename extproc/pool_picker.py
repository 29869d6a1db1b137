"""One running picker for each pool: its books, scraper, index, queue and policy. Picks, books, counts.

`pools` has one for each pool and applies its configuration while requests run; the static pool of `--endpoints` is one
as well. Made of the parts that all pools share (`picker_parts`).
"""

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import msgspec

from extproc.adapters.ext_proc_call import OpenExchange
from extproc.adapters.metrics_scraper import MetricsScraper
from extproc.adapters.overload_telemetry import OverloadTelemetry
from extproc.adapters.pod_render import PodRender, RenderSettings
from extproc.adapters.prefix_index import RedisPrefixIndex
from extproc.adapters.prompt_tokens import PromptTokenSource
from extproc.adapters.quota_telemetry import QuotaMetrics
from extproc.adapters.quotas import Quotas
from extproc.adapters.shared_state import PoolShare
from extproc.adapters.telemetry import PickerTelemetry
from extproc.admin_pages import RECENT_DECISIONS, PickerPages, record_of
from extproc.admission_queue import AdmissionQueue
from extproc.admit_request import RequestAdmission
from extproc.booked_exchange import BookedExchange, ReadResponse
from extproc.core.classify import claims_named, headers_named
from extproc.core.decision import Decision
from extproc.core.degradation import Degradation
from extproc.core.endpoint import Reachability
from extproc.core.exchange import RequestFacts
from extproc.core.flow_queue import FlowQueue
from extproc.core.hotspot import HotPrefixes
from extproc.core.models import ModelTable, ServedModel, TokensFrom
from extproc.core.policy import Steering
from extproc.core.pool_config import FAIL_OPEN, PoolConfig
from extproc.core.priority import PriorityPolicy
from extproc.core.response_plan import ResponsePlan
from extproc.core.turns import Turns
from extproc.errors import ConfigError, InternalPickError, NoReadyEndpointError, PickError, PromptTokensError
from extproc.pick_endpoint import EndpointPicker, Picked
from extproc.picker_books import PickerBooks
from extproc.picker_parts import PickerParts
from extproc.plan_response import plan_response
from extproc.pool_models import declared_models, models_of
from extproc.pool_pressure import PoolPressure
from extproc.unbooked_exchange import UnbookedExchange
from extproc.watch_matches import MatchReporter
from extproc.watch_realised import RealisedReporter
from extproc.wire.admin_json import DecisionRecord
from kv_indexer.api import PoolEndpoint, pool_seed

log = logging.getLogger(__name__)

RECENT_DECISIONS_OF_A_POOL = 50  # there may be hundreds of pools
FAILED_OPEN = "failed-open"  # an outcome: sent without a decision
RENDER_CACHE_BYTES_OF_A_POOL = 4 << 20


class PoolPicker:
    """Implements `ext_proc_call.Picks` for one pool."""

    def __init__(self, config: PoolConfig, parts: PickerParts) -> None:
        """Raise ConfigError where the static pool's tokenizer cannot be used; other pools go on without it."""
        settings, policy, self.name = parts.settings, config.policy, config.name
        self.config = config
        self.picked_at = float("-inf")  # monotonic seconds of the last pick
        self._parts = parts
        self._picks = 0  # under way: neither booked nor waiting, most of them
        self._memory_share = 1.0
        self._failed_open = False
        self._own_models = parts.settings.model_table.served
        self._models = models_of(config, self._own_models, parts.tokenizers)
        self.telemetry = PickerTelemetry()
        self.overload = OverloadTelemetry(self.telemetry.registry, classes=policy.priorities.classes)
        self.recent: deque[DecisionRecord] = deque(maxlen=RECENT_DECISIONS_OF_A_POOL if self.name else RECENT_DECISIONS)
        addresses = [endpoint.address for endpoint in config.endpoints]
        self.books = PickerBooks(
            addresses,
            policy=policy,
            telemetry=self.telemetry,
            overload=self.overload,
            degradations=parts.degradations,
        )
        parts.books[self.name] = self.books
        self.endpoints = MetricsScraper(
            addresses,
            interval_seconds=settings.scrape_interval_seconds,
            timeout_seconds=settings.scrape_timeout_seconds,
            stale_after_seconds=policy.stale_after_seconds,
            restarted=self.books.restarted,
            reported=self.books.reported,
            changed=self.books.changed,
            pace=parts.scrape_pace,
        )
        self.endpoints.set_endpoints(_closed(config.endpoints))
        seed = pool_seed(settings.hash_seed, self.name)
        self.shared = parts.share_of(self.name, session_ttl_seconds=policy.session_seconds)
        self.books.shared = self.shared
        self.quotas = Quotas(
            url=settings.redis_url,
            hash_seed=seed,
            quotas=policy.priorities.quotas,
            others=parts.other_replicas,
            link=parts.quota_link,
        )
        self.books.quotas = self.quotas
        self.telemetry.registry.register(QuotaMetrics(self.quotas))
        self.index = RedisPrefixIndex(
            url=settings.redis_url,
            hash_seed=seed,
            timeout_seconds=settings.index_timeout_seconds,
            shared=self.shared,
            quotas=self.quotas,
            reader=parts.reader,
        )
        self.match_reporter = MatchReporter(
            watch=self.books.matches,
            endpoints=lambda now: self.endpoints.known(now=now),
            display=self.telemetry,
            clock=time.monotonic,
        )
        self.realised_reporter = RealisedReporter(
            watch=self.books.realised_watch, display=self.telemetry, clock=time.monotonic
        )
        self._render = PodRender(
            endpoints=self._rendering_endpoints,
            settings=_render_settings(settings.render_timeout_seconds, is_one_of_many=bool(self.name)),
        )
        self.prompts = self._prompt_source(self._models)
        self._order = FlowQueue(policy.priorities)
        self._queue = AdmissionQueue(self._order, clock=time.monotonic, telemetry=self.overload)
        self.books.freed = self._queue.wake
        self._degradation = Degradation(policy.priorities, on_change=self.overload.step_changed)
        self._show()
        self._pressure = PoolPressure(
            policy=policy.priorities,
            estimates=self.books.estimates,
            degradation=self._degradation,
            waiting=self._order,
            clock=time.monotonic,
            random=random.random,
            replicas=lambda: 1 + parts.other_replicas(),
        )
        self._hot = HotPrefixes(policy.hotspot)
        self._picker = EndpointPicker(
            endpoints=self.endpoints,
            bookings=self.books.bookings,
            index=self.index,
            prompts=self.prompts,
            models=self._models,
            known_models=settings.known_models,
            policy=policy,
            pressure=self._pressure,
            quotas=self.quotas,
            health=self.books.health,
            memory=self.books.memory,
            hot=self._hot,
            telemetry=self.telemetry,
            clock=time.monotonic,
            random=random.random,
            turns=Turns(),
            max_body_bytes=settings.max_body_bytes,
        )
        self.admission = RequestAdmission(
            picker=self._picker,
            policy=policy.priorities,
            pressure=self._pressure,
            estimates=self.books.estimates,
            health=self.books.health,
            queue=self._queue,
            book=self._booked,
            unbook=lambda booked: booked.exchange.finish(),
            others=parts.others,
            telemetry=self.overload,
            clock=time.monotonic,
        )
        self.pages = PickerPages(
            picker=self._picker,
            admission=self.admission,
            degradation=self._degradation,
            quotas=self.quotas,
            books=self.books,
            index=self.index,
            endpoints=self.endpoints,
            telemetry=self.telemetry,
            recent=self.recent,
            render=self._render,
            prompts=self.prompts,
        )
        self._labels = self._models.names()
        self.telemetry.alert_below(policy.alert_hit_ratio)
        self._one_address = settings.steering is Steering.ORIGINAL_DST

    # --- ext_proc_call.Picks --------------------------------------------------------------------------------------

    async def pick(self, facts: RequestFacts, body: bytes | None) -> OpenExchange:
        """Decide and book, at once or when there is room; raise PickError with the answer for the client.

        Where the pool fails open, a request without a decision goes to any endpoint that may have it.
        """
        tracing = self._parts.tracing
        started_unix_ns = time.time_ns() if tracing is not None else 0
        self._picks += 1
        try:
            booked = await self.admission.admit(facts, body)
        except PickError as refusal:
            if isinstance(refusal, NoReadyEndpointError) and (anywhere := self._anywhere(facts)) is not None:
                return anywhere
            self._refused(facts, refusal, started_unix_ns)
            raise
        except Exception as defect:
            log.exception("a pick failed; the client gets a 500", extra={"request_id": facts.request_id})
            if (anywhere := self._anywhere(facts)) is not None:
                return anywhere
            internal = InternalPickError("kvmesh failed to route this request; its log says why")
            self._refused(facts, internal, started_unix_ns)
            raise internal from defect
        finally:
            self._picks -= 1
        self._trace(facts, booked.decision, started_unix_ns)
        return booked.exchange

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response whose pick, here or on another picker, made this plan."""
        return ReadResponse(books=self.books, plan=plan)

    # --- changes while it runs ------------------------------------------------------------------------------------

    def apply(self, config: PoolConfig) -> None:
        """Go by another configuration from now on; what is open, waits or was learned stays.

        Raise ConfigError where a tokenizer cannot be used; whatever it raises, it may be tried again.
        """
        before = self.config
        models = models_of(config, self._own_models, self._parts.tokenizers)
        prompts = self.prompts if models == self._models else self._prompt_source(models)
        self.config = config
        try:
            if config.endpoints != before.endpoints:
                self.endpoints.set_endpoints(_closed(config.endpoints))
                self.books.set_endpoints(endpoint.address for endpoint in config.endpoints)
            if config.policy != before.policy or models != self._models:
                self._models, self.prompts, self._labels = models, prompts, models.names()
                self._retune(before.policy.priorities)
        except BaseException:
            self.config = before  # the next change tries again
            raise

    def share_memory(self, share: float) -> None:
        """Remember so much of what one pool alone may: there are others."""
        if share != self._memory_share:
            self._memory_share = share
            self.books.memory.retune(self.config.policy, share=share)

    def leave(self) -> None:
        """Take nothing new: the pool is gone. What is open ends by itself, what waits has nowhere to go."""
        self.apply(replace(self.config, endpoints=()))

    def missing_tokenizers(self) -> Sequence[ServedModel]:
        """Return the models whose tokenizers are to be loaded."""
        lacks = self._parts.tokenizers.lacks
        return [model for model in self.declared_models() if lacks((model,))]

    def declared_models(self) -> Sequence[ServedModel]:
        """Return the models with the tokenizers that they are to have."""
        return declared_models(self.config, self._own_models).served

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that the policy looks at."""
        return self._models.sticky_headers() | headers_named(self.config.policy.priorities)

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that the policy looks at."""
        return claims_named(self.config.policy.priorities)

    def look(self) -> None:
        """Say what is wrong although nothing has failed; once a second while requests come."""
        self.match_reporter.look()

    def look_back(self) -> None:
        """Say which models' predictions do not come true; every few seconds."""
        self.realised_reporter.look()

    @property
    def has_counted(self) -> bool:
        """Whether there was any request."""
        return self._failed_open or bool(self.recent)

    @property
    def is_free(self) -> bool:
        """Whether no request is open or waits."""
        return not self._picks and not self.books.open_requests

    async def close(self) -> None:
        """End what waits, and let go of the pods."""
        self.admission.close()
        if self._parts.books.get(self.name) is self.books:  # and not those of a pool that has come in its place
            del self._parts.books[self.name]
        self.endpoints.close()
        await self.quotas.close()
        await self._render.close()

    # --------------------------------------------------------------------------------------------------------------

    def _retune(self, before: PriorityPolicy) -> None:
        policy, priorities = self.config.policy, self.config.policy.priorities
        self.endpoints.retune(stale_after_seconds=policy.stale_after_seconds)
        self.books.retune(policy, memory_share=self._memory_share)
        if isinstance(self.shared, PoolShare):
            self.shared.session_ttl_seconds = policy.session_seconds
        self.telemetry.alert_below(policy.alert_hit_ratio)
        if priorities != before:  # else everybody keeps what was saved for a turn
            self.quotas.retune(priorities.quotas)
            self.overload.know(priorities.classes)
            self._order.retune(priorities)
            self._degradation.retune(priorities)
            self._pressure.retune(priorities)
        self._hot.retune(policy.hotspot)
        self._picker = replace(self._picker, policy=policy, models=self._models, prompts=self.prompts)
        self.admission.retune(self._picker, priorities)
        self.pages.retune(self._picker, self.prompts)

    def _prompt_source(self, models: ModelTable) -> PromptTokenSource:
        served, parts = models.served, self._parts
        if not self.name and all(model.tokens_from is TokensFrom.TEXT for model in served):
            log.warning(
                "no tokenizer: prompts are not tokenized, requests are routed on load and on what was routed before"
            )
        try:
            return PromptTokenSource(
                served,
                render=self._render,
                settings=parts.token_settings,
                load=parts.tokenizers.get,
                large=parts.large_prompts,
            )
        except PromptTokensError as error:
            raise ConfigError(str(error)) from error

    def _show(self) -> None:
        self.overload.show(
            queued=lambda: self._queue.depth,
            steps_in_force=lambda: {
                ((step.class_name, step.step.step.value), 1.0)
                for step in self._degradation.in_force(now=time.monotonic())
            },
            estimate_errors=lambda: (
                ((endpoint,), error.mean_seconds) for endpoint, error in self.books.estimates.errors().items()
            ),
        )

    def _anywhere(self, facts: RequestFacts) -> UnbookedExchange | None:
        """Return an exchange with an endpoint taken by chance; None where the pool fails closed, or has none."""
        if self.config.failure_mode != FAIL_OPEN:
            return None
        cordoned = self.config.policy.cordoned
        serving = [
            each.address
            for each in self.config.endpoints
            if each.ready and not each.terminating and each.address not in cordoned
        ]
        endpoints = [address for address in serving if facts.subset is None or address in facts.subset]
        if not endpoints:
            return None
        self.picked_at, self._failed_open = time.monotonic(), True
        self.telemetry.refused(FAILED_OPEN)
        most = 1 if self._one_address else 1 + self.config.policy.fallbacks
        return UnbookedExchange(endpoints=random.sample(endpoints, min(most, len(endpoints))))

    def _refused(self, facts: RequestFacts, refusal: PickError, started_unix_ns: int) -> None:
        self._trace(facts, refusal, started_unix_ns)
        self.telemetry.refused(refusal.reason)
        self.recent.appendleft(DecisionRecord(at=time.time(), facts=facts, model=None, outcome=refusal))

    def _booked(self, picked: Picked) -> "_Booked":
        decision, prepared = picked.decision, picked.prepared
        resolved = prepared.resolved
        share = self.config.sample_share
        # before the booking, as all that may fail: nobody would release it
        plan = plan_response(
            picked,
            pool=self.name,
            is_sampled=random.random() < (self._parts.settings.sample_share if share is None else share),  # noqa: S311
            read_below_bytes=self._parts.settings.read_below_bytes,
            reads=self._parts.reads,
            now=time.monotonic(),
        )
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

    def _remember(self, facts: RequestFacts, picked: Picked) -> None:
        decision = picked.decision
        self.picked_at = now = time.monotonic()
        if decision.degraded:
            self._parts.degradations.note(decision.degraded, now=now)
        self.books.remember(picked)
        self.recent.appendleft(record_of(picked, facts, at=time.time()))

    def _trace(self, facts: RequestFacts, outcome: Decision | PickError, started_unix_ns: int) -> None:
        tracing = self._parts.tracing
        if tracing is not None:
            tracing.record(facts, outcome, started_unix_ns=started_unix_ns, ended_unix_ns=time.time_ns())

    def _rendering_endpoints(self, model: ServedModel) -> Sequence[str]:
        """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
        return [
            status.address
            for status in self.endpoints.snapshot(now=time.monotonic())
            if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model.name))
        ]


class _Booked(msgspec.Struct, frozen=True, kw_only=True):
    exchange: BookedExchange
    decision: Decision


def _closed(endpoints: Sequence[PoolEndpoint]) -> Mapping[str, Reachability | None]:
    """Return why each endpoint may get nothing new, None where it may."""
    return {
        endpoint.address: Reachability.TERMINATING
        if endpoint.terminating
        else None
        if endpoint.ready
        else Reachability.NOT_READY
        for endpoint in endpoints
    }


def _render_settings(timeout_seconds: float, *, is_one_of_many: bool) -> RenderSettings:
    settings = RenderSettings(timeout_seconds=timeout_seconds, media_timeout_seconds=4 * timeout_seconds)
    return replace(settings, cache_bytes=RENDER_CACHE_BYTES_OF_A_POOL) if is_one_of_many else settings
