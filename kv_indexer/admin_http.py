"""The indexer's admin pages: /healthz, /readyz, /metrics, /sources, and /pools where it follows pools.

Opened by the service; changes nothing.
"""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPages:
    """Where the pages get their content."""

    not_ready: Callable[[], Mapping[str, str]]  # what is not ready -> why
    status: Callable[[], Awaitable[IndexStatus]]
    metrics: Callable[[], Awaitable[bytes]]
    pools: Callable[[], PoolsReport] | None = None  # None: no such page


@asynccontextmanager
async def serve_admin(
    pages: AdminPages, *, host: str, port: int, access: AdminAccess | None = None
) -> AsyncIterator[int]:
    """Serve the pages while the context lasts; give the port (for when 0 was asked).

    Raise ListenError, and SettingError where `access` names certificates that cannot be used.
    """
    gate = AdminGate(access or AdminAccess(), host=host)
    app = web.Application()
    gate.guard(app)
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz(pages)),
            web.get("/metrics", _metrics(pages)),
            web.get("/sources", _sources(pages)),
        ]
    )
    if pages.pools is not None:
        app.add_routes([web.get("/pools", _pools(pages.pools))])
    runner = web.AppRunner(app, shutdown_timeout=0.2, **server_options())
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, ssl_context=gate.ssl_context).start()
        except (OSError, ValueError) as error:  # the latter: a host that is no host name
            raise ListenError(_why_not(error, host=host, port=port)) from error
        gate.warn_if_closed()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def _why_not(error: Exception, *, host: str, port: int) -> str:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is already in use (choose another with --indexer-admin-port)"
    return f"cannot listen on {host!r}, port {port}: {getattr(error, 'strerror', None) or error}"


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def _healthz(_: web.Request) -> web.StreamResponse:
    return _json({"status": "ok"})


def _readyz(pages: AdminPages) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        missing = pages.not_ready()
        return _json({"ready": not missing, "not_ready": missing}, status=503 if missing else 200)

    return handle


def _metrics(pages: AdminPages) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return web.Response(body=await pages.metrics(), headers={"Content-Type": "text/plain; version=0.0.4"})

    return handle


def _sources(pages: AdminPages) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        try:
            return _json(await pages.status())
        except IndexUnavailableError as error:
            return _json({"error": str(error), "reason": error.reason}, status=503)

    return handle


def _pools(report: Callable[[], PoolsReport]) -> Handler:
    async def handle(_: web.Request) -> web.StreamResponse:
        return _json(report())

    return handle


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
