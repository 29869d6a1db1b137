"""How we reach a Kubernetes API server: configuration, one connection pool, and what lightkube leaves to its users.

With `cluster_config` the only module that knows lightkube's classes (docs/decisions/0004). Imported only where
Kubernetes is used, because it takes 0.1 s and 20 MB.
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
from lightkube.generic_resource import (
    GenericGlobalResource,
    GenericNamespacedResource,
    GenericNamespacedStatus,
    create_api_info,
)

from kvmesh.documents.cluster_config import ClusterConfig, read_cluster_config
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
from kvmesh.documents.token_file import FreshToken, TokenFile

REQUEST_SECONDS = 15.0  # for anything that is no watch
_RENEW_SECONDS = 10.0  # a connection pool lives at least that long
_WATCH_PACE_SECONDS = 1.0  # between two watches of the same thing: some proxies end each at once

# called when the watch that the current task asks for is granted; lightkube reports only its first event
watch_granted: ContextVar[Callable[[], None] | None] = ContextVar("watch_granted", default=None)


class Connection:
    """The client, replaced when it may be the reason of failures: certificates and kubeconfigs change."""

    def __init__(self, access: ClusterAccess) -> None:
        """Read the configuration. Raises KubernetesConfigError."""
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
        """Tell whether the API server is not ready; until it has its own roles it answers 403 to most.

        Where it is not known, because nobody answers or we may not ask that either, it is starting.
        """
        try:
            async with await asyncio.to_thread(_open_http, self._access) as http:
                return (await http.get("/readyz")).status_code != 200
        except Exception:  # whatever our clients raise: it is not ready for us
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


def global_class(kind: DocumentKind) -> Any:
    """Return lightkube's class of a kind that is in no namespace."""
    info = create_api_info(kind.group, kind.version, kind.kind, kind.plural)
    return type(kind.kind, (GenericGlobalResource,), {"_api_info": info})


def status_class(kind: DocumentKind) -> Any:
    """Return lightkube's class of a kind's status subresource."""
    parent = create_api_info(kind.group, kind.version, kind.kind, kind.plural).resource
    info = ApiInfo(resource=parent, parent=parent, plural=kind.plural, verbs=["get", "patch", "put"], action="status")
    return type(f"{kind.kind}Status", (GenericNamespacedStatus,), {"_api_info": info})


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a request failed, in a form to decide on."""

    code: int | None  # HTTP status; None: no answer
    message: str
    retry_after_seconds: float | None = None

    @property
    def is_of_all(self) -> bool:
        """Tell whether every request fails so: what follows the documents says it, once for all."""
        return self.code is None or self.code in (401, 429) or self.code >= 500


def failure_of(error: BaseException) -> Failure:
    """Translate whatever lightkube and its HTTP client raise."""
    if isinstance(error, ApiError):
        status = error.status
        return Failure(
            code=status.code,
            message=f"{status.code} {status.reason or ''}: {status.message}",
            retry_after_seconds=_retry_after(error),
        )
    if isinstance(error, httpx2.HTTPStatusError):  # an answer that is no Status: a proxy's, or an unknown group's
        code = error.response.status_code
        return Failure(code=code, message=f"HTTP {code}", retry_after_seconds=_retry_after(error))
    return Failure(code=None, message=f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)


def _retry_after(error: httpx2.HTTPStatusError) -> float | None:
    response = cast("httpx2.Response | None", error.response)  # None where a watch brought the error
    text = response.headers.get("Retry-After", "") if response is not None else ""
    return float(text) if text.isdigit() else None


def _open(access: ClusterAccess) -> AsyncClient:
    config = read_cluster_config(access)
    try:
        transport = FreshToken(_transport(config), _token_file(config))
        return AsyncClient(config=config.login, timeout=httpx2.Timeout(REQUEST_SECONDS), transport=transport)
    except Exception as error:  # certificates of other people: ssl and lightkube raise what comes
        raise KubernetesConfigError(f"cannot reach a Kubernetes API: {type(error).__name__}: {error}") from error


def _open_http(access: ClusterAccess) -> httpx2.AsyncClient:
    """Return a client for what is no object."""
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
    # no limit of connections: each watch keeps one, and the next request must not wait for it
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=4)
    inner = httpx2.AsyncHTTPTransport(verify=config.verify, limits=limits, socket_options=keepalive, proxy=config.proxy)
    return _WatchTransport(inner, config)


class _WatchTransport(httpx2.AsyncBaseTransport):
    """Asks for bookmarks and reports granted watches, as lightkube 1.0 does not; slows down its reconnecting."""

    def __init__(self, inner: httpx2.AsyncBaseTransport, config: ClusterConfig) -> None:
        self._inner = inner
        self._config = config
        self._opened_at: dict[str, float] = {}  # by path; as many as there are kinds and namespaces

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        self._config.dress(request)
        if request.url.params.get("watch") != "true":
            return await self._inner.handle_async_request(request)
        request.url = request.url.copy_merge_params({"allowWatchBookmarks": "true"})
        await self._pace(request.url.path)
        response = await self._inner.handle_async_request(request)
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
