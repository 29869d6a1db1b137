"""Connects discovery, stream sharing, followers, the watches over Redis and pods, and the admin pages.

It makes no decision about events, nor about which indexer follows which stream.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from math import inf

import zmq

from kv_indexer.admin_http import AdminPages, serve_admin
from kv_indexer.apply.apply_events import EventApplier, root_keys
from kv_indexer.apply.pod_shares import PodShares
from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.config import IndexerSettings
from kv_indexer.events.socket_signals import SharedTurns
from kv_indexer.events.zmq_sockets import HEARTBEAT_SECONDS, ZmqLiveEvents, ZmqReplaySource
from kv_indexer.follow.follow_stream import StreamFollower
from kv_indexer.pools.event_sources import EventSourceDirectory
from kv_indexer.pools.find_streams import DiscoveryPolicy, StreamFinder
from kv_indexer.pools.follow_pools import PoolFollower, pool_roots
from kv_indexer.pools.members import PoolFeed
from kv_indexer.pools.pool_report import IndexFacts, PoolsReport
from kv_indexer.share.redis_leases import RedisLeaseBook
from kv_indexer.share.share_streams import StreamSharer
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kv_indexer.telemetry.redis_telemetry import RedisWatch
from kv_indexer.watch.pod_metrics import PodMetrics
from kv_indexer.watch.watch_index import EvictionWatch, IndexWatch
from kv_indexer.watch.watch_pods import PodWatch
from kvmesh.blocks.block_keys import RootKeys
from kvmesh.blocks.source import Claim, EventAddresses, IndexStatus, SourceState, Stream
from kvmesh.documents.documents import DocumentSource
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_findings import RedisFindings
from kvmesh.metrics.exposition import Form
from kvmesh.pods.pod_http import PodPages
from kvmesh.pods.pod_key import open_key

log = logging.getLogger(__name__)

TICKS_A_LEASE = 4  # one or two may fail before other indexers take over
TICK_DEADLINES_A_LEASE = 2
PULSES_A_TICK = 3  # between two ticks; this many in a row may be late or lost before other indexers take over
PROBES_A_SECOND = 10.0  # of quiet streams, by one indexer; a probe takes it about 0.7 ms
DEFECT_SECONDS = 0.5  # pause after an unexpected exception
STREAMS_AT_ONCE = 64  # taken up for the first time at once
SLOWEST_HEARTBEAT = 12.0  # factor; TCP still notices a vanished host as quickly, but a hung process is noticed later
LEASE_HASTE = 2  # factor: leases slow down less than scrapes and probes, because a takeover waits for their end
NEWS_SECONDS = 0.1  # news of many pods within this time are handled together
METRICS_REDIS_SECONDS = 1.0  # the page must not wait for Redis: it reports that Redis is away
UNKNOWN_SECONDS = 0.1  # between two checks whether the pools are known
LOST_PODS_A_SECOND = (
    25.0  # limit on requests to pods that do not answer; at a higher rate their timeouts would hold up all others
)
GC_THRESHOLDS = (20_000, 20, 20)  # if pools are followed: a follower has some 100 objects, hardly any garbage
MAX_SOCKETS = 32_768  # ZMQ's default suffices for about 300 streams


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
            slowdown=self._lease_slowdown,
        )
        self._findings = RedisFindings(url=settings.redis_url, indexer=settings.indexer_id)
        self._telemetry = PrometheusTelemetry()
        self._eviction = EvictionWatch(url=settings.redis_url, show=self._telemetry.eviction_policy)
        self._redis_watch = RedisWatch(url=settings.redis_url, show=self._telemetry.redis_facts)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._turns = SharedTurns()
        self._context.max_sockets = MAX_SOCKETS
        self._roots = _roots(settings)
        self._shares = PodShares()
        self._was_ready = self._is_frozen = False
        self._found = asyncio.Event()  # set when discovery has news, or another indexer has died
        self._is_heir = False  # another indexer has died
        self._shown_pools = PoolsReport(synced=False)  # as the metrics show them
        self._rendering = asyncio.Lock()
        self._finder = StreamFinder(
            endpoints=settings.endpoints,
            model=settings.model,
            telemetry=self._telemetry,
            is_lost=self._is_lost,
            changed=self._found.set,
            policy=DiscoveryPolicy(
                well_seconds=settings.rediscover_seconds,
                lost_seconds=settings.rediscover_lost_seconds,
                lost_a_second=LOST_PODS_A_SECOND if settings.documents else inf,
            ),
            slowdown=self._slowdown,
            is_registered=lambda stream: self._watch.record(stream, inf) is not None,
        )
        self._sharer = StreamSharer(
            leases=self._leases,
            answers=self._finder.answers,
            streams=lambda: self._finder.streams,
            telemetry=self._telemetry,
            clock=time.monotonic,
        )
        self._watch = IndexWatch(writer=self._writer, seen=self._sharer.registered, slowdown=self._slowdown)
        self._pod_key = open_key(settings.pod_access)
        self._pages = PodPages(key=self._pod_key)
        self._pods = PodMetrics(
            settings.endpoints, interval_seconds=settings.scrape_seconds, slowdown=self._slowdown, pages=self._pages
        )
        self._pools = self._pool_follower(settings.documents) if settings.documents else None
        self._start_limit = asyncio.Semaphore(STREAMS_AT_ONCE) if self._pools else None
        self._pod_watch = PodWatch(
            endpoints=self._pools.asked if self._pools else settings.endpoints,
            activities=self._telemetry.activities,
            pods=self._pods,
            share=self._findings.share,
            telemetry=self._telemetry,
            held=lambda: self._sharer.held,
            answers=self._finder.answers,
            registry=lambda: self._watch.registry,
            clock=time.monotonic,
            wall=time.time,
            policy=settings.findings,
            slowdown=self._slowdown,
            pool_of=self._pools.pool_of if self._pools else lambda _: "",
        )
        self.admin_port: int | None = None  # set once the port is open

    async def run(self) -> None:
        """Run until cancelled, then release the streams. Raise ListenError if the admin pages cannot be opened."""
        settings = self._settings
        if self._pools:
            gc.set_threshold(*GC_THRESHOLDS)
        pages = AdminPages(
            not_ready=self.not_ready,
            status=self._status,
            metrics=self._metrics,
            pools=self._pools_report if self._pools else None,
        )
        try:
            async with AsyncExitStack() as stack:
                self.admin_port = await stack.enter_async_context(
                    serve_admin(pages, host=settings.host, port=settings.admin_port, access=settings.admin_access)
                )
                log.info("this indexer is %s", settings.indexer_id)
                directory = EventSourceDirectory(
                    pages=self._pages, configured=settings.event_sources, ports=settings.event_ports
                )
                stack.push_async_callback(self._sharer.release)  # once all tasks have ended
                group = await stack.enter_async_context(asyncio.TaskGroup())
                group.create_task(self._pods.run(), name="scrape-pods")  # first: followers ask it when a pod started
                group.create_task(_repeat(self._watch_index), name="watch-index")
                group.create_task(_repeat(self._watch.sweep), name="sweep")
                group.create_task(_repeat(self._eviction.look), name="watch-eviction")
                group.create_task(_repeat(self._redis_watch.look), name="watch-redis")
                group.create_task(_repeat(partial(self._share, group)), name="share-streams")
                group.create_task(_repeat(self._pulse), name="pulse")
                group.create_task(_repeat(self._pod_watch.look), name="watch-pods")
                for endpoint in settings.endpoints:
                    group.create_task(self._finder.watch(endpoint, directory), name=f"find-{endpoint}")
                if self._pools:
                    self._pools.start(group, directory)
        finally:
            for connection in (self._eviction, self._redis_watch, self._leases, self._findings, self._writer):
                await connection.close()
            self._context.destroy(linger=0)

    def not_ready(self) -> Mapping[str, str]:
        """Return the reasons why the indexer is not ready.

        A pod known to be lost is no reason, nor is a stream that another indexer follows. If pools are followed, only
        the pods of the beginning count, because pods come and go.
        """
        if self._pools and not self._pools.is_known:
            return {"pools": "not known yet"}
        trouble = self._watch.trouble or self._sharer.trouble
        not_ready = {"redis": trouble} if trouble else {}
        if self._was_ready:
            return not_ready
        not_ready.update(self._finder.waiting)
        held = self._sharer.held
        for stream in self._finder.streams:
            state, _ = self._telemetry.states.get(stream, (None, ""))
            if stream not in held:
                if not self._watch.owner(stream):
                    not_ready[stream.name] = "nobody follows it yet"
            elif state is None or state is SourceState.REPLAYING:
                not_ready[stream.name] = state.value if state else "starting"
        self._was_ready = self._pools is not None and not not_ready
        return not_ready

    def _pool_follower(self, documents: DocumentSource) -> PoolFollower:
        self._telemetry.show_pools(lambda: self._shown_pools)
        return PoolFollower(
            documents,
            finder=self._finder,
            scrape=self._pods.add,
            answer_for=self._leases.list_endpoints,
            forget=self._forget,
        )

    def _forget(self, endpoints: Collection[str]) -> None:
        for endpoint in endpoints:
            self._pods.remove(endpoint)
        self._telemetry.forget_endpoints(endpoints)

    def _pools_report(self) -> PoolsReport:
        assert self._pools is not None
        return self._pools.report(
            IndexFacts(
                answers=self._finder.answers,
                states=self._telemetry.states,
                held=self._sharer.held,
                registry=self._watch.registry,
                findings=self._pod_watch.current,
            )
        )

    def _slowdown(self) -> float:
        return self._pools.slowdown() if self._pools else 1.0

    def _lease_slowdown(self) -> float:
        return max(self._slowdown() / LEASE_HASTE, 1.0)

    def _is_lost(self, endpoint: str) -> bool:
        answer = self._finder.answers.get(endpoint)
        streams = (Stream(endpoint=endpoint, dp_rank=rank) for rank in (answer.ranks if answer else ()))
        states = self._telemetry.states
        return any(states[stream][0] is SourceState.LOST for stream in streams if stream in states)

    async def _follow(self, claim: Claim, addresses: EventAddresses) -> None:
        stream, replay = claim.stream, addresses.replay
        feed = addresses if isinstance(addresses, PoolFeed) else None
        roots = self._roots(feed)
        on_malformed = partial(self._telemetry.undecodable, stream, reasons={"malformed-message": 1})
        ranks = len(answer.ranks) if (answer := self._finder.answers.get(stream.endpoint)) else 1
        source = (
            ZmqReplaySource(context=self._context, address=replay, on_malformed=on_malformed, ranks=ranks)
            if replay
            else None
        )
        applier = EventApplier(
            claim=claim,
            roots=roots,
            writer=self._writer,
            telemetry=self._telemetry,
            namespace=roots(None, None).hex() if feed else "",
            shares=self._shares,
        )
        follower = StreamFollower(
            claim=claim,
            live=ZmqLiveEvents(
                context=self._context,
                address=addresses.events,
                on_malformed=on_malformed,
                heartbeat_seconds=HEARTBEAT_SECONDS * min(self._slowdown(), SLOWEST_HEARTBEAT),
                ranks=ranks,
                turns=self._turns,
            ),
            replay=source.replay if source else None,
            applier=applier,
            writer=self._writer,
            telemetry=self._telemetry,
            policy=replace(self._settings.recovery, unconfirmed_seconds=self._settings.unconfirmed_seconds),
            started_at=partial(self._pods.started_at, stream.endpoint),
            slowdown=self._slowdown,
            start_limit=self._start_limit,
            registered=partial(self._watch.record, stream),
            subscribe=partial(self._watch.subscribe, stream),
            on_lost=partial(self._ask_again, stream),
            quiet_limit_seconds=lambda: len(self._sharer.held) / PROBES_A_SECOND,
        )
        try:
            await follower.run()
        finally:
            applier.close()

    def _ask_again(self, stream: Stream) -> None:
        """Ask the pod of a lost stream at once: its next regular turn may be a quarter of an hour off."""
        if self._pools and self._slowdown() > 1 and stream.endpoint in self._pools.asked:
            self._pools.begin(stream.endpoint)

    async def _share(self, group: asyncio.TaskGroup) -> float:
        if self._pools and not self._pools.is_known:
            return UNKNOWN_SECONDS  # a tick now would drop the streams of all endpoints that no other indexer lists
        self._found.clear()
        await self._sharer.tick(group, self._follow)
        self._telemetry.held(len(self._sharer.held))
        try:
            async with asyncio.timeout(self._tick_seconds()):
                await self._found.wait()
        except TimeoutError:
            return 0  # no news, but the leases must be renewed
        if self._is_heir:
            self._is_heir = False
            return 0
        return NEWS_SECONDS * self._slowdown() if self._pools else 0

    def _tick_seconds(self) -> float:
        return self._settings.lease_seconds * self._lease_slowdown() / TICKS_A_LEASE

    async def _pulse(self) -> float:
        if not self._pools or self._pools.is_known:
            self._is_heir = await self._sharer.pulse() or self._is_heir
        if self._is_heir:
            self._found.set()
        return self._tick_seconds() / PULSES_A_TICK

    async def _watch_index(self) -> float:
        seconds = await self._watch.look()
        self._telemetry.redis(up=not self._watch.trouble)
        self._telemetry.unreadable(len(self._watch.registry.unreadable))
        if self._pools and not self._is_frozen and not self.not_ready():
            self._is_frozen = True  # not `_was_ready`: a request to /readyz may have set that already
            gc.freeze()  # thousands of followers live long; scanning them at each collection costs 5 % of a core
        return seconds

    async def _status(self) -> IndexStatus:
        return replace((await self._writer.read_registry()).status(), findings=self._pod_watch.shown)

    async def _metrics(self, form: Form) -> bytes:
        async with self._rendering:
            try:
                async with asyncio.timeout(METRICS_REDIS_SECONDS):
                    self._telemetry.sources((await self._writer.read_registry()).sources())
            except (IndexUnavailableError, TimeoutError) as error:
                log.debug("metrics with the block counts of the last time: %s", error)
            self._telemetry.ready(not self.not_ready())
            self._telemetry.pod_key(unusable=self._pod_key is not None and bool(self._pod_key.problem))
            if self._pools:
                self._shown_pools = self._pools_report()
            return await asyncio.to_thread(self._telemetry.render, form)  # megabytes with thousands of pods


def _roots(settings: IndexerSettings) -> Callable[[PoolFeed | None], RootKeys]:
    static = root_keys(hash_seed=settings.hash_seed, model=settings.model)
    of_pool = pool_roots(settings.hash_seed)
    return lambda feed: of_pool(feed) if feed else static


async def _repeat(step: Callable[[], Awaitable[float]]) -> None:
    """Run a step forever; it returns the seconds until the next run."""
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
