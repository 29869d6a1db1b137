"""One pool while it is served: its parts, made from its configuration, and changed with it while requests run."""

import logging
import random
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.admit_request import RequestAdmission
from extproc.admission.asked_request import RequestReader
from extproc.admission.classify import claims_named, headers_named
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.choosing.choose import PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.errors import ConfigError, PromptTokensError
from extproc.models.models import ModelTable, ServedModel, TokensFrom
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.policy.model_tokens import ModelTokens
from extproc.policy.pool_config import FAIL_OPEN, PoolConfig
from extproc.policy.priority import PriorityPolicy
from extproc.policy.values import Steering
from extproc.pools.booked_exchange import ReadResponse
from extproc.pools.picker_books import PickerBooks
from extproc.pools.pool_models import declared_models, models_of
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.prediction_reports import MatchReporter, RealisedReporter
from extproc.pools.shared_resources import SharedResources
from extproc.pools.token_reports import TOKENIZER_FOLDER, TOKENS_DIFFER, TokenReporter, shown_tokens
from extproc.prefixes.prefix_index import RedisPrefixIndex
from extproc.prompts.pod_render import PodRender, RenderSettings
from extproc.prompts.prompt_tokens import PromptTokenSource
from extproc.prompts.token_checks import TokenChecks, TokenVerdict
from extproc.prompts.token_trust import Cause, Teller, TokenTrust
from extproc.prompts.token_watch import TokenSource, TokenWatch
from extproc.quotas.shared_quotas import Quotas
from extproc.responses.realised import OTHER_TOKENS, DriftFinding
from extproc.responses.response_plan import ResponsePlan
from extproc.telemetry.endpoint_telemetry import EndpointView
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from extproc.telemetry.process_telemetry import show_quotas
from kvmesh.documents.pools import PoolEndpoint, pool_seed

log = logging.getLogger(__name__)

RECENT_DECISIONS = 200
RECENT_DECISIONS_OF_A_POOL = 50  # there may be hundreds of pools
RENDER_CACHE_BYTES_OF_A_POOL = 4 << 20  # likewise
WRONG_TOKENS = "the pods count other prompt tokens than it says; it is not asked until the pods change"


class Pool:
    """What a pool is made of beside the parts that a pick goes through, which are `runtime`."""

    def __init__(self, config: PoolConfig, resources: SharedResources) -> None:
        policy, settings = config.policy, resources.settings
        priorities = policy.priorities
        self.name = config.name
        self.config = config
        self._resources = resources
        self._memory_share = 1.0
        self._own_models, self._folders = settings.model_table.served, settings.tokenizer_folders
        self._models = models_of(config, self._own_models, resources.tokenizers, folders=self._folders)
        self.telemetry = PickerTelemetry()
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
            telemetry=self.telemetry,
            overload=self.overload,
            degradations=resources.degradations,
        )
        resources.books[config.name] = self.books
        self.trust = TokenTrust()
        self.render = self._render()
        self.checks = TokenChecks(render=self.render, trust=self.trust)
        self.endpoints = self._scraper()
        self.shared = resources.share_of(config.name, session_ttl_seconds=policy.session_seconds)
        self.quotas = self._quotas()
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
        self.queue = AdmissionQueue(self.order, clock=time.monotonic, telemetry=self.overload)
        self.books.freed = self.queue.wake
        self.degradation = Degradation(priorities, on_change=self.overload.step_changed)
        self.match_reporter = MatchReporter(
            watch=self.books.matches,
            endpoints=lambda now: self.endpoints.known(now=now),
            show=self.telemetry.finding,
            clock=time.monotonic,
        )
        self.realised_reporter = RealisedReporter(
            watch=self.books.realised_watch,
            show=self.telemetry.model_finding,
            stands=self._drift_stands,
            clock=time.monotonic,
        )
        self.token_watch = TokenWatch()
        self.token_reporter = TokenReporter(
            watch=self.token_watch,
            found={TOKENS_DIFFER: self._doubts, TOKENIZER_FOLDER: self._folder_problems},
            show=self.telemetry.model_finding,
            clock=time.monotonic,
        )
        self.prompts = self._prompt_source(self._models)
        self.runtime = self._runtime()
        self._show()

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response whose pick, here or on another picker, made this plan."""
        watch = self._resources.watch
        return ReadResponse(books=self.books, plan=plan, trace=watch.trace_of(plan) if watch.reading else None)

    # --- changes while it runs ------------------------------------------------------------------------------------

    def apply(self, config: PoolConfig) -> None:
        """Go by another configuration from now on; what is open, waits or was learned stays.

        Raise ConfigError where a tokenizer cannot be used; whatever it raises, it may be tried again.
        """
        before = self.config
        models = models_of(config, self._own_models, self._resources.tokenizers, folders=self._folders)
        prompts = self.prompts
        if models != self._models or self._has_other_tokenizers(models):
            prompts = self._prompt_source(models)
        self.config = config
        try:
            if config.endpoints != before.endpoints:
                self.endpoints.set_endpoints(closed_endpoints(config.endpoints))
                self.books.set_endpoints(endpoint.address for endpoint in config.endpoints)
                self.render.keep(endpoint.address for endpoint in config.endpoints)
                self.checks.keep([endpoint.address for endpoint in config.endpoints])
                self._pods_changed()
            self.runtime.sample_share = self._sample_share()
            if config.policy != before.policy or models != self._models or prompts is not self.prompts:
                self._models, self.prompts = models, prompts
                self._reconfigure(before.policy.priorities)
        except BaseException:
            self.config = before  # the next change tries again
            raise

    def share_memory(self, share: float) -> None:
        """Remember so much of what one pool alone may: there are others."""
        if share != self._memory_share:
            self._memory_share = share
            self.books.memory.reconfigure(self.config.policy, share=share)

    def leave(self) -> None:
        """Take nothing new: the pool is gone. What is open ends by itself, what waits has nowhere to go."""
        self.apply(replace(self.config, endpoints=()))

    def missing_tokenizers(self) -> Sequence[ServedModel]:
        """Return the models whose tokenizers are to be loaded."""
        lacks = self._resources.tokenizers.lacks
        return [model for model in self.declared_models() if lacks((model,))]

    def declared_models(self) -> Sequence[ServedModel]:
        """Return the models with the tokenizers that they are to have."""
        return declared_models(self.config, self._own_models, folders=self._folders).served

    def model_tokens(self) -> tuple[ModelTokens, ...]:
        """Return where each model's tokens come from, as its requests have shown."""
        return shown_tokens(self._models.served, sources=self.token_watch.sources, reporter=self.token_reporter)

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that the policy looks at."""
        return self._models.sticky_headers() | headers_named(self.config.policy.priorities)

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that the policy looks at."""
        return claims_named(self.config.policy.priorities)

    @property
    def has_counted(self) -> bool:
        """Whether there was any request."""
        return self.runtime.has_failed_open or bool(self.runtime.recent)

    @property
    def is_free(self) -> bool:
        """Whether no request is open or waits."""
        return not self.runtime.under_way and not self.books.open_requests

    async def close(self) -> None:
        """End what waits, and let go of the pods."""
        self.runtime.admission.close()
        if self._resources.books.get(self.name) is self.books:  # and not those of a pool that has come in its place
            del self._resources.books[self.name]
        self.endpoints.close()
        await self.quotas.close()
        self.render.close()

    def _reconfigure(self, before: PriorityPolicy) -> None:
        policy, priorities = self.config.policy, self.config.policy.priorities
        self.endpoints.reconfigure(stale_after_seconds=policy.stale_after_seconds)
        self.books.reconfigure(policy, memory_share=self._memory_share)
        if self.shared is not None:
            self.shared.session_ttl_seconds = policy.session_seconds
        self.telemetry.reconfigure(policy)
        runtime = self.runtime
        if priorities != before:  # else every class keeps what was saved for its turn
            self.quotas.reconfigure(priorities.quotas)
            self.overload.know(priorities.classes)
            self.order.reconfigure(priorities)
            self.degradation.reconfigure(priorities)
            runtime.pressure.reconfigure(priorities)
        runtime.view.hot.reconfigure(policy.hotspot)
        runtime.view = replace(runtime.view, policy=policy)
        runtime.reader = replace(runtime.reader, models=self._models, policy=priorities)
        runtime.prompts, runtime.labels = self.prompts, self._models.names()
        names = {model.name for model in self._models.served}
        self.token_watch.keep(names)
        self.trust.keep(names)
        self.token_reporter.look()
        runtime.admission.reconfigure(priorities)

    # --- whose tokens are believed ----------------------------------------------------------------------------------

    async def check_tokens(self) -> None:
        """Compare the folders' tokens with those of one pod more, where there is one that was not asked."""

        def serving(model: str) -> Sequence[str]:
            return _serving(self.endpoints.known(now=time.monotonic()), model)

        await self.checks.look(self.prompts.tokenizers, self._models.served, serving)

    def _drift_stands(self, finding: DriftFinding) -> None:
        """Let go of a source of tokens that is found wrong; the next one is judged by what comes from now on."""
        model = finding.model
        if finding.reason != OTHER_TOKENS:
            return
        match self.token_watch.sources.get(model):
            case TokenSource.FOLDER:
                teller: Teller | None = Teller.FOLDER
            case TokenSource.PODS:
                teller = self.trust.teller_of_most(model)
            case _:
                return
        if teller is not None and self.trust.distrust(model, teller, Cause.DRIFT, WRONG_TOKENS):
            self.render.distrusted(model, teller)
            self.books.realised_watch.forget(model)

    def _pods_changed(self) -> None:
        """Believe again whose tokens have not come true: the pods may say, or make, others now."""
        for model in self.trust.renew():
            self.books.realised_watch.forget(model)

    def _restarted(self, address: str) -> None:
        self.books.restarted(address)
        self.render.is_another(address)
        self.checks.is_another(address)
        self._pods_changed()

    def _has_other_tokenizers(self, models: ModelTable) -> bool:
        """Tell whether a folder was loaded again since the prompts' source was made."""
        loaded, cache = self.prompts.tokenizers, self._resources.tokenizers
        return any(
            model.tokens_from is TokensFrom.TOKENIZER and loaded.get(model.name) is not cache.get(model)
            for model in models.served
        )

    def _doubts(self) -> Mapping[str, str]:
        """Return, by model, which tokens are wrong."""
        differ = {
            model: state.why for model, state in self.checks.states.items() if state.verdict is TokenVerdict.DIFFERS
        }
        return {**differ, **self.trust.doubts}

    def _folder_problems(self) -> Mapping[str, str]:
        """Return, by model, why its folder cannot be loaded."""
        problem = self._resources.tokenizers.problem
        return {model.name: why for model in self.declared_models() if (why := problem(model)) is not None}

    # --- its parts ------------------------------------------------------------------------------------------------

    def _runtime(self) -> PoolRuntime:
        policy, resources, books = self.config.policy, self._resources, self.books
        settings, priorities = resources.settings, policy.priorities
        pressure = PoolPressure(
            policy=priorities,
            estimates=books.estimates,
            degradation=self.degradation,
            waiting=self.order,
            clock=time.monotonic,
            random=random.random,
            replicas=lambda: 1 + resources.other_replicas(),
            sheddable_status=settings.sheddable_status,
        )
        return PoolRuntime(
            name=self.name,
            reader=RequestReader(
                models=self._models,
                known_models=settings.known_models,
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
                hot=HotPrefixes(policy.hotspot),
                turns=RoundRobin(),
                policy=policy,
                random=random.random,
            ),
            prompts=self.prompts,
            index=self.index,
            pressure=pressure,
            admission=RequestAdmission(policy=priorities, pressure=pressure, queue=self.queue, clock=time.monotonic),
            books=books,
            telemetry=self.telemetry,
            overload=self.overload,
            watch=resources.watch,
            degradations=resources.degradations,
            reads=resources.reads,
            full=self.queue.wake_at,
            quotas=self.quotas,
            others=resources.others,
            recent=deque(maxlen=RECENT_DECISIONS if self.config.from_flags else RECENT_DECISIONS_OF_A_POOL),
            labels=self._models.names(),
            sample_share=self._sample_share(),
            read_below_bytes=settings.read_below_bytes,
            most_endpoints=1 if settings.steering is Steering.ORIGINAL_DST else None,
            anywhere=self._serving,
        )

    def _sample_share(self) -> float:
        share = self.config.sample_share
        return self._resources.settings.sample_share if share is None else share

    def _serving(self) -> Sequence[str]:
        """Return the endpoints that a request may go to without a decision; none where the pool fails closed."""
        if self.config.failure_mode != FAIL_OPEN:
            return ()
        cordoned = self.config.policy.cordoned
        return [
            each.address
            for each in self.config.endpoints
            if each.ready and not each.terminating and each.address not in cordoned
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
            pace=self._resources.scrape_pace,
            turns=self._resources.page_turns,
            pages=self.telemetry.latencies,
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
        )

    def _render(self) -> PodRender:
        seconds = self._resources.settings.render_timeout_seconds
        settings = RenderSettings(timeout_seconds=seconds, media_timeout_seconds=4 * seconds)
        if not self.config.from_flags:  # one of many
            settings = replace(settings, cache_bytes=RENDER_CACHE_BYTES_OF_A_POOL)

        def serving(model: ServedModel) -> Sequence[str]:
            """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
            return _serving(self.endpoints.snapshot(now=time.monotonic()), model.name)

        return PodRender(endpoints=serving, settings=settings, trust=self.trust)

    def _prompt_source(self, models: ModelTable) -> PromptTokenSource:
        served, resources = models.served, self._resources
        if self.config.from_flags and all(model.tokens_from is TokensFrom.TEXT for model in served):
            log.warning("prompts are not tokenized: requests are routed on load and on what was routed before")
        try:
            return PromptTokenSource(
                served,
                render=self.render,
                settings=resources.token_settings,
                load=resources.tokenizers.get,
                long_work=resources.long_work,
                watch=self.token_watch,
                trust=self.trust,
            )
        except PromptTokensError as error:
            raise ConfigError(str(error)) from error

    def _show(self) -> None:
        """Let the metrics page ask what is not counted."""
        queue, degradation, books = self.queue, self.degradation, self.books
        self.overload.show(
            queued=lambda: queue.depth,
            steps_in_force=lambda: {
                ((step.class_name, step.step.step.value), 1.0) for step in degradation.in_force(now=time.monotonic())
            },
            estimate_errors=lambda: (
                ((endpoint,), error.mean_seconds) for endpoint, error in books.estimates.errors().items()
            ),
        )
        self.telemetry.show_token_sources(self.token_watch.counts)
        self.telemetry.show_token_states(
            lambda: {(model, state.verdict.value): 1.0 for model, state in self.checks.states.items()}
        )
        self.telemetry.show(
            EndpointView(
                known=lambda now: self.endpoints.known(now=now),
                estimates=books.estimates,
                role_of=books.role_of,
                index_problem=lambda: self.index.problem,
            )
        )


def _serving(statuses: Sequence[EndpointStatus], model: str) -> list[str]:
    """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
    return [
        status.address
        for status in statuses
        if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model))
    ]


def closed_endpoints(endpoints: Sequence[PoolEndpoint]) -> Mapping[str, Reachability | None]:
    """Return why each endpoint may get nothing new, None where it may."""
    return {
        endpoint.address: Reachability.TERMINATING
        if endpoint.terminating
        else None
        if endpoint.ready
        else Reachability.NOT_READY
        for endpoint in endpoints
    }
