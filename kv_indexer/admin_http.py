"""The indexer's admin pages: /healthz, /readyz, /metrics, /sources, and /pools where it follows pools."""

import errno
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kv_indexer.pools.pool_report import PoolsReport
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_gate import AdminGate, server_options
from kvmesh.blocks.source import IndexStatus
from kvmesh.errors import IndexUnavailableError, ListenError
from kvmesh.metrics.exposition import Form, form_for
from kvmesh.plain_text import plain_json


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPages:
    """The data behind the pages, and their handlers."""

    not_ready: Callable[[], Mapping[str, str]]  # part that is not ready -> why
    status: Callable[[], Awaitable[IndexStatus]]
    metrics: Callable[[Form], Awaitable[bytes]]
    pools: Callable[[], PoolsReport] | None = None  # None if no pools are followed

    def routes(self) -> list[web.RouteDef]:
        """Return the routes of all pages."""
        routes = [
            *(web.get("/healthz", self._healthz), web.get("/readyz", self._readyz)),
            *(web.get("/metrics", self._metrics), web.get("/sources", self._sources)),
        ]
        return routes if self.pools is None else [*routes, web.get("/pools", self._pools)]

    async def _healthz(self, _: web.Request) -> web.StreamResponse:
        return _json({"status": "ok"})

    async def _readyz(self, _: web.Request) -> web.StreamResponse:
        missing = self.not_ready()
        return _json({"ready": not missing, "not_ready": missing}, status=503 if missing else 200)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        form = form_for(request.headers.get("accept", ""))
        return web.Response(body=await self.metrics(form), headers={"Content-Type": form.value})

    async def _sources(self, _: web.Request) -> web.StreamResponse:
        try:
            return _json(await self.status())
        except IndexUnavailableError as error:
            return _json({"error": str(error), "reason": error.reason}, status=503)

    async def _pools(self, _: web.Request) -> web.StreamResponse:
        assert self.pools is not None
        return _json(self.pools())


@asynccontextmanager
async def serve_admin(
    pages: AdminPages, *, host: str, port: int, access: AdminAccess | None = None
) -> AsyncIterator[int]:
    """Serve the pages while the context lasts; yield the port, because `port` may be 0.

    Raise ListenError, or SettingError if the certificates that `access` names cannot be used.
    """
    gate = AdminGate(access or AdminAccess(), host=host)
    app = web.Application()
    gate.guard(app)
    app.add_routes(pages.routes())
    runner = web.AppRunner(app, shutdown_timeout=0.2, **server_options())
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=gate.ssl_context).start()
        except (OSError, ValueError) as error:  # ValueError if the host is not a valid host name
            raise ListenError(_listen_fault(error, host=host, port=port)) from error
        gate.warn_if_closed()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _listen_fault(error: Exception, *, host: str, port: int) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use (choose another with --indexer-admin-port)"
    return f"cannot listen on {host!r}, port {port}: {getattr(error, 'strerror', None) or error}"


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=plain_json(msgspec.json.encode(value)), status=status, content_type="application/json")
