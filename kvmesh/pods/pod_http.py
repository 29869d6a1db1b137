"""GETs pages of pods over kept connections, one kept for each pod.

A general HTTP client takes five times the CPU for this, even on an idle machine. The caller sets the deadline: a
request that is given up closes its connection, so that its late answer is never taken for the next one.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address

from kvmesh.pods.http_response import HttpResponse, HttpResponseError, ResponseReader

MAX_PAGE_BYTES = 4 << 20
CONNECT_SECONDS = 2.0


class PodHttp:
    """One pod; `address` is host:port, IPv6 bracketed. Requests at a time have a connection each, one is kept."""

    def __init__(self, address: str, *, connect_seconds: float) -> None:
        """Take the time that the attempts to connect to all addresses of a name have together."""
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._is_name = not _is_ip(self._host)
        self._rest = f" HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\nUser-Agent: kvmesh\r\n\r\n"
        self._connect_seconds = connect_seconds
        self._kept: _Connection | None = None
        self._closes = 0  # how often it was closed: what was asked before is not kept

    async def get(self, path: str, *, max_body_bytes: int = MAX_PAGE_BYTES) -> HttpResponse:
        """Return what the pod answers, redirects included. Raise HttpResponseError or OSError.

        ConnectionRefusedError: no process listens on any of the name's addresses.
        """
        request = f"GET {path}{self._rest}".encode()
        kept, self._kept = self._kept, None
        closes = self._closes
        if kept is not None and not kept.closed:
            # the pod may close it while our request is on its way
            with suppress(_NoAnswerError):
                return await self._ask(kept, request, max_body_bytes, closes)
        return await self._ask(await self._connect(), request, max_body_bytes, closes)

    def close(self) -> None:
        """Close the connection that is kept, or will be when its answer has come; it may be opened again."""
        self._closes += 1
        if self._kept is not None:
            self._kept.abort()
            self._kept = None

    async def _ask(self, connection: "_Connection", request: bytes, max_body_bytes: int, closes: int) -> HttpResponse:
        try:
            response = await connection.ask(request, max_body_bytes=max_body_bytes)
        except BaseException:
            connection.abort()
            raise
        if self._kept is None and closes == self._closes:
            self._kept = connection
        else:
            connection.abort()
        return response

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        if not self._is_name:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(_Connection, self._host, self._port)
            return connection
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        errors: list[OSError] = []
        for family, _, _, _, where in found:
            try:
                async with asyncio.timeout(
                    self._connect_seconds / len(found)
                ):  # a silent address must not take all the time
                    _, connection = await loop.create_connection(_Connection, str(where[0]), self._port, family=family)
                return connection
            except OSError as error:  # TimeoutError is one
                errors.append(error)
        raise _most_telling(errors)


class _NoAnswerError(ConnectionError):
    """The connection ended before anything of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection; hands the bytes of each answer to a reader of its own."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes, *, max_body_bytes: int) -> asyncio.Future[HttpResponse]:
        """Send a request; the future fails with HttpResponseError or _NoAnswerError."""
        assert self._transport is not None, "asked before it was connected"
        self._reader = ResponseReader(max_body_bytes=max_body_bytes)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.abort()  # bytes without a request
            return
        try:
            self._answered(self._reader.feed(data))
        except HttpResponseError as error:
            self._failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._reader is None:
            return
        if not self._reader.began:
            self._failed(_NoAnswerError(f"the pod closed the connection: {exc or 'without an answer'}"))
            return
        try:
            self._answered(self._reader.end())
        except HttpResponseError as error:
            self._failed(error)

    def abort(self) -> None:
        """Close at once; an answer that is still to come is of no interest."""
        self.closed = True
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    def _answered(self, response: HttpResponse | None) -> None:
        if response is None:
            return
        self._reader = None
        if not response.keep_alive:
            self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(response)

    def _failed(self, error: Exception) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _most_telling(errors: Sequence[OSError]) -> OSError:
    """Return a refusal only where every address refused: otherwise a process may be there."""
    return next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class PodPages:
    """Asks pods, by endpoint. `forget` those that are gone, and `close` at the end."""

    def __init__(self) -> None:
        self._pods: dict[str, PodHttp] = {}

    async def get(self, endpoint: str, path: str, *, timeout_seconds: float, max_body_bytes: int) -> HttpResponse:
        """Return what the pod answers. Raise HttpResponseError or OSError (TimeoutError is one)."""
        pod = self._pods.get(endpoint)
        if pod is None:
            pod = self._pods[endpoint] = PodHttp(endpoint, connect_seconds=CONNECT_SECONDS)
        async with asyncio.timeout(timeout_seconds):
            return await pod.get(path, max_body_bytes=max_body_bytes)

    def forget(self, endpoint: str) -> None:
        """Close what is kept of a pod."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            pod.close()

    def close(self) -> None:
        """Close what is kept of all."""
        for endpoint in tuple(self._pods):
            self.forget(endpoint)
