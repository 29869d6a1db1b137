"""The live feed over HTTP: `GET /v1/live` as server-sent events, `GET /v1/prefixes` as JSON. Shows; changes nothing.

`admin_http` puts its gate before these routes. Streams are read with fetch(), so that a token can be sent.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import msgspec
from aiohttp import web

from extproc.errors import KvmeshError, PickError

KEEP_ALIVE_SECONDS = 10.0
LOOK_SECONDS = 1.0  # between looks whether who watches is still there
UNHEARD_SECONDS = 20.0  # until one whose machine answers nothing is let go
WRITE_SECONDS = 10.0  # until one who reads nothing is let go
RETRY_AFTER_SECONDS = 5
MOST_NODES = 500
USUAL_NODES = 100
HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would hold events back
}


class Events(Protocol):
    """What is to be written to one connection."""

    async def next(self, *, within_seconds: float) -> bytes:
        """Return what waits, or b"" when nothing has come in that time."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more comes."""


class Feed(Protocol):
    """Where events come from: `extproc.pages.live_feed`."""

    def watcher(self, pool: str | None) -> AbstractAsyncContextManager[Events]:
        """Watch a pool. Raise PickError for one that is not known, KvmeshError where too many watch."""

    async def prefixes(self, pool: str | None, *, limit: int) -> dict[str, Any]:
        """Return the prefixes that are asked for most. Raise PickError, KvmeshError."""

    def end_all(self) -> None:
        """End all streams with a word."""


class LivePages:
    """Implements `admin_http.LivePages`."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Return the routes."""
        return (web.get("/v1/live", self._live), web.get("/v1/prefixes", self._prefixes))

    async def shutdown(self, _: web.Application, /) -> None:
        """End all streams with a word."""
        self._feed.end_all()

    async def _live(self, request: web.Request) -> web.StreamResponse:
        """`?pool=` of one of several pools."""
        try:
            async with self._feed.watcher(request.query.get("pool")) as events:
                return await _write(request, events)
        except PickError as error:
            return _problem(error, status=404)
        except KvmeshError as error:
            return _problem(error, status=503)

    async def _prefixes(self, request: web.Request) -> web.Response:
        """`?limit=` so many nodes, at most 500; `?pool=` of one of several pools."""
        limit = request.query.get("limit", str(USUAL_NODES))
        if not (limit.isascii() and limit.isdigit()) or not 1 <= int(limit[:9]) <= MOST_NODES or len(limit) > 9:
            text = f"limit must be a number of nodes from 1 to {MOST_NODES}, not {limit[:20]!r}"
            return _json({"error": text}, status=400)
        try:
            return _json(await self._feed.prefixes(request.query.get("pool"), limit=int(limit)))
        except PickError as error:
            return _problem(error, status=404)
        except KvmeshError as error:
            return _problem(error, status=400)


async def _write(request: web.Request, events: Events) -> web.StreamResponse:
    response = web.StreamResponse(headers=HEADERS)
    _end_where_nobody_hears(request)
    quiet_seconds = 0.0
    try:
        await response.prepare(request)
        while not events.is_over:
            content = await events.next(within_seconds=LOOK_SECONDS)
            if request.transport is None or request.transport.is_closing():
                return response  # who watched has gone: another may come
            quiet_seconds = 0.0 if content else quiet_seconds + LOOK_SECONDS
            if not content and quiet_seconds < KEEP_ALIVE_SECONDS:
                continue
            quiet_seconds = 0.0
            async with asyncio.timeout(WRITE_SECONDS):
                await response.write(content or b": keep-alive\n\n")
        await response.write_eof()
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    except ConnectionError:  # who watched has gone
        pass
    return response


def _end_where_nobody_hears(request: web.Request) -> None:
    """Have the kernel give up a peer that confirms nothing: it would keep minutes of events, and the place, for it."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_SECONDS * 1000))


def _problem(error: KvmeshError, *, status: int) -> web.Response:
    headers = {"retry-after": str(RETRY_AFTER_SECONDS)} if status == 503 else None
    return _json({"error": str(error)}, status=status, headers=headers)


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers={"cache-control": "no-store", **(headers or {})},
    )
