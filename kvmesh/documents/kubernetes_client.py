"""How we reach a Kubernetes API server: configuration, one connection pool, and tasks that lightkube leaves to users.

Only this module and `cluster_config` know lightkube's classes (docs/decisions/0004). Imported only if Kubernetes is
used, because it takes 0.1 s and 20 MB.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx2
from lightkube import ApiError, AsyncClient
from lightkube.config import client_adapter
from lightkube.core.resource import ApiInfo
from lightkube.generic_resource import GenericNamespacedResource, GenericNamespacedStatus, create_api_info

from kvmesh.documents.bounded_stream import bound
from kvmesh.documents.cluster_config import ClusterConfig, read_cluster_config
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError

REQUEST_SECONDS = 15.0  # for any request but a watch
_RENEW_SECONDS = 10.0  # minimum lifetime of a connection pool
_WATCH_PACE_SECONDS = 1.0  # between two watches of the same kind: some proxies end each at once

# called when the API grants the watch of the current task; lightkube reports only its first event
watch_granted: ContextVar[Callable[[], None] | None] = ContextVar("watch_granted", default=None)
TOKEN_SECONDS = 60.0  # bound tokens are renewed in the file long before they expire


class TokenFile:
    """A token in a file that is renewed from outside."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._token = ""
        self._read_at: float | None = None

    def token(self) -> str:
        """Return the token, read within the last minute; while the file is unreadable, the last one that was read."""
        now = self._clock()
        if self._read_at is None or now - self._read_at >= TOKEN_SECONDS:
            self._read_at = now
            try:
                self._token = self._path.read_text(encoding="utf-8").strip() or self._token
            except OSError:
                return self._token  # the kubelet is just replacing it, or it is gone: the API will answer 401
        return self._token

    def refused(self) -> None:
        """Read the file again at the next request."""
        self._read_at = None


class FreshToken(httpx2.AsyncBaseTransport):
    """Sends the file's current token instead of one read long ago; without a file, requests stay unchanged."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, tokens: TokenFile | None) -> None:
        self._inner = inner
        self._tokens = tokens

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send it on."""
        if self._tokens is not None and (token := self._tokens.token()):
            request.headers["Authorization"] = f"Bearer {token}"
        response = await self._inner.handle_async_request(request)
        if self._tokens is not None and response.status_code == 401:
            self._tokens.refused()
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class Connection:
    """The client, replaced if it may be the cause of failures: certificates and kubeconfigs change."""

    def __init__(self, access: ClusterAccess) -> None:
        """Read the configuration. Raise KubernetesConfigError."""
        self._access = access
        self.client = _open(access)  # for the next request
        self._before: AsyncClient | None = None
        self._opened_at = time.monotonic()

    async def renew(self) -> None:
        """Read the configuration again and use a new client; the one before the last is closed."""
        if time.monotonic() - self._opened_at < _RENEW_SECONDS:
            return
        self._opened_at = time.monotonic()
        client = await asyncio.to_thread(_open, self._access)
        before, self._before, self.client = self._before, self.client, client
        if before is not None:
            await before.close()

    async def is_starting(self) -> bool:
        """Tell whether the API server is not ready yet; until it has its own roles it answers 403 to most requests.

        If it is unknown, because it does not answer or we may not ask, it counts as starting.
        """
        try:
            async with await asyncio.to_thread(_open_http, self._access) as http, asyncio.timeout(REQUEST_SECONDS):
                return (await http.get("/readyz")).status_code != 200
        except Exception:  # any client error means that it is not ready for us
            return True

    async def close(self) -> None:
        """Close all connections."""
        for client in (self._before, self.client):
            if client is not None:
                await client.close()


def resource_class(kind: DocumentKind) -> Any:
    """Return lightkube's class of a kind: documents as plain mappings. Not registered, so that no other use clashes."""
    info = create_api_info(kind.group, kind.version, kind.kind, kind.plural)
    return type(kind.kind, (GenericNamespacedResource,), {"_api_info": info})


def status_class(kind: DocumentKind) -> Any:
    """Return lightkube's class of a kind's status subresource."""
    parent = create_api_info(kind.group, kind.version, kind.kind, kind.plural).resource
    info = ApiInfo(resource=parent, parent=parent, plural=kind.plural, verbs=["get", "patch", "put"], action="status")
    return type(f"{kind.kind}Status", (GenericNamespacedStatus,), {"_api_info": info})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed, in a form to base decisions on."""

    code: int | None  # HTTP status; None without an answer
    message: str
    retry_after_seconds: float | None = None

    @property
    def is_of_all(self) -> bool:
        """Tell whether all requests fail this way: then the document feeds report it, once for all."""
        return self.code is None or self.code in (401, 429) or self.code >= 500


def failure_of(error: BaseException) -> Failure:
    """Translate the errors of lightkube and its HTTP client."""
    if isinstance(error, ApiError):
        status = error.status
        return Failure(
            code=status.code,
            message=f"{status.code} {status.reason or ''}: {status.message}",
            retry_after_seconds=_retry_after(error),
        )
    if isinstance(error, httpx2.HTTPStatusError):  # not a Status object: the answer of a proxy, or for an unknown group
        code = error.response.status_code
        return Failure(code=code, message=f"HTTP {code}", retry_after_seconds=_retry_after(error))
    return Failure(code=None, message=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _retry_after(error: httpx2.HTTPStatusError) -> float | None:
    response = cast("httpx2.Response | None", error.response)  # None if a watch brought the error
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if text.isdigit() else None


def _open(access: ClusterAccess) -> AsyncClient:
    config = read_cluster_config(access)
    try:
        transport = FreshToken(_transport(config), _token_file(config))
        return AsyncClient(config=config.login, timeout=httpx2.Timeout(REQUEST_SECONDS), transport=transport)
    except Exception as error:  # foreign certificates: ssl and lightkube may raise anything
        raise KubernetesConfigError(f"cannot reach a Kubernetes API: {type(error).__name__}: {error}") from error


def _open_http(access: ClusterAccess) -> httpx2.AsyncClient:
    """Return a client for requests that are not about objects."""
    config = read_cluster_config(access)
    transport: Any = FreshToken(_transport(config), _token_file(config))  # lightkube declares a synchronous one
    timeout = httpx2.Timeout(REQUEST_SECONDS)
    return client_adapter.AsyncClient(
        config.login, client_adapter.ConnectionParams(timeout=timeout, transport=transport)
    )


def _token_file(config: ClusterConfig) -> TokenFile | None:
    user = config.login.user
    path = user.token_file if user is not None else None
    return TokenFile(Path(config.login.abs_file(path))) if path else None


def _transport(config: ClusterConfig) -> httpx2.AsyncBaseTransport:
    keepalive = [
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    ]
    # no connection limit: each watch keeps one, and the next request must not wait for it
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4)
    inner = httpx2.AsyncHTTPTransport(verify=config.verify, limits=limits, socket_options=keepalive, proxy=config.proxy)
    return _WatchTransport(inner, config)


class _WatchTransport(httpx2.AsyncBaseTransport):
    """Asks for bookmarks and reports granted watches, which lightkube 1.0 does not; slows down its reconnecting."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, config: ClusterConfig) -> None:
        self._inner = inner
        self._config = config
        self._opened_at: dict[str, float] = {}  # by path; one for each kind and namespace

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._config.dress(request)
        if request.url.params.get("watch") != "true":
            return bound(await self._inner.handle_async_request(request))
        request.url = request.url.copy_merge_params({"allowWatchBookmarks": "true"})
        await self._pace(request.url.path)
        response = bound(await self._inner.handle_async_request(request), is_watch=True)
        granted = watch_granted.get()
        if response.status_code == 200 and granted is not None:
            granted()
        return response

    async def _pace(self, path: str) -> None:
        now = time.monotonic()
        start = max(now, self._opened_at.get(path, now - _WATCH_PACE_SECONDS) + _WATCH_PACE_SECONDS)
        self._opened_at[path] = start
        if start > now:
            await asyncio.sleep(start - now)

    async def aclose(self) -> None:
        await self._inner.aclose()
