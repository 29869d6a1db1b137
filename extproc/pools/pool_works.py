"""The works of one pool's picker, made and tied together: books, scraper, index, quotas, queue, pressure.

Called by `pool_picker`, which puts requests through them; nothing runs and no request is seen here.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from extproc.admission.admission_queue import AdmissionQueue
from extproc.admission.degradation import Degradation
from extproc.admission.flow_queue import FlowQueue
from extproc.admission.pool_pressure import PoolPressure
from extproc.admission.ports import PromptSource
from extproc.choosing.hotspot import HotPrefixes
from extproc.choosing.round_robin import RoundRobin
from extproc.models.models import ModelTable, ServedModel
from extproc.pick import EndpointPicker
from extproc.pods.endpoint import Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from extproc.policy.pool_config import PoolConfig
from extproc.pools.picker_books import PickerBooks
from extproc.pools.picker_parts import PickerParts
from extproc.prefixes.prefix_index import RedisPrefixIndex
from extproc.prefixes.watch_matches import MatchReporter
from extproc.prompts.pod_render import PodRender, RenderSettings
from extproc.quotas.shared_quotas import Quotas
from extproc.replicas.shared_state import PoolShare, SharedState
from extproc.responses.watch_realised import RealisedReporter
from extproc.telemetry.endpoint_telemetry import EndpointView
from extproc.telemetry.overload_telemetry import OverloadTelemetry
from extproc.telemetry.picker_telemetry import PickerTelemetry
from extproc.telemetry.process_telemetry import show_quotas
from kvmesh.documents.pools import PoolEndpoint, pool_seed

RENDER_CACHE_BYTES_OF_A_POOL = 4 << 20  # there may be hundreds of pools


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolWorks:
    """What one pool's picker works with; each part goes by its policy until it is reconfigured."""

    telemetry: PickerTelemetry
    overload: OverloadTelemetry
    books: PickerBooks
    endpoints: MetricsScraper
    shared: SharedState | PoolShare | None
    quotas: Quotas
    index: RedisPrefixIndex
    match_reporter: MatchReporter
    realised_reporter: RealisedReporter
    render: PodRender
    order: FlowQueue
    queue: AdmissionQueue
    degradation: Degradation
    pressure: PoolPressure
    hot: HotPrefixes


def pool_works(config: PoolConfig, parts: PickerParts) -> PoolWorks:
    """Make the works of a pool, and enter its books with the other pools'."""
    policy = config.policy
    telemetry = PickerTelemetry()
    telemetry.reconfigure(policy)
    overload = OverloadTelemetry(
        telemetry.registry, classes=policy.priorities.classes, tenants=telemetry.tenants, queued=telemetry.queued
    )
    books = PickerBooks(
        [endpoint.address for endpoint in config.endpoints],
        policy=policy,
        telemetry=telemetry,
        overload=overload,
        degradations=parts.degradations,
    )
    parts.books[config.name] = books
    endpoints = _scraper(config, parts, books, telemetry)
    books.shared = shared = parts.share_of(config.name, session_ttl_seconds=policy.session_seconds)
    books.quotas = quotas = _quotas(config, parts)
    show_quotas(telemetry.registry, quotas)
    order = FlowQueue(policy.priorities)
    queue = AdmissionQueue(order, clock=time.monotonic, telemetry=overload)
    books.freed = queue.wake
    degradation = Degradation(policy.priorities, on_change=overload.step_changed)
    _show(overload, queue, degradation, books)
    index = _index(config, parts, shared, quotas)
    telemetry.show(
        EndpointView(
            known=lambda now: endpoints.known(now=now),
            estimates=books.estimates,
            role_of=books.role_of,
            index_problem=lambda: index.problem,
        )
    )
    return PoolWorks(
        telemetry=telemetry,
        overload=overload,
        books=books,
        endpoints=endpoints,
        shared=shared,
        quotas=quotas,
        index=index,
        match_reporter=MatchReporter(
            watch=books.matches,
            endpoints=lambda now: endpoints.known(now=now),
            display=telemetry,
            clock=time.monotonic,
        ),
        realised_reporter=RealisedReporter(watch=books.realised_watch, display=telemetry, clock=time.monotonic),
        render=_render(config, parts, endpoints),
        order=order,
        queue=queue,
        degradation=degradation,
        pressure=PoolPressure(
            policy=policy.priorities,
            estimates=books.estimates,
            degradation=degradation,
            waiting=order,
            clock=time.monotonic,
            random=random.random,
            replicas=lambda: 1 + parts.other_replicas(),
        ),
        hot=HotPrefixes(policy.hotspot),
    )


def endpoint_picker(
    works: PoolWorks, config: PoolConfig, parts: PickerParts, *, models: ModelTable, prompts: PromptSource
) -> EndpointPicker:
    """Return what decides for the pool."""
    settings = parts.settings
    return EndpointPicker(
        endpoints=works.endpoints,
        bookings=works.books.bookings,
        index=works.index,
        prompts=prompts,
        models=models,
        known_models=settings.known_models,
        policy=config.policy,
        pressure=works.pressure,
        quotas=works.quotas,
        health=works.books.health,
        memory=works.books.memory,
        hot=works.hot,
        telemetry=works.telemetry,
        clock=time.monotonic,
        random=random.random,
        turns=RoundRobin(),
        max_body_bytes=settings.max_body_bytes,
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


def _scraper(config: PoolConfig, parts: PickerParts, books: PickerBooks, telemetry: PickerTelemetry) -> MetricsScraper:
    settings = parts.settings
    scraper = MetricsScraper(
        [endpoint.address for endpoint in config.endpoints],
        interval_seconds=settings.scrape_interval_seconds,
        timeout_seconds=settings.scrape_timeout_seconds,
        stale_after_seconds=config.policy.stale_after_seconds,
        restarted=books.restarted,
        reported=books.reported,
        changed=books.changed,
        pace=parts.scrape_pace,
        pages=telemetry.latencies,
    )
    scraper.set_endpoints(closed_endpoints(config.endpoints))
    return scraper


def _quotas(config: PoolConfig, parts: PickerParts) -> Quotas:
    return Quotas(
        url=parts.settings.redis_url,
        hash_seed=pool_seed(parts.settings.hash_seed, config.name),
        quotas=config.policy.priorities.quotas,
        others=parts.other_replicas,
        link=parts.quota_link,
    )


def _index(
    config: PoolConfig, parts: PickerParts, shared: SharedState | PoolShare | None, quotas: Quotas
) -> RedisPrefixIndex:
    settings = parts.settings
    return RedisPrefixIndex(
        url=settings.redis_url,
        hash_seed=pool_seed(settings.hash_seed, config.name),
        timeout_seconds=settings.index_timeout_seconds,
        shared=shared,
        quotas=quotas,
        reader=parts.reader,
    )


def _render(config: PoolConfig, parts: PickerParts, endpoints: MetricsScraper) -> PodRender:
    seconds = parts.settings.render_timeout_seconds
    settings = RenderSettings(timeout_seconds=seconds, media_timeout_seconds=4 * seconds)
    if config.name:  # one of many
        settings = replace(settings, cache_bytes=RENDER_CACHE_BYTES_OF_A_POOL)

    def serving(model: ServedModel) -> Sequence[str]:
        """Return the pods that report and serve the model: one that does not answer would cost the deadline."""
        return [
            status.address
            for status in endpoints.snapshot(now=time.monotonic())
            if status.reachability is Reachability.READY and (status.models is None or status.models.serves(model.name))
        ]

    return PodRender(endpoints=serving, settings=settings)


def _show(overload: OverloadTelemetry, queue: AdmissionQueue, degradation: Degradation, books: PickerBooks) -> None:
    overload.show(
        queued=lambda: queue.depth,
        steps_in_force=lambda: {
            ((step.class_name, step.step.step.value), 1.0) for step in degradation.in_force(now=time.monotonic())
        },
        estimate_errors=lambda: (
            ((endpoint,), error.mean_seconds) for endpoint, error in books.estimates.errors().items()
        ),
    )
