"""The admin HTTP server: health, metrics, state, explanations, the live feed and the page for browsers. Read-only.

All except health, metrics and the page's files require a token or a certificate: `kvmesh.admin.admin_gate`. Browsers
read the live feed with fetch(), because it can send a token.

`AdminSite` wires up a running picker's site: the pages, the live feed and the checks at start-up.
"""

import asyncio
import hashlib
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from importlib.resources import files
from typing import Any

from aiohttp import web

from extproc.errors import ConfigError, KvmeshError, PickError
from extproc.ext_proc.answers import OBJECTIVE_HEADER
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.admin_pages import BadQueryError, ExplainPolicies, PickerPages
from extproc.pages.admin_port import listen
from extproc.pages.live_feed import MOST_PREFIXES, SHOWN_PREFIXES, LiveFeed
from extproc.pages.live_watchers import Watcher, as_json
from extproc.pools.pools import Pools
from extproc.pools.shared_resources import SharedResources
from extproc.settings.shown_settings import shown_settings
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_gate import BY_TOKEN, AdminGate, refusal_json, server_options
from kvmesh.errors import SettingError
from kvmesh.index.index_view import IndexView
from kvmesh.metrics.exposition import form_for

# for answers under way; aiohttp's default is a minute, and 0 waits forever
SHUTDOWN_SECONDS = 1.0
OF_THE_BODY = ("content-type", "content-encoding", "content-length", "transfer-encoding")
SHOWN_DECISIONS = 10
KEEP_ALIVE_SECONDS = 10.0
LOOK_SECONDS = 1.0  # interval to check whether a connection is still open
UNHEARD_SECONDS = 20.0  # until a connection without TCP acknowledgements is closed
WRITE_SECONDS = 10.0  # until the connection of a stalled reader is closed
RETRY_AFTER_SECONDS = 5
FEED_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would buffer events
}

CONTENT_TYPES: Mapping[str, str] = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}
# only our own files, no frames, no forms, and no conversion of strings to markup or code
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
MOST_PLANNED_SECONDS = 7 * 86_400.0
PAGE_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    # cached, but revalidated every time: scripts of another version must not be used
    "Cache-Control": "no-cache",
}


class AdminSite:
    """The site of one picker."""

    def __init__(self, pools: Pools, resources: SharedResources, *, policies: ExplainPolicies | None) -> None:
        """`policies` explains which policies apply to a target, or is None with `--endpoints`."""
        settings = resources.settings
        view = IndexView(url=settings.redis_url)
        self.pages = PickerPages(pools, view=view, policies=policies, pod_key=resources.pod_key, name=resources.name)
        self._live = LiveFeed(self.pages, watch=resources.watch)
        self.pages.settings = shown_settings(settings)
        resources.watch.on_picked = self._live.picked
        self._settings = settings
        self._checks = policies is None
        self._server = AdminServer(
            self.pages, max_body_bytes=settings.max_body_bytes, access=settings.admin_access, feed=self._live
        )

    async def run(self, listening: Sequence[socket.socket]) -> None:
        """Serve on these sockets, and check once for misconfiguration that causes no failure."""
        await self._server.serve(listening, host=self._settings.host)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._live.run(), name="live feed")
            if self._checks:
                tasks.create_task(self._check_once(), name="check once")

    async def close(self) -> None:
        """End open answers, close the port and the connections to Redis."""
        self._live.end_all()
        await self._server.stop()
        await self.pages.close()

    async def _check_once(self) -> None:
        (checks,) = entry_points(group="kvmesh.startup_checks")  # the doctor's, a layer above
        self.pages.findings = await checks.load()(self._settings)


class AdminServer:
    """Serves the pages on one port."""

    def __init__(
        self,
        pages: PickerPages,
        *,
        max_body_bytes: int,
        access: AdminAccess | None = None,
        feed: LiveFeed | None = None,
    ) -> None:
        """`access`: who may see the pages. None allows local users, if the server listens only on this machine."""
        self._pages = pages
        self._access = access or AdminAccess()
        self._max_body_bytes = max_body_bytes
        self._feed = feed
        self._runner: web.AppRunner | None = None

    def _application(self, gate: AdminGate) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes)
        gate.guard(app)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/state", _answering(self._state)),
                web.get("/pools", _answering(self._pools)),
                web.get("/policies", _answering(self._policies)),
                web.get("/v1/settings", _answering(self._settings)),
                web.get("/v1/plan", _answering(self._plan)),
                web.get("/v1/decisions", _answering(self._decisions)),
                web.get("/v1/history", _answering(self._history)),
                web.post("/v1/explain", self._explain),
                *PageFiles().routes(),
            ]
        )
        if self._feed is not None:
            app.add_routes([web.get("/v1/live", self._live), web.get("/v1/prefixes", _answering(self._prefixes))])
            app.on_shutdown.append(self._end_feed)
        return app

    async def start(self, *, host: str, port: int) -> None:
        """Listen and serve; raise ConfigError naming a taken port or an unusable certificate."""
        await self.serve(listen(host=host, port=port), host=host)

    async def serve(self, listening: Sequence[socket.socket], *, host: str) -> None:
        """Serve on these sockets of `host`; raise ConfigError naming an unusable certificate."""
        try:
            gate = AdminGate(self._access, host=host)
        except SettingError as error:
            raise ConfigError(str(error)) from error
        app = self._application(gate)
        self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_SECONDS, **server_options())
        await self._runner.setup()
        for each in listening:
            await web.SockSite(self._runner, each, ssl_context=gate.ssl_context).start()
        gate.warn_if_closed()

    async def stop(self) -> None:
        """Close the port and end the open answers."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _readyz(self, _: web.Request) -> web.Response:
        ready, facts = self._pages.readiness()
        return _json({"ready": ready} | facts, status=200 if ready else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        form = form_for(request.headers.get("accept", ""))
        return web.Response(body=await self._pages.metrics(form), headers={"content-type": form.value})

    async def _state(self, request: web.Request) -> Any:
        return await self._pages.state(pool=request.query.get("pool"))

    async def _pools(self, _: web.Request) -> Any:
        return self._pages.pools()

    async def _policies(self, request: web.Request) -> Any:
        """`?target=` is a pool, route, gateway or policy; by default all."""
        return await self._pages.policies(request.query.get("target"))

    async def _settings(self, _: web.Request) -> Any:
        """The settings that `kvmesh doctor` needs."""
        if self._pages.settings is None:
            raise KvmeshError("this picker does not show its settings")
        return self._pages.settings

    async def _plan(self, request: web.Request) -> Any:
        """`?seconds=` is the look-ahead, by default 0; `?pool=` selects one pool."""
        given = request.query.get("seconds", "0")
        try:
            seconds = float(given)
        except ValueError:
            seconds = -1.0
        if not 0.0 <= seconds <= MOST_PLANNED_SECONDS:
            raise BadQueryError(f"seconds must be a number from 0 to {MOST_PLANNED_SECONDS:g}, not {given[:20]!r}")
        return self._pages.plans(seconds=seconds, pool=request.query.get("pool"))

    async def _decisions(self, request: web.Request) -> Any:
        limit = request.query.get("limit", str(SHOWN_DECISIONS))
        if not (limit.isascii() and limit.isdigit()) or len(limit) > 6:
            raise BadQueryError(f"limit must be a number of decisions, not {limit[:20]!r}")
        return self._pages.decisions(
            limit=int(limit),
            request_id=request.query.get("request_id"),
            decision_id=request.query.get("decision_id"),
            pool=request.query.get("pool"),
        )

    async def _prefixes(self, request: web.Request) -> Any:
        limit = request.query.get("limit", str(SHOWN_PREFIXES))
        if not (limit.isascii() and limit.isdigit()) or len(limit) > 9 or not 1 <= int(limit) <= MOST_PREFIXES:
            raise BadQueryError(f"limit must be a number of nodes from 1 to {MOST_PREFIXES}, not {limit[:20]!r}")
        assert self._feed is not None, "of its route"
        return await self._feed.prefixes(request.query.get("pool"), limit=int(limit))

    async def _history(self, request: web.Request) -> Any:
        return await self._pages.history(request.query.get("pool"))

    async def _explain(self, request: web.Request) -> web.Response:
        """Explain the decision for a request body as a client would send it; `?path=` is by default chat completions.

        `?pool=` names the pool; by default the host (`?host=`, or the header `host`) selects it.

        The headers are treated as the client's, except those of the body, which is always plain JSON here, and a token
        that the gate accepted.
        """
        if request.headers.get("content-encoding", "identity").lower() != "identity":
            return refusal_json(415, "unsupported-media-type", "send the body as plain JSON, without Content-Encoding")
        headers = {name.lower(): value for name, value in request.headers.items()}
        for name in OF_THE_BODY:
            headers.pop(name, None)
        if request.get(BY_TOKEN):
            headers.pop("authorization", None)
        if (host := request.query.get("host")) is not None:
            headers["host"] = host
        facts = RequestFacts(
            method="POST",
            path=request.query.get("path", "/v1/chat/completions"),
            objective=request.headers.get(OBJECTIVE_HEADER),
            request_id="explain",
            headers=headers | {"content-type": "application/json"},
        )
        return _json(await self._pages.explain(facts, await request.read(), pool=request.query.get("pool")))

    # --- the live feed --------------------------------------------------------------------------------------------

    async def _live(self, request: web.Request) -> web.StreamResponse:
        assert self._feed is not None, "of its route"
        try:
            async with self._feed.watcher(request.query.get("pool")) as watcher:
                return await _write(request, watcher)
        except KvmeshError as error:
            if isinstance(error, PickError):
                return _json({"error": str(error)}, status=404)
            return _json({"error": str(error)}, status=503, headers={"retry-after": str(RETRY_AFTER_SECONDS)})

    async def _end_feed(self, _: web.Application, /) -> None:
        if self._feed is not None:
            self._feed.end_all()


class PageFiles:
    """Serves only the files of `extproc/pages/page`, from memory: a request never reads the file system."""

    def __init__(self) -> None:
        folder = files("extproc.pages") / "page"
        self._files = {
            item.name: (item.read_bytes(), CONTENT_TYPES[item.name.rpartition(".")[2]])
            for item in folder.iterdir()
            if item.name.rpartition(".")[2] in CONTENT_TYPES
        }
        self._etags = {name: hashlib.sha256(content).hexdigest()[:32] for name, (content, _) in self._files.items()}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes; none requires a token."""
        return [web.get("/", self._index), web.get("/page/{name}", self._file)]

    async def _index(self, request: web.Request) -> web.Response:
        return self._answer(request, "index.html")

    async def _file(self, request: web.Request) -> web.Response:
        return self._answer(request, request.match_info["name"])

    def _answer(self, request: web.Request, name: str) -> web.Response:
        if name not in self._files:
            return web.Response(status=404, text="no such file\n", headers=PAGE_HEADERS)
        etag = self._etags[name]
        if any(known.value in (etag, "*") for known in request.if_none_match or ()):
            response = web.Response(status=304, headers=PAGE_HEADERS)
        else:
            content, content_type = self._files[name]
            response = web.Response(body=content, content_type=content_type, charset="utf-8", headers=PAGE_HEADERS)
        response.etag = etag
        return response


async def _write(request: web.Request, watcher: Watcher) -> web.StreamResponse:
    response = web.StreamResponse(headers=FEED_HEADERS)
    _end_where_nothing_is_heard(request)
    quiet_seconds = 0.0
    try:
        await response.prepare(request)
        while not watcher.is_over:
            content = await watcher.next(within_seconds=LOOK_SECONDS)
            if request.transport is None or request.transport.is_closing():
                return response  # the client has gone; free its place
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
    except ConnectionError:  # the client has gone
        pass
    return response


def _end_where_nothing_is_heard(request: web.Request) -> None:
    """Let the kernel drop a peer that acknowledges nothing: it would hold its place and minutes of events."""
    connection = request.transport.get_extra_info("socket") if request.transport is not None else None
    if connection is not None and hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_SECONDS * 1000))


def _answering(page: Callable[[web.Request], Awaitable[Any]]) -> Callable[[web.Request], Awaitable[web.Response]]:

    async def answer(request: web.Request) -> web.Response:
        try:
            return _json(await page(request))
        except KvmeshError as error:
            return _json({"error": str(error)}, status=400 if isinstance(error, BadQueryError) else 404)

    return answer


def _json(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=as_json(value), status=status, content_type="application/json", headers=headers)
