"""The gate to the admin pages of both roles: checks access, refuses in JSON, sets headers that protect browsers.

`admin.admin_access` has the rules. The matched route decides whether a page is open, never the path's text, so that no
spelling of a path opens another page.
"""

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from kvmesh.admin.admin_access import (
    CERTIFICATE_MISSING,
    TOKEN_MISSING,
    TOKEN_WRONG,
    TOKENS_UNUSABLE,
    WHAT_TO_DO,
    AdminAccess,
    FailedTokens,
    PageRequest,
    Refusal,
    is_loopback,
    needs_token,
    refusal,
)
from kvmesh.admin.admin_credentials import TokenFile, admin_tls, token_digest

log = logging.getLogger(__name__)

PROBES = frozenset({"/healthz", "/readyz"})
OPEN = PROBES | {"/metrics", "/"}
OPEN_FOLDERS = ("/page",)  # static files: they reveal nothing about this mesh
LOG_SECONDS = 1.0  # between two log lines about wrong tokens
BY_TOKEN = web.RequestKey("kvmesh.by_token", bool)  # its Authorization header was for us
# Unless a page sets its own: pages must not be cached, framed, or read by other sites.
HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ANSWERING = web.RequestKey("kvmesh.answering", bool)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_server_log = logging.getLogger(f"{__name__}.server")


def server_options() -> dict[str, Any]:
    """Return the arguments of every `web.AppRunner` of admin pages.

    Bodies stay compressed: a few hundred kilobytes could unpack to hundreds of megabytes, before the gate or after it
    has refused, and block the process for a second. Invalid HTTP is answered, but not logged: otherwise any client
    could fill the log.
    """
    return {"access_log": None, "auto_decompress": False, "logger": _server_log}


class _NoRequests(logging.Filter):
    """Leaves out invalid HTTP; the client gets an answer."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError))


_server_log.addFilter(_NoRequests())


class AdminGate:
    """The gate of one server, which listens on `host`."""

    def __init__(self, access: AdminAccess, *, host: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Raise SettingError if a certificate cannot be used; a token file may come later."""
        self._access = access
        self._is_loopback = is_loopback(host)
        self._clock = clock
        # for accepting connections; None for plain text
        self.ssl_context = admin_tls(access) if access.tls is not None else None
        self._tokens = TokenFile(access.token_file) if access.token_file is not None else None
        self._failed = FailedTokens()
        self._silent_until = float("-inf")

    def warn_if_closed(self) -> None:
        """Log an error if nothing can open the pages; call it once the server listens."""
        if not self._access.is_set_up and not self._is_loopback:
            log.error("THE ADMIN PAGES ARE CLOSED (health and metrics are open): %s", WHAT_TO_DO)

    def guard(self, app: web.Application) -> None:
        """Put the gate in front of all pages of an application. Call it before any other middleware is added."""

        @web.middleware
        async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
            return await self._pass(request, handler)

        app.middlewares.append(gate)
        app.on_response_prepare.append(_close_doors)

    async def _pass(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        refused = self._refused(request)
        if refused is not None:
            return _refuse(refused)
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400 or request.get(_ANSWERING):
                raise
            return _error(error)
        except Exception:
            if request.get(_ANSWERING):
                raise
            log.exception("an admin page failed", extra={"page": _page(request)})
            return refusal_json(500, "internal-error", "this page has failed; the log says where")

    def _refused(self, request: web.Request) -> Refusal | None:
        page = _page(request)
        if page in PROBES:
            return None
        asked = PageRequest(
            is_open=page in OPEN or page.startswith(tuple(f"{folder}/" for folder in OPEN_FOLDERS)),
            is_read=request.method in {"GET", "HEAD"},
            host=request.headers.get("Host"),
            origin=request.headers.get("Origin"),
            fetch_site=request.headers.get("Sec-Fetch-Site"),
            fetch_mode=request.headers.get("Sec-Fetch-Mode"),
            has_certificate=self._access.client_ca is not None and bool(request.get_extra_info("peercert")),
        )
        refused = refusal(asked, self._access, is_loopback=self._is_loopback)
        if refused is not None:
            return refused
        if needs_token(asked, self._access):
            return self._token_refusal(request)
        if asked.has_certificate and self._tokens is not None and (token := _bearer(request)) is not None:
            self._tokens.refresh()  # a client may send both: the token was for us as well
            request[BY_TOKEN] = self._tokens.lets_in(token_digest(token))
        return None

    def _token_refusal(self, request: web.Request) -> Refusal | None:
        """Check the token, unless its address has sent too many wrong ones."""
        if self._tokens is None:
            return CERTIFICATE_MISSING
        self._tokens.refresh()
        if self._tokens.problem:
            return TOKENS_UNUSABLE
        token = _bearer(request)
        if token is None:
            return TOKEN_MISSING
        address, now = request.remote or "", self._clock()
        wait = self._failed.wait_seconds(address, now=now)
        if wait:
            return Refusal(
                status=429,
                reason="too-many-wrong-tokens",
                message="too many wrong tokens came from this address: wait",
                retry_after_seconds=wait,
            )
        digest = token_digest(token)
        if self._tokens.lets_in(digest):
            request[BY_TOKEN] = True
            return None
        if self._failed.failed(address, digest, now=now) and now >= self._silent_until:
            self._silent_until = now + LOG_SECONDS
            log.warning("a wrong token for the admin pages", extra={"address": address})
        return TOKEN_WRONG


def _page(request: web.Request) -> str:
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else ""


def _bearer(request: web.Request) -> str | None:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def refusal_json(status: int, reason: str, message: str) -> web.Response:
    """Return an error in the form of all admin pages: {"error": message, "reason": label}."""
    body = msgspec.json.encode({"error": message, "reason": reason})
    return web.Response(body=body, status=status, content_type="application/json")


def _refuse(refused: Refusal) -> web.Response:
    answer = refusal_json(refused.status, refused.reason, refused.message)
    if refused.status == 401:
        answer.headers["WWW-Authenticate"] = 'Bearer realm="kvmesh"'
    if refused.retry_after_seconds is not None:
        answer.headers["Retry-After"] = str(refused.retry_after_seconds)
    return answer


def _error(error: web.HTTPException) -> web.Response:
    """Return aiohttp's own answers, such as 404, 405 and 413, in our form."""
    answer = refusal_json(error.status, error.reason.lower().replace(" ", "-"), error.reason)
    if "Allow" in error.headers:
        answer.headers["Allow"] = error.headers["Allow"]
    return answer


async def _close_doors(request: web.Request, response: web.StreamResponse) -> None:
    request[_ANSWERING] = True
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
