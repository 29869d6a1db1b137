"""Wires up the picker (pools, gRPC server, admin pages) and runs it until told to stop."""

import asyncio
import gc
import logging
import resource
import socket
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from extproc.answers.response_plan import ResponsePlan
from extproc.choosing.plugins import load_plugins
from extproc.errors import ConfigError, LocalAnswer, NoReadyEndpointError, first_error
from extproc.ext_proc.exchange import RequestFacts, Uploads
from extproc.ext_proc.grpc_server import ExtProcServer, Http2Transport, Transport
from extproc.ext_proc.grpc_tls import server_tls
from extproc.ledger.feature_telemetry import show_waiting_bodies
from extproc.ledger.process_telemetry import (
    show_lookups,
    show_pod_key,
    show_records,
    show_uploads,
)
from extproc.models.models import MODELS_PATH, models_document
from extproc.pages.admin_http import AdminSite
from extproc.pages.admin_port import open_admin_port
from extproc.pick import pick
from extproc.policy.values import FAIL_CLOSE, PoolConfig
from extproc.pools.booked_exchange import BookedExchange, ReadResponse
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.requests.json_body import LONG_BODY_BYTES
from extproc.scaling.external_scaler import ExternalScaler
from extproc.settings.config import GrpcServer, PickerSettings
from kvmesh.documents.documents import DocumentSource
from kvmesh.documents.pools import PoolEndpoint
from kvmesh.heap import return_free_pages, return_large_blocks
from kvmesh.metrics.registry import Registry

if TYPE_CHECKING:
    from extproc.pools.mesh import MeshFollower

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # for exchanges being picked or waiting for their pod's first byte
TRACESTATE = "tracestate"  # https://www.w3.org/TR/trace-context/
GC_THRESHOLDS = (5_000, 20, 20)
RETURN_SECONDS = 3.0
MUCH_BYTES = 16 << 20  # of bodies received, after which returning memory is worthwhile
STATIC = ""  # the pool of --endpoints


class PickerService:
    """One picker process: the objects behind the gRPC and admin servers, and the background tasks."""

    def __init__(self, settings: PickerSettings, *, source: DocumentSource | None = None) -> None:
        """`source` replaces the source of documents that the settings name."""
        self.settings = settings
        self._source = source
        self.resources = SharedResources(settings)
        self.pools = Pools(self.resources, changed=self._wants_change)
        self.uploads = Uploads(most_bytes=settings.max_held_body_bytes)
        self.scaler = ExternalScaler(self.pools)
        self.resources.tell_scalers = self._tell_scalers
        self.server: ExtProcServer | None = None
        self.follower: MeshFollower | None = None
        self.site: AdminSite | None = None
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Set up the pool of `--endpoints`, if any. Raise ConfigError if a tokenizer or plug-in cannot be used."""
        settings = self.settings
        load_plugins()
        if settings.follows_mesh:
            from extproc.pools.mesh import MeshFollower, mesh_policy  # noqa: PLC0415 - a static pool needs none of it

            self.follower = MeshFollower(mesh_policy(settings), self.pools)
            self._observe(self.pools.registry)
            self.server = self._server()
            return
        self.resources.load_tokenizers(settings.model_table.served)
        await self.pools.apply({STATIC: static_config(settings)})
        self._observe(self.pools.all[STATIC].telemetry.registry)
        self.server = self._server()

    def background(self, admin_port: Sequence[socket.socket]) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the background tasks by name; the admin pages listen on the given sockets."""
        tasks = {"pools": self.pools.run(), "memory": self._return_memory(), "tell scalers": self.scaler.run()}
        tasks["admin pages"] = self._show_pages(admin_port)
        if self.resources.records is not None:
            tasks["access log"] = self.resources.records.run()
        if self.follower is not None:
            from extproc.pools.mesh import follow_source  # noqa: PLC0415

            tasks["follow mesh"] = follow_source(self.settings, self.follower, source=self._source)
        return tasks

    def set_ready(self, ready: bool) -> None:
        """Set whether the picker is ready for requests; the admin pages show it."""
        (self._ready.set if ready else self._ready.clear)()
        if self.site is not None:
            self.site.pages.ready = ready

    async def close(self) -> None:
        """Close the connections to Redis and the pods, and the tokenizers' thread."""
        if self.site is not None:
            await self.site.close()
        await self.pools.close()
        await self.resources.close()

    async def _show_pages(self, admin_port: Sequence[socket.socket]) -> None:
        policies = None if self.follower is None else self.follower.explain
        self.site = AdminSite(self.pools, self.resources, policies=policies)
        self.site.pages.ready = self._ready.is_set()
        await self.site.run(admin_port)

    def _observe(self, registry: Registry) -> None:
        resources = self.resources
        targets = resources.records.log.buffers if resources.records is not None else ()
        show_records(registry, targets=targets, traces=resources.tracing)
        show_lookups(registry, resources.reader)
        show_uploads(registry, self.uploads)
        show_waiting_bodies(registry, resources.waiting_bodies)
        show_pod_key(registry, resources.pod_key)

    def _server(self) -> ExtProcServer:
        return ExtProcServer(
            picks=PoolPicks(self.pools, lists_models=self.resources.pod_key is None),
            max_body_bytes=self.settings.max_body_bytes,
            uploads=self.uploads,
            further_headers=self._wanted_headers(),
            claims=self.pools.wanted_claims(),
            further_methods=self.scaler.methods(),
            transport=_transport(self.settings.grpc_server),
        )

    def _tell_scalers(self) -> None:
        # in a separate turn of the event loop: an error of a scaler's stream must not fail the request
        asyncio.get_running_loop().call_soon(self.scaler.tell)

    async def _return_memory(self) -> None:
        """Return the memory of long bodies to the system, once none has arrived for RETURN_SECONDS."""
        uploads, work = self.uploads, self.resources.long_work
        returned = seen = (0, 0)
        while True:
            await asyncio.sleep(RETURN_SECONDS)
            now = (uploads.received_bytes // MUCH_BYTES, work.done)
            if now == seen != returned:
                await asyncio.to_thread(return_free_pages)
                returned = now
            seen = now

    def _wants_change(self) -> None:
        if self.site is not None:
            self.site.pages.reconfigure()
        if self.server is not None:
            self.server.want(further_headers=self._wanted_headers(), claims=self.pools.wanted_claims())

    def _wanted_headers(self) -> frozenset[str]:
        wanted = self.pools.wanted_headers()
        return wanted | {TRACESTATE} if self.resources.tracing is not None else wanted


class PoolPicks:
    """Implements `ext_proc.call.Picks` by delegating to the request's pool."""

    def __init__(self, pools: Pools, *, lists_models: bool = True) -> None:
        """`lists_models`: answer for the pods; not where they show their models for a key only."""
        self._pools = pools
        self._lists_models = lists_models
        self._created = int(time.time())

    def pick(self, facts: RequestFacts, body: bytes | None) -> Coroutine[Any, Any, BookedExchange]:
        """Decide and book when awaited. Raise PickError with the answer for the client."""
        pool = self._pools.of_request(facts)
        path = facts.path.partition("?")[0] if facts.method == "GET" else ""
        if path == "/health" and pool.config.policy.health.answered:
            if not pool.has_pod():
                raise NoReadyEndpointError("no pod may serve a request")
            raise LocalAnswer(b"")
        if self._lists_models and path.endswith(MODELS_PATH):
            document = models_document(pool.models, pool.endpoints.learned_adapters, created=self._created)
            if document is not None:
                raise LocalAnswer(document)
        return _pick_once_asked(facts, body, pool) if pool.is_asking else pick(facts, body, pool.runtime)

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response with the plan that its pick made, here or on another picker."""
        return self._pools.response(plan)


async def _pick_once_asked(facts: RequestFacts, body: bytes | None, pool: Pool) -> BookedExchange:
    """Wait until the pods of a new pool have answered which models they serve, or failed to; then pick."""
    await pool.answers()
    return await pick(facts, body, pool.runtime)


def _transport(server: GrpcServer) -> type[Transport]:
    if server is GrpcServer.OWN:
        return Http2Transport
    from extproc.ext_proc.grpcio_server import GrpcioTransport  # noqa: PLC0415 - takes 0.1 s, and must follow any fork

    return GrpcioTransport


def static_config(settings: PickerSettings) -> PoolConfig:
    """Return the pool of `--endpoints`."""
    return PoolConfig(
        name=STATIC,
        from_flags=True,
        endpoints=tuple(PoolEndpoint(address=address) for address in settings.endpoints),
        policy=settings.policy,
        models=settings.model_table,
        sample_share=settings.policy.observability.sample_share,
        failure_mode=settings.policy_fields.get("failureMode", FAIL_CLOSE),
    )


def load_ahead(settings: PickerSettings) -> None:
    """Preload the modules that a picker would import lazily; for a process that forks pickers."""
    for module in ("uvloop", "extproc.prompts.engines"):
        import_module(module)
    if settings.follows_mesh:
        for module in ("extproc.pools.mesh", "kvmesh.documents.sources"):
            import_module(module)


async def serve(settings: PickerSettings, *, stop: asyncio.Event, source: DocumentSource | None = None) -> None:
    """Run the picker until `stop` is set. Raise ConfigError if a port is taken or a tokenizer cannot be used."""
    if settings.follows_mesh:
        _allow_open_files()
    return_large_blocks(from_bytes=LONG_BODY_BYTES)  # request bodies and the objects made of them
    service = PickerService(settings, source=source)
    await service.start()
    server = service.server
    assert server is not None, "started"
    admin_port = open_admin_port(host=settings.host, port=settings.admin_port, access=settings.admin_access)
    try:
        await server.start(host=settings.host, port=settings.grpc_port, tls=server_tls(settings.grpc_tls))
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(work, name=name) for name, work in service.background(admin_port).items()]
            if await _is_known(service.pools, stop=stop):
                await _take_traffic(service, server, stop=stop)
            for task in background:
                task.cancel()
    except* ConfigError as errors:  # from the background tasks
        raise first_error(errors) from None
    finally:
        await server.stop(grace_seconds=0)
        await service.close()
        for each in admin_port:
            each.close()


def _allow_open_files() -> None:
    """Raise the limit of open files to the maximum: each pod takes two connections, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _spare_the_collector() -> None:
    """Exclude all present objects from garbage collection, which would delay requests by some 50 ms each time.

    Requests create hardly any cyclic garbage, so the collector need not run every 700 objects. Garbage already present
    is kept, too: it is only a thousand objects, and a collection would delay the start by 40 ms.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _is_known(pools: Pools, *, stop: asyncio.Event) -> bool:
    """Wait until the endpoints are known and checked once, or until `stop` is set; return whether they are known."""
    async with asyncio.TaskGroup() as tasks:
        known = tasks.create_task(_known(pools), name="wait for endpoints")
        stopped = tasks.create_task(stop.wait(), name="wait for the end")
        await asyncio.wait((known, stopped), return_when=asyncio.FIRST_COMPLETED)
        is_known = known.done()
        known.cancel()
        stopped.cancel()
    return is_known


async def _known(pools: Pools) -> None:
    await pools.known()
    await pools.first_looks()


async def _take_traffic(service: PickerService, server: ExtProcServer, *, stop: asyncio.Event) -> None:
    _spare_the_collector()
    await server.set_serving(True)
    service.set_ready(True)
    endpoints = sum(len(pool.config.endpoints) for pool in service.pools.all.values())
    log.info("ready", extra={"grpc_port": service.settings.grpc_port, "endpoints": endpoints})
    await stop.wait()
    log.info("stopping", extra={"open_streams": server.open_streams})
    service.set_ready(False)
    await server.set_serving(False)
    # Envoys keep sending until they notice; refusing an exchange now would give its client a 503
    await asyncio.sleep(service.settings.drain_seconds)
    service.pools.end_waiting()  # waiting requests are refused, and another picker can take them
    server.release_answered()
    await server.stop(grace_seconds=GRACE_SECONDS)
