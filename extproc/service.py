"""Connects the picker: its pools, the gRPC server and the admin pages; runs them until told to stop."""

import asyncio
import gc
import logging
import resource
import socket
import sys
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from extproc.errors import ConfigError, first_error
from extproc.ext_proc.exchange import RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer
from extproc.ext_proc.grpc_tls import server_context
from extproc.ext_proc.uploads import Uploads
from extproc.pages.admin_port import open_admin_port
from extproc.pick import pick
from extproc.policy.pool_config import FAIL_CLOSE, PoolConfig
from extproc.pools.booked_exchange import BookedExchange, ReadResponse
from extproc.pools.pool import Pool
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.requests.json_body import LONG_BODY_BYTES
from extproc.responses.response_plan import ResponsePlan
from extproc.scaling.external_scaler import ExternalScaler
from extproc.settings.config import PickerSettings
from extproc.telemetry.first_pod_telemetry import show_waiting_bodies
from extproc.telemetry.process_telemetry import (
    show_external_metrics,
    show_lookups,
    show_pod_key,
    show_records,
    show_uploads,
)
from kvmesh.documents.documents import DocumentSource
from kvmesh.documents.pools import PoolEndpoint
from kvmesh.heap import return_free_pages, return_large_blocks
from kvmesh.metrics.registry import Registry

if TYPE_CHECKING:
    from extproc.external_metrics.api_server import ExternalMetricsServer
    from extproc.pages.admin_site import AdminSite
    from extproc.pools.mesh import MeshFollower

log = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # for exchanges that are being picked, or wait for their pod's first byte
TRACESTATE = "tracestate"  # https://www.w3.org/TR/trace-context/
GC_THRESHOLDS = (5_000, 20, 20)
PAGES_SECONDS = 1.0  # after which they are loaded though the picker is not ready: they say what it waits for
FIRST_PICKS_SECONDS = 0.3  # for what has waited for a picker: it need not share the interpreter with loading
LOADING_TURN_SECONDS = 0.0005  # that picks wait for a thread that loads modules; usually it is ten times as long
RETURN_SECONDS = 3.0
MUCH_BYTES = 16 << 20  # of bodies, after which it is worth the while
STATIC = ""  # the pool of --endpoints


class PickerService:
    """One picker process: what the gRPC server and the admin server talk to, and what runs beside them."""

    def __init__(self, settings: PickerSettings, *, source: DocumentSource | None = None) -> None:
        """`source`: where documents come from, in place of what the settings say."""
        self.settings = settings
        self._source = source
        self.resources = SharedResources(settings)
        self.pools = Pools(self.resources, changed=self._wants_change)
        self.uploads = Uploads(most_bytes=settings.max_unfinished_body_bytes)
        self.scaler = ExternalScaler(self.pools)
        self.external_metrics = external_metrics_server(settings, self.pools)
        self.resources.tell_scalers = self._tell_scalers
        self.server: ExtProcServer | None = None
        self.follower: MeshFollower | None = None
        self.site: AdminSite | None = None
        self._ready = asyncio.Event()

    async def start(self) -> None:
        """Set up the pool of `--endpoints`, or none yet. Raise ConfigError where a tokenizer cannot be used."""
        settings = self.settings
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
        """Return what runs beside the requests, by name; the admin pages on these sockets."""
        tasks = {"pools": self.pools.run(), "memory": self._return_memory(), "tell scalers": self.scaler.run()}
        tasks["admin pages"] = self._show_pages(admin_port)
        if self.external_metrics is not None:
            tasks["external metrics"] = self.external_metrics.run()
        if self.resources.records is not None:
            tasks["access log"] = self.resources.records.run()
        if self.follower is not None:
            from extproc.pools.mesh import follow_source  # noqa: PLC0415

            tasks["follow mesh"] = follow_source(self.settings, self.follower, source=self._source)
        return tasks

    def set_ready(self, ready: bool) -> None:
        """Tell whether requests may come, on the pages, too."""
        (self._ready.set if ready else self._ready.clear)()
        if self.site is not None:
            self.site.pages.ready = ready

    async def close(self) -> None:
        """Let go of Redis, of the pods and of the tokenizers' thread."""
        if self.site is not None:
            await self.site.close()
        await self.pools.close()
        await self.resources.close()

    async def _show_pages(self, admin_port: Sequence[socket.socket]) -> None:
        """Serve the admin pages a moment after requests: loading them takes 0.2 s, which no pick waits for."""
        with suppress(TimeoutError):
            async with asyncio.timeout(PAGES_SECONDS):
                await self._ready.wait()
                await asyncio.sleep(FIRST_PICKS_SECONDS)
        site = await asyncio.to_thread(_load_admin_site)
        policies = None if self.follower is None else self.follower.explain
        self.site = site(self.pools, self.resources, policies=policies)
        self.site.pages.ready = self._ready.is_set()
        gc.freeze()  # see `_spare_the_collector`
        await self.site.run(admin_port)

    def _observe(self, registry: Registry) -> None:
        """Have what is used and written of requests counted."""
        resources = self.resources
        targets = resources.records.log.buffers if resources.records is not None else ()
        show_records(registry, targets=targets, traces=resources.tracing)
        show_lookups(registry, resources.reader)
        show_uploads(registry, self.uploads)
        show_waiting_bodies(registry, resources.waiting_bodies)
        show_pod_key(registry, resources.pod_key)
        if self.external_metrics is not None:
            show_external_metrics(registry, self.external_metrics)

    def _server(self) -> ExtProcServer:
        return ExtProcServer(
            picks=PoolPicks(self.pools),
            max_body_bytes=self.settings.max_body_bytes,
            uploads=self.uploads,
            further_headers=self._wanted_headers(),
            claims=self.pools.wanted_claims(),
            further_methods=self.scaler.methods(),
        )

    def _tell_scalers(self) -> None:
        # in a turn of its own: whatever goes wrong with a scaler's stream is not the request's
        asyncio.get_running_loop().call_soon(self.scaler.tell)

    async def _return_memory(self) -> None:
        """Give back to the system what long bodies have used, as soon as none has come for a while."""
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


def _load_admin_site() -> "type[AdminSite]":
    usual = sys.getswitchinterval()
    sys.setswitchinterval(LOADING_TURN_SECONDS)
    try:
        from extproc.pages.admin_site import AdminSite  # noqa: PLC0415 - see `_show_pages`
    finally:
        sys.setswitchinterval(usual)
    return AdminSite


class PoolPicks:
    """Implements `ext_proc.call.Picks`: the pool of each request picks."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def pick(self, facts: RequestFacts, body: bytes | None) -> Coroutine[Any, Any, BookedExchange]:
        """Decide and book, once awaited. Raise PickError with the answer for the client."""
        pool = self._pools.of_request(facts)
        return _pick_once_asked(facts, body, pool) if pool.is_asking else pick(facts, body, pool.runtime)

    def response(self, plan: ResponsePlan) -> ReadResponse:
        """Open a response whose pick, here or on another picker, made this plan."""
        return self._pools.response(plan)


async def _pick_once_asked(facts: RequestFacts, body: bytes | None, pool: Pool) -> BookedExchange:
    """Pick when the pods of a pool of which nothing is known yet have told their models, or do not."""
    await pool.answers()
    return await pick(facts, body, pool.runtime)


def external_metrics_server(settings: PickerSettings, pools: Pools) -> "ExternalMetricsServer | None":
    """Return what serves the external-metrics API; None: it is not wanted."""
    asked = settings.external_metrics
    if asked.port is None:
        return None
    from extproc.external_metrics.api_server import ExternalMetricsServer  # noqa: PLC0415 - hardly any picker serves it

    return ExternalMetricsServer(asked, pools, host=settings.host)


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
    """Load the modules that a picker loads when it comes to need them; for a process that forks pickers."""
    for module in ("uvloop", "extproc.prompts.engines", "extproc.pages.admin_site"):
        import_module(module)
    if settings.follows_mesh:
        for module in ("extproc.pools.mesh", "kvmesh.documents.sources"):
            import_module(module)


async def serve(settings: PickerSettings, *, stop: asyncio.Event, source: DocumentSource | None = None) -> None:
    """Run the picker until `stop` is set. Raise ConfigError where a port is taken or a tokenizer cannot be used."""
    if settings.follows_mesh:
        _allow_open_files()
    return_large_blocks(from_bytes=LONG_BODY_BYTES)  # what clients send, and what is made of it
    service = PickerService(settings, source=source)
    await service.start()
    server = service.server
    assert server is not None, "started"
    admin_port = open_admin_port(host=settings.host, port=settings.admin_port, access=settings.admin_access)
    try:
        await server.start(host=settings.host, port=settings.grpc_port, tls=server_context(settings.grpc_tls))
        async with asyncio.TaskGroup() as tasks:
            background = [tasks.create_task(work, name=name) for name, work in service.background(admin_port).items()]
            if await _is_known(service.pools, stop=stop):
                await _take_traffic(service, server, stop=stop)
            for task in background:
                task.cancel()
    except* ConfigError as errors:  # of what runs beside the requests
        raise first_error(errors) from None
    finally:
        await server.stop(grace_seconds=0)
        await service.close()
        for each in admin_port:
            each.close()


def _allow_open_files() -> None:
    """Take as many open files as may be: two connections to each pod of the mesh, and the usual limit is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _spare_the_collector() -> None:
    """Have the garbage collector pass over all that is there now: it would hold requests up for some 50 ms at a time.

    Hardly any of what a request makes is garbage that only the collector finds, so it need not look every 700 objects.
    What is garbage already is kept, too: that is a thousand objects, and finding them would take the start 40 ms.
    """
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


async def _is_known(pools: Pools, *, stop: asyncio.Event) -> bool:
    """Wait until the endpoints are known and were looked at once, or until `stop` is set; tell which."""
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
    """Be ready until `stop` is set, then let the open exchanges end within the grace."""
    _spare_the_collector()
    await server.set_serving(True)
    service.set_ready(True)
    endpoints = sum(len(pool.config.endpoints) for pool in service.pools.all.values())
    log.info("ready", extra={"grpc_port": service.settings.grpc_port, "endpoints": endpoints})
    await stop.wait()
    log.info("stopping", extra={"open_streams": server.open_streams})
    service.set_ready(False)
    await server.set_serving(False)
    # Envoys go on sending until they have seen that; an exchange that is refused meanwhile is a 503 for its client
    await asyncio.sleep(service.settings.drain_seconds)
    service.pools.end_waiting()  # requests that still wait are sent to another picker
    server.release_answered()
    await server.stop(grace_seconds=GRACE_SECONDS)
