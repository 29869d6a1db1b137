"""The indexer's admin pages: /healthz, /readyz, /metrics, /sources. Opened by the service; changes nothing."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from aiohttp import web

from kv_indexer.core.source import SourceStatus
from kv_indexer.errors import IndexUnavailableError


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminPages:
    """Where the pages get their content."""

    not_ready: Callable[[], Mapping[str, str]]  # what is not ready -> why
    sources: Callable[[], Awaitable[list[SourceStatus]]]
    metrics: Callable[[], Awaitable[bytes]]


@asynccontextmanager
async def serve_admin(pages: AdminPages, *, host: str, port: int) -> AsyncIterator[int]:
    """Serve the pages while the context lasts; give the port (for when 0 was asked). Raise OSError if it is taken."""
    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", _healthz),
            web.get("/readyz", _readyz(pages)),
            web.get("/metrics", _metrics(pages)),
            web.get("/sources", _sources(pages)),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


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
            return _json({"sources": await pages.sources()})
        except IndexUnavailableError as error:
            return _json({"error": str(error), "reason": error.reason}, status=503)

    return handle


def _json(value: object, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
