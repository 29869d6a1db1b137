"""Connects the use cases with the adapters: one task a configured endpoint, one a stream, a sweeper, a Redis watch.

Called by the command line (and by tests); decides nothing about events.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass

import aiohttp
import zmq

from kv_indexer.adapters.admin_http import AdminPages, serve_admin
from kv_indexer.adapters.event_sources import EventSourceDirectory
from kv_indexer.adapters.redis_writer import RedisIndexWriter
from kv_indexer.adapters.telemetry import PrometheusTelemetry
from kv_indexer.adapters.zmq_replay import ZmqReplaySource
from kv_indexer.adapters.zmq_subscriber import ZmqLiveEvents
from kv_indexer.apply_events import EventApplier, root_keys
from kv_indexer.config import IndexerSettings
from kv_indexer.core.source import EventAddresses, IndexStatus, Registry, SourceState, Stream
from kv_indexer.errors import FeedLostError, IndexUnavailableError, NoEventSourceError
from kv_indexer.follow_stream import StreamFollower

log = logging.getLogger(__name__)

REDIS_WATCH_SECONDS = 0.5
SWEEP_SECONDS = 0.5
SWEEP_FIELDS = 500  # a slice: about a millisecond of Redis
NAMED_RECORDS = 5  # unreadable records that one log line names


@dataclass(slots=True, kw_only=True)
class _Followed:
    """A stream under way."""

    addresses: EventAddresses
    task: asyncio.Task[None]


class IndexerService:
    """The running indexer."""

    def __init__(self, settings: IndexerSettings) -> None:
        self._settings = settings
        self._writer = RedisIndexWriter(url=settings.redis_url)
        self._telemetry = PrometheusTelemetry()
        self._roots = root_keys(hash_seed=settings.hash_seed, model=settings.model)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._streams: dict[Stream, _Followed] = {}
        self._unfound = dict.fromkeys(settings.endpoints, "not asked yet")  # endpoint -> why it has no streams
        self._tried: set[str] = set()  # endpoints of which at least the failure is known
        self._redis_trouble = "not asked yet"
        self._unreadable: frozenset[str] = frozenset()  # records in Redis, as said last
        self._dropped_unconfigured = False
        self.admin_port: int | None = None  # once it is open

    async def run(self) -> None:
        """Run until cancelled. Raise ListenError if the admin pages cannot be opened."""
        pages = AdminPages(not_ready=self.not_ready, status=self._status, metrics=self._metrics)
        try:
            async with AsyncExitStack() as stack:
                self.admin_port = await stack.enter_async_context(
                    serve_admin(pages, host=self._settings.host, port=self._settings.admin_port)
                )
                http = await stack.enter_async_context(aiohttp.ClientSession())
                directory = EventSourceDirectory(http=http, configured=self._settings.event_sources)
                group = await stack.enter_async_context(asyncio.TaskGroup())
                group.create_task(_repeat(self._watch_redis), name="redis-watch")
                group.create_task(_repeat(self._sweep), name="sweep")
                for endpoint in self._settings.endpoints:
                    group.create_task(self._follow_endpoint(endpoint, directory, group), name=f"endpoint-{endpoint}")
        finally:
            await self._writer.close()
            self._context.destroy(linger=0)

    def not_ready(self) -> Mapping[str, str]:
        """Return what keeps the indexer from being ready; a pod known to be lost does not."""
        trouble = {"redis": self._redis_trouble} if self._redis_trouble else {}
        waiting = {endpoint: why for endpoint, why in self._unfound.items() if endpoint not in self._tried}
        replaying = {
            stream.name: state.value
            for stream, (state, _) in self._telemetry.states.items()
            if state is SourceState.REPLAYING
        }
        starting = {s.name: "starting" for s in self._streams if s not in self._telemetry.states}
        return {**trouble, **waiting, **replaying, **starting}

    async def _follow_endpoint(self, endpoint: str, directory: EventSourceDirectory, group: asyncio.TaskGroup) -> None:
        checked_model = False
        while True:
            try:
                self._reconcile(endpoint, await directory.find(endpoint), group)
                if self._unfound.pop(endpoint, None):
                    checked_model = False
                if not checked_model:
                    checked_model = True
                    await self._check_model(endpoint, directory)
            except FeedLostError as error:
                self._not_found(endpoint, str(error), error.reason)
            except NoEventSourceError as error:
                self._reconcile(endpoint, {}, group)
                self._not_found(endpoint, str(error), error.reason)
            self._tried.add(endpoint)
            await asyncio.sleep(
                self._settings.rediscover_seconds if self._is_well(endpoint) else self._settings.rediscover_lost_seconds
            )

    def _is_well(self, endpoint: str) -> bool:
        states = [state for stream, (state, _) in self._telemetry.states.items() if stream.endpoint == endpoint]
        return bool(states) and SourceState.LOST not in states

    def _not_found(self, endpoint: str, message: str, reason: str) -> None:
        """Say it once; streams that are already followed keep their own opinion."""
        if self._unfound.get(endpoint) != message:
            log.error("%s", message)
        self._unfound[endpoint] = message
        if not any(stream.endpoint == endpoint for stream in self._streams):
            self._telemetry.state(Stream(endpoint=endpoint), state=SourceState.LOST, reason=reason)

    def _reconcile(self, endpoint: str, found: Mapping[int, EventAddresses], group: asyncio.TaskGroup) -> None:
        """Follow exactly the ranks that the pod has now, where they are now."""
        wanted = {Stream(endpoint=endpoint, dp_rank=rank): addresses for rank, addresses in found.items()}
        for stream in [stream for stream in self._streams if stream.endpoint == endpoint]:
            if wanted.get(stream) != self._streams[stream].addresses:
                self._streams.pop(stream).task.cancel()
                if stream not in wanted:
                    group.create_task(self._drop(stream), name=f"drop-{stream.name}")
        for stream, addresses in wanted.items():
            if stream not in self._streams:
                self._telemetry.states.pop(stream, None)  # "lost" was true before it was found
                task = group.create_task(self._follower(stream, addresses).run(), name=f"follow-{stream.name}")
                self._streams[stream] = _Followed(addresses=addresses, task=task)

    def _follower(self, stream: Stream, addresses: EventAddresses) -> StreamFollower:
        def on_malformed() -> None:
            self._telemetry.undecodable(stream, reasons={"malformed-message": 1})

        replay = addresses.replay
        return StreamFollower(
            stream=stream,
            live=ZmqLiveEvents(context=self._context, address=addresses.events, on_malformed=on_malformed),
            replay=ZmqReplaySource(context=self._context, address=replay, on_malformed=on_malformed)
            if replay
            else None,
            applier=EventApplier(stream=stream, roots=self._roots, writer=self._writer, telemetry=self._telemetry),
            writer=self._writer,
            telemetry=self._telemetry,
            policy=self._settings.recovery,
        )

    async def _check_model(self, endpoint: str, directory: EventSourceDirectory) -> None:
        try:
            served = await directory.served_models(endpoint)
        except FeedLostError as error:
            log.warning("cannot compare the model name with what the pod serves: %s", error)
            return
        if self._settings.model not in served:
            names = ", ".join(sorted(served)) or "none"
            log.error("%s does not serve --model %s but %s: nothing will match", endpoint, self._settings.model, names)

    async def _drop(self, stream: Stream) -> None:
        """Forget a stream that is no longer there; whatever it claimed must attract nobody."""
        self._telemetry.forget(stream)
        while True:
            try:
                await self._writer.drop_stream(stream)
                log.info("%s is dropped", stream.name)
                return
            except IndexUnavailableError:
                await asyncio.sleep(REDIS_WATCH_SECONDS)

    async def _drop_unconfigured(self, registry: Registry) -> None:
        for record in registry.streams:
            if record.endpoint not in self._settings.endpoints:
                await self._writer.drop_stream(Stream(endpoint=record.endpoint, dp_rank=record.dp_rank))
                log.info("%s is no longer configured; dropped", record.endpoint)

    async def _watch_redis(self) -> float:
        try:
            await self._writer.heartbeat()
            registry = await self._writer.read_registry()
            self._show_unreadable(registry)
            if not self._dropped_unconfigured:
                await self._drop_unconfigured(registry)
                self._dropped_unconfigured = True
            if self._redis_trouble:
                log.info("Redis answers")
            self._redis_trouble = ""
        except IndexUnavailableError as error:
            if self._redis_trouble != str(error):
                log.error("Redis is unavailable, the index stands still: %s", error)
            self._redis_trouble = str(error)
        self._telemetry.redis(up=not self._redis_trouble)
        return REDIS_WATCH_SECONDS

    def _show_unreadable(self, registry: Registry) -> None:
        """Say once what is in Redis that we cannot read: its blocks attract nobody."""
        unreadable = frozenset(registry.unreadable)
        fresh = sorted(unreadable - self._unreadable)
        if fresh:
            named = "; ".join(fresh[:NAMED_RECORDS])
            log.error("%d records in Redis cannot be read and are not believed: %s", len(fresh), named)
        if self._unreadable and not unreadable:
            log.info("all records in Redis can be read again")
        self._unreadable = unreadable
        self._telemetry.unreadable(len(unreadable))

    async def _sweep(self) -> float:
        busy = False
        try:
            busy = await self._writer.sweep(fields=SWEEP_FIELDS)
        except IndexUnavailableError as error:
            log.debug("sweep waits: %s", error)
        return 0 if busy else SWEEP_SECONDS

    async def _status(self) -> IndexStatus:
        return (await self._writer.read_registry()).status()

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
        seconds = REDIS_WATCH_SECONDS
        try:
            seconds = await step()
        except Exception as error:  # a defect must not end the streams
            if said != repr(error):
                log.exception("a defect; going on")
            said = repr(error)
        await asyncio.sleep(seconds)
