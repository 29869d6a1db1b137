"""Connects the use cases with the adapters: discovery, sharing of streams, watches over Redis and pods, admin pages.

Called by the command line (and by tests); decides nothing about events, nor about who follows what.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import aiohttp
import zmq

from kv_indexer.adapters.admin_http import AdminPages, serve_admin
from kv_indexer.adapters.event_sources import EventSourceDirectory
from kv_indexer.adapters.pod_metrics import PodMetrics
from kv_indexer.adapters.redis_eviction import EvictionWatch
from kv_indexer.adapters.redis_findings import RedisFindings
from kv_indexer.adapters.redis_leases import RedisLeaseBook
from kv_indexer.adapters.redis_writer import RedisIndexWriter
from kv_indexer.adapters.telemetry import PrometheusTelemetry
from kv_indexer.apply_events import root_keys
from kv_indexer.build_follower import FollowerParts
from kv_indexer.config import IndexerSettings
from kv_indexer.core.source import Claim, EventAddresses, IndexStatus, SourceState
from kv_indexer.core.whereabouts import known_streams
from kv_indexer.errors import IndexUnavailableError
from kv_indexer.find_streams import DiscoveryPolicy, StreamFinder
from kv_indexer.share_streams import StreamSharer
from kv_indexer.watch_index import IndexWatch
from kv_indexer.watch_pods import PodWatch

log = logging.getLogger(__name__)

TICKS_A_LEASE = 4  # one or two may fail before others take over
TICK_DEADLINES_A_LEASE = 2
DEFECT_SECONDS = 0.5  # pause after a defect


class IndexerService:
    """The running indexer."""

    def __init__(self, settings: IndexerSettings) -> None:
        self._settings = settings
        self._writer = RedisIndexWriter(url=settings.redis_url)
        self._leases = RedisLeaseBook(
            url=settings.redis_url,
            indexer=settings.indexer_id,
            endpoints=settings.endpoints,
            lease_seconds=settings.lease_seconds,
            timeout_seconds=settings.lease_seconds / TICK_DEADLINES_A_LEASE,
        )
        self._shelf = RedisFindings(url=settings.redis_url, indexer=settings.indexer_id)
        self._telemetry = PrometheusTelemetry()
        self._eviction = EvictionWatch(url=settings.redis_url, show=self._telemetry.eviction_policy)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._found = asyncio.Event()  # discovery has news
        self._finder = StreamFinder(
            endpoints=settings.endpoints,
            model=settings.model,
            telemetry=self._telemetry,
            is_lost=self._is_lost,
            changed=self._found.set,
            policy=DiscoveryPolicy(
                well_seconds=settings.rediscover_seconds, lost_seconds=settings.rediscover_lost_seconds
            ),
        )
        self._sharer = StreamSharer(
            leases=self._leases, answers=self._finder.answers, telemetry=self._telemetry, clock=time.monotonic
        )
        self._watch = IndexWatch(writer=self._writer, seen=self._sharer.registered)
        self._pods = PodMetrics(settings.endpoints, interval_seconds=settings.scrape_seconds)
        self._pod_watch = PodWatch(
            endpoints=settings.endpoints,
            activities=self._telemetry.activities,
            pods=self._pods,
            shelf=self._shelf,
            display=self._telemetry,
            held=lambda: self._sharer.held,
            answers=self._finder.answers,
            registry=lambda: self._watch.registry,
            clock=time.monotonic,
            wall=time.time,
            policy=settings.findings,
        )
        self.admin_port: int | None = None  # once it is open

    async def run(self) -> None:
        """Run until cancelled, then give the streams back. Raise ListenError if the admin pages cannot be opened."""
        settings = self._settings
        pages = AdminPages(not_ready=self.not_ready, status=self._status, metrics=self._metrics)
        try:
            async with AsyncExitStack() as stack:
                self.admin_port = await stack.enter_async_context(
                    serve_admin(pages, host=settings.host, port=settings.admin_port)
                )
                log.info("this indexer is %s", settings.indexer_id)
                # no limit: a hundred pods that hang must not keep the others waiting
                connector = aiohttp.TCPConnector(limit=0)
                http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
                directory = EventSourceDirectory(http=http, configured=settings.event_sources)
                stack.push_async_callback(self._sharer.release)  # once all tasks have ended
                group = await stack.enter_async_context(asyncio.TaskGroup())
                group.create_task(self._pods.run(), name="scrape-pods")  # first: followers ask it who a pod is
                group.create_task(_repeat(self._watch_index), name="watch-index")
                group.create_task(_repeat(self._watch.sweep), name="sweep")
                group.create_task(_repeat(self._eviction.look), name="watch-eviction")
                group.create_task(_repeat(partial(self._share, group, self._parts())), name="share-streams")
                group.create_task(_repeat(self._pod_watch.look), name="watch-pods")
                for endpoint in settings.endpoints:
                    group.create_task(self._finder.watch(endpoint, directory), name=f"find-{endpoint}")
        finally:
            for connection in (self._eviction, self._leases, self._shelf, self._writer):
                await connection.close()
            self._context.destroy(linger=0)

    def not_ready(self) -> Mapping[str, str]:
        """Return what keeps the indexer from being ready.

        A pod known to be lost does not, nor does a stream that another indexer follows.
        """
        trouble = self._watch.trouble or self._sharer.trouble
        not_ready = {"redis": trouble} if trouble else {}
        not_ready.update(self._finder.waiting)
        held = self._sharer.held
        for stream in known_streams(self._finder.answers):
            state, _ = self._telemetry.states.get(stream, (None, ""))
            if stream not in held:
                if not self._watch.owner(stream):
                    not_ready[stream.name] = "nobody follows it yet"
            elif state is None or state is SourceState.REPLAYING:
                not_ready[stream.name] = state.value if state else "starting"
        return not_ready

    def _is_lost(self, endpoint: str) -> bool:
        states = [state for stream, (state, _) in self._telemetry.states.items() if stream.endpoint == endpoint]
        return SourceState.LOST in states

    def _parts(self) -> FollowerParts:
        return FollowerParts(
            context=self._context,
            pods=self._pods,
            writer=self._writer,
            telemetry=self._telemetry,
            roots=root_keys(hash_seed=self._settings.hash_seed, model=self._settings.model),
            policy=self._settings.recovery,
        )

    async def _share(self, group: asyncio.TaskGroup, parts: FollowerParts) -> float:
        """Tick; at once when discovery has news."""

        async def follow(claim: Claim, addresses: EventAddresses) -> None:
            await parts.build(claim, addresses).run()

        self._found.clear()
        await self._sharer.tick(group, follow)
        self._telemetry.held(len(self._sharer.held))
        try:
            async with asyncio.timeout(self._settings.lease_seconds / TICKS_A_LEASE):
                await self._found.wait()
        except TimeoutError:
            pass  # nothing new, but the leases want to be renewed
        return 0

    async def _watch_index(self) -> float:
        seconds = await self._watch.look()
        self._telemetry.redis(up=not self._watch.trouble)
        self._telemetry.unreadable(len(self._watch.registry.unreadable))
        return seconds

    async def _status(self) -> IndexStatus:
        return replace((await self._writer.read_registry()).status(), findings=self._pod_watch.shown)

    async def _metrics(self) -> bytes:
        try:
            self._telemetry.sources((await self._writer.read_registry()).sources())
        except IndexUnavailableError as error:
            log.debug("metrics without block counts: %s", error)
        return self._telemetry.render()


async def _repeat(step: Callable[[], Awaitable[float]]) -> None:
    """Take a step again and again; it returns the seconds until the next."""
    said = ""
    while True:
        seconds = DEFECT_SECONDS
        try:
            seconds = await step()
        except Exception as error:  # a defect must not end the streams
            if said != repr(error):
                log.exception("a defect; going on")
            said = repr(error)
        await asyncio.sleep(seconds)
