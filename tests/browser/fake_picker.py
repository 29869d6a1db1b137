"""A picker's admin server that says what a test tells it to: the real page files, and a feed that is made up."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from extproc.pages.admin_http import PageFiles


class FakePicker:
    """`snapshot` is sent to whoever connects, then what `push` is given."""

    def __init__(self, snapshot: Any) -> None:
        self.snapshot = snapshot
        self.token: str | None = None
        self.status: int = 200  # of the feed
        self.explanation: Any = {"endpoint": None, "status": 503, "reason": "no-ready-endpoint", "message": "no pods"}
        self.decisions: list[Any] = []
        self.decisions_asked: list[dict[str, str]] = []
        self.asked: list[Any] = []  # what POST /v1/explain was asked
        self.pools_asked: list[str | None] = []
        self.url = ""
        self._watchers: set[asyncio.Queue[bytes | None]] = set()

    @property
    def watchers(self) -> int:
        return len(self._watchers)

    def push(self, name: str, data: Any) -> None:
        for watcher in self._watchers:
            watcher.put_nowait(_event(name, data))

    def drop(self) -> None:
        """End every connection without a word."""
        for watcher in self._watchers:
            watcher.put_nowait(None)

    def routes(self) -> list[web.RouteDef]:
        return [
            *PageFiles().routes(),
            web.get("/v1/live", self._live),
            web.get("/v1/decisions", self._decisions),
            web.post("/v1/explain", self._explain),
        ]

    def _allowed(self, request: web.Request) -> bool:
        return self.token is None or request.headers.get("authorization") == f"Bearer {self.token}"

    async def _live(self, request: web.Request) -> web.StreamResponse:
        self.pools_asked.append(request.query.get("pool"))
        if not self._allowed(request):
            return web.json_response({"error": "this page needs the token of --admin-token-file"}, status=401)
        if self.status != 200:
            return web.json_response({"error": "32 watch already"}, status=self.status)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watchers.add(queue)
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        try:
            await response.prepare(request)
            made = self.snapshot(request.query.get("pool")) if callable(self.snapshot) else self.snapshot
            await response.write(_event("snapshot", made))
            while (piece := await queue.get()) is not None:
                await response.write(piece)
        except ConnectionResetError:
            pass  # the page has gone
        finally:
            self._watchers.discard(queue)
        return response

    async def _decisions(self, request: web.Request) -> web.Response:
        self.decisions_asked.append(dict(request.query))
        wanted = request.query.get("decision_id")
        return web.json_response([each for each in self.decisions if wanted in (None, each["id"])])

    async def _explain(self, request: web.Request) -> web.Response:
        objective = request.headers.get("x-gateway-inference-objective")
        self.asked.append({"path": request.query.get("path"), "objective": objective, "body": await request.json()})
        return web.json_response(self.explanation)


def _event(name: str, data: Any) -> bytes:
    return f"id: {time.monotonic_ns()}\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode()


@asynccontextmanager
async def running(picker: FakePicker) -> AsyncIterator[FakePicker]:
    """Serve it on a free port."""
    app = web.Application()
    app.add_routes(picker.routes())
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        picker.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield picker
    finally:
        picker.drop()
        await runner.cleanup()
