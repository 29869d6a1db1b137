"""One served pool: its parts, created from its configuration and changed with it while requests run."""

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.classify import claims_named, headers_named
from extproc.admission.degradation import Degradation
from extproc.admission.first_pod import FirstPodWaits
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.answers.response_plan import ResponsePlan
from extproc.answers.stream_promises import stream_promises
from extproc.choosing.choose import PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.disaggregation.prefill_leg import KEPT_CONNECTIONS
from extproc.ledger.endpoint_telemetry import EndpointView, show_scale
from extproc.ledger.feature_telemetry import FirstPodTelemetry, OverloadTelemetry
from extproc.ledger.ledger import Ledger
from extproc.ledger.picker_telemetry import RECENT_DECISIONS, PickerTelemetry
from extproc.ledger.process_telemetry import show_quotas
from extproc.models.models import ModelTable, ServedModel
from extproc.pods.endpoint import Reachability, Role
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.pods.pod_ranks import pod_of
from extproc.policy.model_tokens import ModelTokens
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import FAIL_OPEN, PoolConfig, Steering
from extproc.pools.booked_exchange import ReadResponse
from extproc.pools.picker_books import PickerBooks
from extproc.pools.pool_ledger import RealisedReporter, listeners_of
from extproc.pools.pool_models import declared_models, models_of
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.pool_tokens import PoolTokens
from extproc.pools.prefill_legs import PrefillLegs
from extproc.pools.scale_looks import SERVING, ScaleLooks
from extproc.pools.shared_resources import SharedResources
from extproc.prefixes.prefix_index import RedisPrefixIndex
from extproc.shared.shared_quotas import Quotas, QuotaSettings
from kvmesh.documents.pools import PoolEndpoint, pool_seed
from kvmesh.pods.pod_http import PodPages

READ_BELOW_BYTES = 16384  # longest response without streaming whose usage is read
RECENT_DECISIONS_OF_A_POOL = 50  # there may be hundreds of pools


class Pool:
    """All parts of a pool; `runtime` has the parts that a pick uses."""

    def __init__(self, config: PoolConfig, resources: SharedResources) -> None:
        policy, settings = config.policy, resources.settings
        priorities = policy.priorities
        self.name = config.name
        self.given = self.config = config  # `config` has an endpoint for each rank
        self._resources = resources
        self._memory_share = 1.0
        self.told: Callable[[], None] = lambda: None  # called when all new pods have been asked for their models
        self._own_models, self._folders = settings.model_table.served, settings.tokenizer_folders
        self._models = models_of(config, self._own_models, resources.tokenizers, folders=self._folders)
        self.telemetry = PickerTelemetry(
            most_recent=RECENT_DECISIONS if config.from_flags else RECENT_DECISIONS_OF_A_POOL
        )
        self.telemetry.reconfigure(policy)
        self.overload = OverloadTelemetry(
            self.telemetry.registry,
            classes=priorities.classes,
            tenants=self.telemetry.tenants,
            queued=self.telemetry.queued,
        )
        self.books = PickerBooks(
            [endpoint.address for endpoint in config.endpoints],
            policy=policy,
        )
        listeners = listeners_of(
            config.name,
            books=self.books,
            telemetry=self.telemetry,
            overload=self.overload,
            degradations=resources.degradations,
            watch=resources.watch,
        )
        self.books.ledger = Ledger(resources.watch, listeners)
        resources.books[config.name] = self.books
        self.tokens = PoolTokens(
            resources,
            self.telemetry,
            endpoints=lambda: self.endpoints,
            declared=self.declared_models,
            is_from_flags=config.from_flags,
        )
        self.endpoints = self._scraper()
        self.shared = resources.share_of(config.name, session_ttl_seconds=policy.session_seconds)
        self.quotas = self._quotas()
        self.overload.is_shadow = self.quotas.is_shadow = priorities.shadow
        show_quotas(self.telemetry.registry, self.quotas)
        self.books.shared, self.books.quotas = self.shared, self.quotas
        self.index = RedisPrefixIndex(
            resources.reader,
            hash_seed=pool_seed(settings.hash_seed, config.name),
            timeout_seconds=settings.index_timeout_seconds,
            quotas=self.quotas,
            shared=self.shared,
        )
        self.order = FlowQueue(priorities)
        self.queue = AdmissionQueue(
            self.order, bodies=resources.waiting_bodies, clock=time.monotonic, telemetry=self.overload
        )
        self.books.freed = self.queue.wake
        self.degradation = Degradation(priorities, on_change=self.overload.step_changed)
        self.realised_reporter = RealisedReporter(
            watch=self.books.realised_watch,
            show=self.telemetry.model_finding,
            clock=time.monotonic,
        )
        self.scale = ScaleLooks(
            policy,
            see=lambda: self,
            pickers=lambda: 1 + resources.other_replicas(),
            clock=time.monotonic,
            changed=lambda: resources.tell_scalers(),  # noqa: PLW0108 - it is set later
        )
        self.first_pod = self._first_pod()
        self.prompts = self.tokens.prompts(self._models.served)
        self.legs = PrefillLegs(
            books=self.books,
            pages=PodPages(most_kept=KEPT_CONNECTIONS, key=resources.pod_key),
        )
        self.runtime = self._runtime()
        self._show()

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response with the plan that its pick made, here or on another picker."""
        return ReadResponse(books=self.books, plan=plan, exchange=self.books.exchange_of(plan))

    # --- changes while it runs ------------------------------------------------------------------------------------

    def apply(self, config: PoolConfig) -> None:
        """Switch to another configuration; open and waiting requests and learned values stay.

        Raise ConfigError if a tokenizer cannot be used. After any exception, the call may be repeated.
        """
        given, before = config, self.config
        pods = [endpoint.address for endpoint in given.endpoints]
        for pod in [pod for pod, ranks in self.books.ranks.items() if not ranks or pod not in pods]:
            del self.books.ranks[pod]
        config = given.with_ranks(self.books.ranks)
        models = models_of(config, self._own_models, self._resources.tokenizers, folders=self._folders)
        prompts = self.prompts
        if models != self._models or self.tokens.are_other(prompts, models.served):
            prompts = self.tokens.prompts(models.served)
        self.config = config
        try:
            if config.endpoints != before.endpoints:
                self.endpoints.set_endpoints(closed_endpoints(config.endpoints))
                self.books.set_endpoints(endpoint.address for endpoint in config.endpoints)
                self.tokens.keep_endpoints(pods)
                self.legs.keep_endpoints(pods)
            self.runtime.sample_share = self._sample_share()
            if config.policy != before.policy or models != self._models or prompts is not self.prompts:
                self._models, self.prompts = models, prompts
                self._reconfigure(before.policy.priorities)
        except BaseException:
            self.config = before  # the next change tries again
            raise
        self.given = given

    def share_memory(self, share: float) -> None:
        """Limit the routing memory to this share of a single pool's, because there are others."""
        if share != self._memory_share:
            self._memory_share = share
            self.books.memory.reconfigure(self.config.policy, share=share)

    def leave(self) -> None:
        """Accept no new requests: the pool is gone. Open requests finish; waiting ones are refused."""
        self.apply(replace(self.given, endpoints=()))
        self.first_pod.end()

    def come_back(self) -> None:
        """Accept requests again: the pool was gone and has returned."""
        policy = self.config.policy
        self.first_pod.reconfigure(policy.autoscale, policy.priorities)

    def missing_tokenizers(self) -> Sequence[ServedModel]:
        """Return the models whose tokenizers are not loaded yet."""
        lacks = self._resources.tokenizers.lacks
        return [model for model in self.declared_models() if lacks((model,))]

    def found_folders(self) -> bool:
        """Tell whether a model has a new tokenizer folder; this may block."""
        knows = self._resources.tokenizers.knows
        return any(not knows(model) for model in self.missing_tokenizers())

    def declared_models(self) -> Sequence[ServedModel]:
        """Return the models with their intended tokenizers, loaded or not."""
        return declared_models(self.config, self._own_models, folders=self._folders).served

    @property
    def models(self) -> ModelTable:
        """The models, with those that the pods have reported."""
        return self._models

    def model_tokens(self) -> tuple[ModelTokens, ...]:
        """Return the observed token source of each model."""
        return self.tokens.shown(self._models.served)

    async def check_tokens(self) -> None:
        """Compare each folder's tokens with one more pod's, if any was not asked yet."""
        await self.tokens.check(self.prompts, self._models.served)

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that the policy needs."""
        return self._models.sticky_headers() | headers_named(self.config.policy.priorities)

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that the policy needs."""
        return claims_named(self.config.policy.priorities)

    @property
    def is_asking(self) -> bool:
        """Whether no model is known yet and pods are being asked right now."""
        config = self.config
        return not config.learned and config.learns_models and self.endpoints.is_asking

    async def answers(self) -> None:
        """Wait until the pods have been asked for their models, for a scrape's deadline at most."""
        await self.endpoints.first_answers()

    @property
    def has_counted(self) -> bool:
        """Whether there was any request, or there is an autoscaling signal."""
        return bool(self.scale.signals) or self.runtime.has_failed_open or bool(self.telemetry.recent)

    @property
    def is_free(self) -> bool:
        """Whether no request is open or waiting."""
        return not self.runtime.under_way and not self.books.open_requests

    async def close(self) -> None:
        """Refuse waiting requests, and close the connections to the pods."""
        self.runtime.admission.close()
        if self._resources.books.get(self.name) is self.books:  # a successor may have the same name
            del self._resources.books[self.name]
        self.endpoints.close()
        self.legs.close()
        await self.quotas.close()
        self.tokens.close()

    def _reconfigure(self, before: PriorityPolicy) -> None:
        policy, priorities = self.config.policy, self.config.policy.priorities
        self.endpoints.reconfigure(stale_after_seconds=policy.stale_after_seconds)
        self.books.reconfigure(policy, memory_share=self._memory_share)
        self.scale.reconfigure(policy)
        self.first_pod.reconfigure(policy.autoscale, priorities)
        if self.shared is not None:
            self.shared.session_ttl_seconds = policy.session_seconds
        self.telemetry.reconfigure(policy)
        runtime = self.runtime
        self.overload.is_shadow = self.quotas.is_shadow = priorities.shadow
        if priorities != before:  # otherwise keep each class's saved credit for its turn
            self.quotas.reconfigure(priorities.quotas)
            self.overload.know(priorities.classes)
            self.order.reconfigure(priorities)
            self.degradation.reconfigure(priorities)
        runtime.view = replace(runtime.view, policy=policy, promises=stream_promises(priorities))
        runtime.reader = replace(runtime.reader, models=self._models, policy=priorities)
        runtime.prompts, runtime.labels = self.prompts, self._models.names()
        self.tokens.keep_models({model.name for model in self._models.served})
        runtime.admission.reconfigure(priorities)

    def _ranked(self, pod: str, ranks: tuple[int, ...]) -> None:
        """Take other ranks of a pod; its endpoints change after the scrape that found them."""
        if self.books.ranks.get(pod, ()) != ranks:
            self.books.ranks[pod] = ranks
            asyncio.get_running_loop().call_soon(lambda: self.apply(self.given))

    def _all_told(self) -> None:
        self.told()

    def _restarted(self, address: str) -> None:
        self.books.restarted(address)
        self.tokens.restarted(pod_of(address))

    # --- its parts ------------------------------------------------------------------------------------------------

    def _runtime(self) -> PoolRuntime:
        policy, resources, books = self.config.policy, self._resources, self.books
        settings, priorities = resources.settings, policy.priorities
        pressure = PoolPressure(
            estimates=books.estimates,
            degradation=self.degradation,
            waiting=self.order,
            clock=time.monotonic,
            random=random.random,
            replicas=lambda: 1 + resources.other_replicas(),
        )
        return PoolRuntime(
            name=self.name,
            reader=RequestReader(
                models=self._models,
                policy=priorities,
                max_body_bytes=settings.max_body_bytes,
            ),
            long_work=resources.long_work,
            view=PoolView(
                endpoints=self.endpoints,
                bookings=books.bookings,
                memory=books.memory,
                health=books.health,
                estimates=books.estimates,
                links=books.links,
                hot=HotPrefixes(),
                turns=RoundRobin(),
                policy=policy,
                random=random.random,
                promises=stream_promises(priorities),
            ),
            prompts=self.prompts,
            index=self.index,
            pressure=pressure,
            admission=RequestAdmission(policy=priorities, pressure=pressure, queue=self.queue, clock=time.monotonic),
            books=books,
            promise_of=self.telemetry.slo.promise_of,
            watch=resources.watch,
            reads=resources.reads,
            full=self.queue.wake_at,
            legs=self.legs,
            quotas=self.quotas,
            others=resources.others,
            labels=self._models.names(),
            sample_share=self._sample_share(),
            read_below_bytes=READ_BELOW_BYTES,
            most_endpoints=1 if settings.steering is Steering.ORIGINAL_DST else None,
            tells_decisions=settings.decision_headers,
            anywhere=self._serving,
            first_pod=self.first_pod,
        )

    def _first_pod(self) -> FirstPodWaits:
        policy, telemetry = self.config.policy, FirstPodTelemetry(self.telemetry.registry)
        waits = FirstPodWaits(
            policy.autoscale,
            policy=policy.priorities,
            queue=self.queue,
            starts=self.scale.starts,
            serves=self.has_pod,
            ask=self.scale.ask_for_one,
            telemetry=telemetry,
            clock=time.monotonic,
            random=random.random,
        )
        telemetry.show(lambda: waits.waiting)
        return waits

    def has_pod(self) -> bool:
        """Tell whether any pod can take a request, with or without a decision."""
        policy = self.config.policy
        return bool(self._serving()) or any(
            each.reachability in SERVING
            and each.address not in policy.cordoned
            and policy.roles.get(each.address) is not Role.PREFILL
            for each in self.endpoints.known(now=time.monotonic())
        )

    def _sample_share(self) -> float:
        share = self.config.sample_share
        found = self._resources.settings.sample_share if share is None else share
        self.telemetry.slo.sampled(found)
        return found

    def _serving(self) -> Sequence[str]:
        """Return the endpoints for requests without a decision; none if the pool fails closed."""
        if self.config.failure_mode != FAIL_OPEN:
            return ()
        cordoned, roles = self.given.policy.cordoned, self.given.policy.roles
        return [
            each.address
            for each in self.given.endpoints
            if each.ready
            and not each.terminating
            and each.address not in cordoned
            and roles.get(each.address) is not Role.PREFILL
        ]

    def _scraper(self) -> MetricsScraper:
        settings, books = self._resources.settings, self.books
        scraper = MetricsScraper(
            [endpoint.address for endpoint in self.config.endpoints],
            interval_seconds=settings.scrape_interval_seconds,
            timeout_seconds=settings.scrape_timeout_seconds,
            stale_after_seconds=self.config.policy.stale_after_seconds,
            restarted=self._restarted,
            reported=books.reported,
            changed=books.changed,
            told=self._all_told,
            ranked=self._ranked,
            pace=self._resources.scrape_pace,
            turns=self._resources.page_turns,
            pages=self.telemetry.latencies,
            key=self._resources.pod_key,
        )
        scraper.set_endpoints(closed_endpoints(self.config.endpoints))
        return scraper

    def _quotas(self) -> Quotas:
        settings = self._resources.settings
        return Quotas(
            self._resources.quota_link,
            hash_seed=pool_seed(settings.hash_seed, self.name),
            quotas=self.config.policy.priorities.quotas,
            others=self._resources.other_replicas,
            settings=QuotaSettings(timeout_seconds=settings.index_timeout_seconds),
        )

    def _show(self) -> None:
        """Register the metrics that are computed on demand."""
        queue, degradation, books = self.queue, self.degradation, self.books
        self.overload.show(
            queued=lambda: queue.depth,
            steps_in_force=lambda: {
                ((step.class_name, step.step.step.value), 1.0) for step in degradation.in_force(now=time.monotonic())
            },
            estimate_errors=lambda: (
                ((endpoint,), error.mean_seconds) for endpoint, error in books.estimates.errors().items()
            ),
            answer_length_errors=lambda: (((model,), tokens) for model, tokens in books.answers.errors().items()),
        )
        show_scale(self.telemetry.registry, lambda: self.scale.signals)
        self.telemetry.show(
            EndpointView(
                known=lambda now: self.endpoints.known(now=now),
                estimates=books.estimates,
                links=books.links,
                role_of=books.role_of,
                index_problem=lambda: self.index.problem,
                refusing=self.endpoints.refusing,
            )
        )


def closed_endpoints(endpoints: Sequence[PoolEndpoint]) -> Mapping[str, Reachability | None]:
    """Return why each endpoint may get no new requests, or None if it may."""
    return {
        endpoint.address: Reachability.TERMINATING
        if endpoint.terminating
        else None
        if endpoint.ready
        else Reachability.NOT_READY
        for endpoint in endpoints
    }
