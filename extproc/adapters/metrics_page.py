"""Fetches one endpoint's /metrics over a connection that is kept; used by the scraper, twenty times a second and more.

A general HTTP client takes five times the CPU for this, also while the picker is idle. The caller sets the deadline: a
fetch that is given up closes the connection, so that its late answer is never taken for the next one.
"""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from extproc.wire.http_response import HttpResponse, HttpResponseError, ResponseReader

MAX_PAGE_BYTES = 4 << 20


class MetricsPage:
    """One endpoint's page; one fetch at a time. `address` is host:port, IPv6 bracketed."""

    def __init__(self, address: str, *, timeout_seconds: float, path: str = "/metrics") -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\nUser-Agent: kvmesh\r\n\r\n".encode()
        self._timeout_seconds = timeout_seconds
        self._connection: _Connection | None = None

    async def fetch(self) -> HttpResponse:
        """Return what the pod answers, redirects included. Raise HttpResponseError or OSError.

        ConnectionRefusedError: nobody listens on any of the name's addresses.
        """
        kept = self._connection
        if kept is not None and not kept.closed:
            # the pod may close it while our request is on its way
            with suppress(_NoAnswerError):
                return await self._ask(kept)
        self._connection = await self._connect()
        return await self._ask(self._connection)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.abort()

    async def _ask(self, connection: "_Connection") -> HttpResponse:
        try:
            return await connection.ask(self._request)
        except BaseException:
            connection.abort()
            raise

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        errors: list[OSError] = []
        for family, _, _, _, where in found:
            try:
                async with asyncio.timeout(self._timeout_seconds / len(found)):  # one that is silent is not all
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

    def ask(self, request: bytes) -> asyncio.Future[HttpResponse]:
        """Send a request; the future fails with HttpResponseError or _NoAnswerError."""
        assert self._transport is not None, "asked before it was connected"
        self._reader = ResponseReader(max_body_bytes=MAX_PAGE_BYTES)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        if self._reader is None:
            self.abort()  # nobody asked
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
    """Return a refusal only where every address refused: else somebody may be there."""
    return next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])
