"""The HTTPS port of the external-metrics API.

It listens once its certificate is there and it is known who may ask. Where either changes, it begins anew, so that no
connection is left that was judged by what was before; files that cannot be used leave it as it is.
"""

import asyncio
import logging
import ssl
from collections import Counter
from datetime import UTC, datetime
from http import HTTPStatus

import msgspec
from aiohttp import web

from extproc.external_metrics.answers import Answer, AnsweredPools, answer
from extproc.external_metrics.api_objects import status
from extproc.external_metrics.front_proxy import FrontProxy
from extproc.external_metrics.front_proxy_watch import FrontProxyWatch
from extproc.external_metrics.settings import ExternalMetricsSettings
from kvmesh.admin.admin_credentials import load_own
from kvmesh.admin.admin_gate import server_options
from kvmesh.errors import SettingError
from kvmesh.secret_file import stamp_of

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0  # between two looks at the files and at who may ask
SHUTDOWN_SECONDS = 1.0
LONGEST_BODY = 1_024  # bytes; there is nothing to send
FLAGS = ("--external-metrics-cert", "--external-metrics-key")


class ExternalMetricsServer:
    """Serves the API until cancelled; whatever happens here, the picker goes on."""

    def __init__(
        self,
        settings: ExternalMetricsSettings,
        pools: AnsweredPools,
        *,
        host: str,
        watch: FrontProxyWatch | None = None,
    ) -> None:
        self._settings = settings
        self._pools = pools
        self._host = host
        self._watch = watch or FrontProxyWatch()
        self._served: tuple[object, ...] = ()  # what the port that listens was opened with
        self._runner: web.AppRunner | None = None
        self.problem = ""  # why it is not served, or not as the files say
        self.answers: Counter[int] = Counter()  # by HTTP status

    @property
    def is_listening(self) -> bool:
        """Whether the API server can reach it."""
        return self._runner is not None

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch.run(), name="who may ask for external metrics")
            try:
                while True:
                    await self.look()
                    await asyncio.sleep(LOOK_SECONDS)
            finally:
                await self._close()

    async def look(self) -> None:
        """Open the port, or open it anew, where there is reason to."""
        proxy, settings = self._watch.current, self._settings
        if proxy is None:
            return  # the watch says why
        stamps = tuple(stamp_of(path) for path in (settings.cert, settings.key) if path is not None)
        wanted = (stamps, proxy.authorities)
        if wanted == self._served:
            self.problem = ""
            return
        try:
            context = _context(settings, proxy)
            await self._close()
            await self._open(context)
        except (SettingError, OSError) as error:  # an SSLError is an OSError
            self._say(str(error))
            return
        self._served, self.problem = wanted, ""
        log.info("external metrics are served", extra={"port": settings.port})

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            what = "served with the certificates from before" if self.is_listening else "not served"
            log.error("external metrics are %s: %s", what, problem)
        self.problem = problem

    async def _open(self, context: ssl.SSLContext) -> None:
        app = web.Application(client_max_size=LONGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_SECONDS, **server_options())
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._settings.port, ssl_context=context).start()
        except OSError as error:
            await runner.cleanup()
            message = f"cannot listen on {self._host}:{self._settings.port} (--external-metrics-port): {error.strerror}"
            raise OSError(message) from error
        self._runner = runner

    async def _close(self) -> None:
        runner, self._runner, self._served = self._runner, None, ()
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.Response:
        try:
            answered = self._answer(request)
        except Exception:  # a defect
            log.exception("an external metric could not be answered")
            answered = _refused(HTTPStatus.INTERNAL_SERVER_ERROR, "the picker's log says what has failed")
        self.answers[answered.code] += 1
        body = msgspec.json.encode(answered.body)
        return web.Response(body=body, status=answered.code, content_type="application/json")

    def _answer(self, request: web.Request) -> Answer:
        proxy = self._watch.current
        refusal = (
            proxy.refusal(request.get_extra_info("peercert"), request.headers)
            if proxy is not None
            else (HTTPStatus.UNAUTHORIZED, "it is not known who may ask")
        )
        if refusal is not None:
            return _refused(*refusal)
        if request.method != "GET":
            return _refused(HTTPStatus.METHOD_NOT_ALLOWED, f"{request.method} is not allowed: metrics are read")
        timestamp = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return answer(request.path, request.query.get("labelSelector", ""), self._pools, timestamp=timestamp)


def _refused(code: int, message: str) -> Answer:
    return Answer(code=code, body=status(code, message))


def _context(settings: ExternalMetricsSettings, proxy: FrontProxy) -> ssl.SSLContext:
    """Return what connections are accepted with. Raise SettingError.

    A client certificate of another authority ends the connection; a client without one is told so.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0  # a session that is resumed would bring a certificate that is no longer let in
    load_own(context, settings.cert, settings.key, flags=FLAGS)
    try:
        context.load_verify_locations(cadata=proxy.authorities)
    except (ssl.SSLError, ValueError) as error:
        raise SettingError(f"the authorities of the API server's client certificates cannot be read: {error}") from None
    context.verify_mode = ssl.CERT_OPTIONAL
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the authority may be one that another one has signed
    return context
