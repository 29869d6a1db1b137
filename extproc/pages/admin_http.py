"""The admin HTTP server: health, metrics, the state and explanations, behind the gate of both roles. Read-only.

The files of the page for browsers come from `page_files`; the live feed is handed in by whoever makes this server.
All but health, metrics and static files need a token or a certificate: `kvmesh.admin.admin_gate`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from aiohttp import web

from extproc.errors import ConfigError, KvmeshError
from extproc.ext_proc.answers import OBJECTIVE_HEADER
from extproc.ext_proc.exchange import RequestFacts
from extproc.pages.page_files import PageFiles
from kvmesh.admin.admin_access import AdminAccess
from kvmesh.admin.admin_gate import BY_TOKEN, AdminGate, refusal_json, server_options
from kvmesh.errors import SettingError
from kvmesh.metrics.registry import CONTENT_TYPE

# for answers under way; aiohttp waits a minute by default, and for ever when told 0
SHUTDOWN_SECONDS = 1.0
OF_THE_BODY = ("content-type", "content-encoding", "content-length", "transfer-encoding")


class AdminPages(Protocol):
    """What the pages show."""

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """Return whether traffic may come, and why not."""

    async def metrics(self) -> bytes:
        """Return Prometheus text."""

    async def state(self, *, pool: str | None = None) -> dict[str, Any]:
        """Return endpoints, index and recent decisions; `pool`: of one of several. Raise PickError: unknown pool."""

    def decisions(self, *, limit: int, request_id: str | None, pool: str | None = None) -> list[dict[str, Any]]:
        """Return the last decisions with all that they rest on, newest first. Raise PickError: unknown pool."""

    async def explain(self, facts: RequestFacts, body: bytes, *, pool: str | None = None) -> dict[str, Any]:
        """Decide without booking, and return what the decision rests on."""

    def pools(self) -> list[dict[str, Any]]:
        """Return a line for each pool."""

    async def policies(self, target: str | None) -> dict[str, Any]:
        """Return who says what for a target (None: for all pools). Raise KvmeshError where there is no such thing."""


class LivePages(Protocol):
    """Pages that stay open and tell what happens."""

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """Return them."""

    async def shutdown(self, app: web.Application, /) -> None:
        """End all that are open."""


class AdminServer:
    """Serves the pages on one port."""

    def __init__(
        self,
        pages: AdminPages,
        *,
        max_body_bytes: int,
        access: AdminAccess | None = None,
        live: LivePages | None = None,
    ) -> None:
        """Take who may see the pages (None: who is on this machine, where they listen there alone)."""
        self._pages = pages
        self._access = access or AdminAccess()
        self._max_body_bytes = max_body_bytes
        self._live = live
        self._runner: web.AppRunner | None = None

    def _application(self, gate: AdminGate) -> web.Application:
        app = web.Application(client_max_size=self._max_body_bytes)
        gate.guard(app)
        app.add_routes(
            [
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/state", self._state),
                web.get("/pools", self._pools),
                web.get("/policies", self._policies),
                web.get("/v1/decisions", self._decisions),
                web.post("/v1/explain", self._explain),
                web.post("/explain", self._explain),  # as it was called first
                *PageFiles().routes(),
                *(self._live.routes() if self._live is not None else ()),
            ]
        )
        if self._live is not None:
            app.on_shutdown.append(self._live.shutdown)
        return app

    async def start(self, *, host: str, port: int) -> None:
        """Listen; raise ConfigError naming the port when it is taken, or the certificate that cannot be used."""
        try:
            gate = AdminGate(self._access, host=host)
        except SettingError as error:
            raise ConfigError(str(error)) from error
        app = self._application(gate)
        self._runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_SECONDS, **server_options())
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=gate.ssl_context).start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port} (--admin-port): {error.strerror}") from error
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

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._pages.metrics(), headers={"content-type": CONTENT_TYPE})

    async def _state(self, request: web.Request) -> web.Response:
        """`?pool=` of one of several pools."""
        try:
            return _json(await self._pages.state(pool=request.query.get("pool")))
        except KvmeshError as error:
            return _json({"error": str(error)}, status=404)

    async def _pools(self, _: web.Request) -> web.Response:
        return _json(self._pages.pools())

    async def _policies(self, request: web.Request) -> web.Response:
        """`?target=` a pool, route, gateway or policy; by default all."""
        try:
            return _json(await self._pages.policies(request.query.get("target")))
        except KvmeshError as error:
            return _json({"error": str(error)}, status=404)

    async def _decisions(self, request: web.Request) -> web.Response:
        """`?limit=` so many, by default 10; `?request_id=` only this request's; `?pool=` only this pool's."""
        limit = request.query.get("limit", "10")
        if not (limit.isascii() and limit.isdigit()) or len(limit) > 6:
            return _json({"error": f"limit must be a number of decisions, not {limit[:20]!r}"}, status=400)
        wanted = {"request_id": request.query.get("request_id"), "pool": request.query.get("pool")}
        try:
            return _json(self._pages.decisions(limit=int(limit), **wanted))
        except KvmeshError as error:
            return _json({"error": str(error)}, status=404)

    async def _explain(self, request: web.Request) -> web.Response:
        """Take the request body as a client would send it; `?path=` is its path, by default the chat one.

        `?pool=` names the pool; by default the one of `?host=`, or of the header `host`.

        The headers count as the client's, but for those of the body, which is read as JSON here, and for a token by
        which the gate let it in.
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


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")
