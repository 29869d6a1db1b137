"""One pool while it is served: its parts, made from its configuration, and changed with it while requests run."""

import random
import time
from collections import deque
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
from extproc.choosing.choose import PoolView, RoundRobin
from extproc.choosing.hot_prefixes import HotPrefixes
from extproc.disaggregation.prefill_leg import KEPT_CONNECTIONS
from extproc.disaggregation.transfer_protocols import client_fields
from extproc.models.models import ServedModel
from extproc.pods.endpoint import Reachability, Role
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.policy.model_tokens import ModelTokens
from extproc.policy.pool_config import FAIL_OPEN, PoolConfig
from extproc.policy.priority import PriorityPolicy
from extproc.policy.values import Steering
from extproc.pools.booked_exchange import ReadResponse
from extproc.pools.picker_books import PickerBooks
from extproc.pools.pool_models import declared_models, models_of
from extproc.pools.pool_runtime import PoolRuntime
from extproc.pools.pool_tokens import PoolTokens
from extproc.pools.prediction_reports import MatchReporter, RealisedReporter
from extproc.pools.prefill_legs import PrefillLegs
from extproc.pools.scale_looks import SERVING, ScaleLooks
from extproc.pools.shared_resources import SharedResources
from extproc.prefixes.prefix_index import RedisPrefixIndex
from extproc.quotas.shared_quotas import Quotas, QuotaSettings
from extproc.responses.response_plan import ResponsePlan
from extproc.slo.stream_promises import stream_promises
from extproc.telemetry.endpoint_telemetry import EndpointView
from extproc.telemetry.first_pod_telemetry import FirstPodTelemetry
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from extproc.telemetry.process_telemetry import show_quotas
from extproc.telemetry.scale_telemetry import show_scale
from kvmesh.documents.pools import PoolEndpoint, pool_seed
from kvmesh.pods.pod_http import PodPages

RECENT_DECISIONS = 200
RECENT_DECISIONS_OF_A_POOL = 50  # there may be hundreds of pools


class Pool:
    """What a pool is made of beside the parts that a pick goes through, which are `runtime`."""

    def __init__(self, config: PoolConfig, resources: SharedResources) -> None:
        policy, settings = config.policy, resources.settings
        priorities = policy.priorities
        self.name = config.name
        self.config = config
        self._resources = resources
        self._memory_share = 1.0
        self.told: Callable[[], None] = lambda: None  # called when all new pods have been asked for their models
        self._own_models, self._folders = settings.model_table.served, settings.tokenizer_folders
        self._models = models_of(config, self._own_models, resources.tokenizers, folders=self._folders)
        self.telemetry = PickerTelemetry(as_extension=settings.extension_metrics)
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
        self.tokens = PoolTokens(
            resources,
            self.telemetry,
            endpoints=lambda: self.endpoints,
            declared=self.declared_models,
            forget=self.books.realised_watch.forget,
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
            stands=self.tokens.drift_stands,
            clock=time.monotonic,
        )
        self.scale = ScaleLooks(
            policy.autoscale,
            see=lambda: self,
            pickers=lambda: 1 + resources.other_replicas(),
            clock=time.monotonic,
            changed=lambda: resources.tell_scalers(),  # noqa: PLW0108 - it is set later
        )
        self.first_pod = self._first_pod()
        self.prompts = self.tokens.prompts(self._models.served)
        self.legs = PrefillLegs(
            books=self.books,
            telemetry=self.telemetry.prefill,
            degradations=resources.degradations,
            pages=PodPages(most_kept=KEPT_CONNECTIONS, key=resources.pod_key),
        )
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
        if models != self._models or self.tokens.are_other(prompts, models.served):
            prompts = self.tokens.prompts(models.served)
        self.config = config
        try:
            if config.endpoints != before.endpoints:
                self.endpoints.set_endpoints(closed_endpoints(config.endpoints))
                self.books.set_endpoints(endpoint.address for endpoint in config.endpoints)
                self.tokens.keep_endpoints([endpoint.address for endpoint in config.endpoints])
                self.legs.keep_endpoints([endpoint.address for endpoint in config.endpoints])
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
        self.first_pod.end()

    def come_back(self) -> None:
        """Take requests again: the pool was gone, and is there as it was."""
        policy = self.config.policy
        self.first_pod.reconfigure(policy.autoscale, policy.priorities)

    def missing_tokenizers(self) -> Sequence[ServedModel]:
        """Return the models whose tokenizers are to be loaded."""
        lacks = self._resources.tokenizers.lacks
        return [model for model in self.declared_models() if lacks((model,))]

    def found_folders(self) -> bool:
        """Tell whether a model has a tokenizer folder that was not there before; this may block."""
        knows = self._resources.tokenizers.knows
        return any(not knows(model) for model in self.missing_tokenizers())

    def declared_models(self) -> Sequence[ServedModel]:
        """Return the models with the tokenizers that they are to have."""
        return declared_models(self.config, self._own_models, folders=self._folders).served

    def model_tokens(self) -> tuple[ModelTokens, ...]:
        """Return where each model's tokens come from, as its requests have shown."""
        return self.tokens.shown(self._models.served)

    async def check_tokens(self) -> None:
        """Compare the folders' tokens with those of one pod more, where there is one that was not asked."""
        await self.tokens.check(self.prompts, self._models.served)

    def wanted_headers(self) -> frozenset[str]:
        """Return the request headers (lowercase) that the policy looks at."""
        return self._models.sticky_headers() | headers_named(self.config.policy.priorities)

    def wanted_claims(self) -> frozenset[str]:
        """Return the claims of a verified JWT that the policy looks at."""
        return claims_named(self.config.policy.priorities)

    @property
    def is_asking(self) -> bool:
        """Whether nothing is known of its models, and pods are being asked right now."""
        config = self.config
        return not config.learned and self.endpoints.is_asking and config.learns_models

    async def answers(self) -> None:
        """Wait until the pods have been asked for their models, for a scrape's deadline at most."""
        await self.endpoints.first_answers()

    @property
    def has_counted(self) -> bool:
        """Whether there was any request, or there is a signal for an autoscaler."""
        is_read = bool(self.scale.signals) or self.telemetry.extension is not None
        return is_read or self.runtime.has_failed_open or bool(self.runtime.recent)

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
        self.legs.close()
        await self.quotas.close()
        self.tokens.close()

    def _reconfigure(self, before: PriorityPolicy) -> None:
        policy, priorities = self.config.policy, self.config.policy.priorities
        self.endpoints.reconfigure(stale_after_seconds=policy.stale_after_seconds)
        self.books.reconfigure(policy, memory_share=self._memory_share)
        self.scale.reconfigure(policy.autoscale)
        self.first_pod.reconfigure(policy.autoscale, priorities)
        if self.shared is not None:
            self.shared.session_ttl_seconds = policy.session_seconds
        self.telemetry.reconfigure(policy)
        runtime = self.runtime
        self.overload.is_shadow = self.quotas.is_shadow = priorities.shadow
        if priorities != before:  # else every class keeps what was saved for its turn
            self.quotas.reconfigure(priorities.quotas)
            self.overload.know(priorities.classes)
            self.order.reconfigure(priorities)
            self.degradation.reconfigure(priorities)
            runtime.pressure.reconfigure(priorities)
        runtime.view.hot.reconfigure(policy.hotspot)
        runtime.view = replace(runtime.view, policy=policy, promises=stream_promises(priorities))
        runtime.reader = replace(
            runtime.reader,
            models=self._models,
            policy=priorities,
            transfer_fields=client_fields(policy.disaggregation),
        )
        runtime.prompts, runtime.labels = self.prompts, self._models.names()
        self.tokens.keep_models({model.name for model in self._models.served})
        runtime.admission.reconfigure(priorities)

    def _all_told(self) -> None:
        self.told()

    def _restarted(self, address: str) -> None:
        self.books.restarted(address)
        self.tokens.restarted(address)

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
                transfer_fields=client_fields(policy.disaggregation),
            ),
            long_work=resources.long_work,
            view=PoolView(
                endpoints=self.endpoints,
                bookings=books.bookings,
                memory=books.memory,
                health=books.health,
                estimates=books.estimates,
                links=books.links,
                hot=HotPrefixes(policy.hotspot),
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
            telemetry=self.telemetry,
            overload=self.overload,
            watch=resources.watch,
            degradations=resources.degradations,
            reads=resources.reads,
            full=self.queue.wake_at,
            legs=self.legs,
            quotas=self.quotas,
            others=resources.others,
            recent=deque(maxlen=RECENT_DECISIONS if self.config.from_flags else RECENT_DECISIONS_OF_A_POOL),
            labels=self._models.names(),
            sample_share=self._sample_share(),
            read_below_bytes=settings.read_below_bytes,
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
            bodies=self._resources.waiting_bodies,
            starts=self.scale.starts,
            serves=self._has_pod,
            ask=self.scale.ask_for_one,
            telemetry=telemetry,
            clock=time.monotonic,
            random=random.random,
        )
        telemetry.show(lambda: waits.waiting)
        return waits

    def _has_pod(self) -> bool:
        """Tell whether a request has a pod to go to, be it without a decision."""
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
        """Return the endpoints that a request may go to without a decision; none where the pool fails closed."""
        if self.config.failure_mode != FAIL_OPEN:
            return ()
        cordoned, roles = self.config.policy.cordoned, self.config.policy.roles
        return [
            each.address
            for each in self.config.endpoints
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

    def _pods_in_words(self) -> Mapping[str, str]:
        """Return the endpoints' pods as the inference extension writes them; without Kubernetes there are none."""
        return {
            each.address: f"{each.pod.rpartition('/')[2]}-rank-{each.rank or 0}"
            for each in self.config.endpoints
            if each.pod
        }

    def _pods_in_parts(self) -> Mapping[str, tuple[str, str, str]]:
        """Return the endpoints' pods: name, namespace and port; without Kubernetes there are none."""
        found = {}
        for each in self.config.endpoints:
            if each.pod:
                namespace, _, name = each.pod.rpartition("/")
                found[each.address] = (name, namespace, each.address.rpartition(":")[2])
        return found

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
        show_scale(self.telemetry.registry, lambda: self.scale.signals)
        if self.telemetry.extension is not None:
            self.telemetry.extension.show(
                self.name.rpartition("/")[2],
                known=lambda: self.endpoints.known(now=time.monotonic()),
                pods=self._pods_in_words,
            )
            scheduling = self.telemetry.extension.scheduling
            queue.on_left = scheduling.left_queue
            scheduling.show(
                self.name.rpartition("/")[2],
                waiting=lambda: queue.waiting,
                pods=self._pods_in_parts,
                tenant_label=self.telemetry.tenants.label_of,
                models=lambda: self.runtime.labels,
            )
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
    """Return why each endpoint may get nothing new, None where it may."""
    return {
        endpoint.address: Reachability.TERMINATING
        if endpoint.terminating
        else None
        if endpoint.ready
        else Reachability.NOT_READY
        for endpoint in endpoints
    }
