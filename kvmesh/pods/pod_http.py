"""Sends HTTP requests to pods over kept connections, one kept for each pod unless the caller wants more.

A general HTTP client takes five times the CPU for this, even on an idle machine. The caller sets the deadline: a
request that is given up closes its connection, so that its late answer is never taken for the next one. A pod that
sends its answer in crumbs is read at most a hundred times per second.
"""

import asyncio
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from ipaddress import ip_address
from types import MappingProxyType

from kvmesh.pods.http_response import HttpResponse, HttpResponseError, ResponseReader
from kvmesh.pods.pod_access import why_refused
from kvmesh.pods.pod_key import PodKey

MAX_PAGE_BYTES = 4 << 20
MAX_MODELS_BYTES = 1 << 20  # of /v1/models: two thousand cards
CONNECT_SECONDS = 2.0
READS_AT_ONCE = 64  # of one answer, plus one for each KiB of it: networks usually bring more in one read
BYTES_A_READ = 1 << 10
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_CONTROLS = re.compile(r"[\0-\x08\n-\x1f\x7f]")  # all but the tab
CRUMB_SECONDS = 0.01  # between two reads of an answer in smaller pieces


class PodHttp:
    """One pod; `address` is host:port, IPv6 bracketed. Concurrent requests have a connection each, few are kept."""

    def __init__(self, address: str, *, connect_seconds: float, most_kept: int = 1, key: PodKey | None = None) -> None:
        """`connect_seconds`: limit on the attempts to connect to all addresses of a name together.

        `key` is sent with each request, to this address alone: redirects are left to the caller.
        """
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._is_name = not _is_ip(self._host)
        self._head = f" HTTP/1.1\r\nHost: {address}\r\nAccept: */*\r\nUser-Agent: kvmesh\r\n"
        self._key = key
        self._connect_seconds = connect_seconds
        self._kept: list[_Connection] = []
        self._most_kept = most_kept
        self._closes = 0  # how often it was closed: connections of earlier requests are not kept

    async def get(self, path: str, *, max_body_bytes: int = MAX_PAGE_BYTES) -> HttpResponse:
        """Return the pod's answer; redirects are not followed. Raise HttpResponseError or OSError.

        ConnectionRefusedError: no process listens on any of the name's addresses.
        """
        return await self._answer(f"GET {path}{self._head}{self._shown()}\r\n".encode(), max_body_bytes)

    async def post(
        self, path: str, body: bytes, *, max_body_bytes: int, headers: Mapping[str, str] = NO_HEADERS
    ) -> HttpResponse:
        """Return the pod's answer to this JSON; the request may be sent twice. Raise as `get` does.

        `headers` are additional. HttpResponseError: a value has control characters, and nothing was sent.
        """
        if unsafe := [name for name, value in headers.items() if _CONTROLS.search(value)]:
            raise HttpResponseError(f"the value of the header {unsafe[0]} has control characters: it was not sent")
        further = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        head = f"POST {path}{self._head}{self._shown()}{further}{length}"
        return await self._answer(head.encode() + body, max_body_bytes)

    def close(self) -> None:
        """Close the kept connections, and busy ones when their answers have come; more may be opened."""
        self._closes += 1
        kept, self._kept = self._kept, []
        for connection in kept:
            connection.abort()

    def _shown(self) -> str:
        return "" if self._key is None else self._key.header()

    async def _answer(self, request: bytes, max_body_bytes: int) -> HttpResponse:
        closes = self._closes
        while self._kept:
            kept = self._kept.pop()
            if not kept.closed:
                # the pod may close it while our request is on its way
                with suppress(_NoAnswerError):
                    return await self._ask(kept, request, max_body_bytes, closes)
        return await self._ask(await self._connect(), request, max_body_bytes, closes)

    async def _ask(self, connection: "_Connection", request: bytes, max_body_bytes: int, closes: int) -> HttpResponse:
        try:
            response = await connection.ask(request, max_body_bytes=max_body_bytes)
        except BaseException:
            connection.abort()
            raise
        if len(self._kept) < self._most_kept and closes == self._closes:
            self._kept.append(connection)
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
                # a silent address must not take all the time
                async with asyncio.timeout(self._connect_seconds / len(found)):
                    _, connection = await loop.create_connection(_Connection, str(where[0]), self._port, family=family)
                return connection
            except OSError as error:  # including TimeoutError
                errors.append(error)
        # a refusal only if every address refused: otherwise a process may listen there
        raise next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])


class _NoAnswerError(ConnectionError):
    """The connection ended before any byte of an answer came."""


class _Connection(asyncio.Protocol):
    """One connection; feeds the bytes of each answer to a new reader."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._reader: ResponseReader | None = None
        self._answer: asyncio.Future[HttpResponse] | None = None
        self._reads = self._received = 0  # of this answer; the latter in bytes

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def ask(self, request: bytes, *, max_body_bytes: int) -> asyncio.Future[HttpResponse]:
        """Send a request; the future fails with HttpResponseError or _NoAnswerError."""
        assert self._transport is not None, "asked before it was connected"
        self._reader = ResponseReader(max_body_bytes=max_body_bytes)
        self._reads = self._received = 0
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
        self._reads += 1
        self._received += len(data)
        if self._reads > READS_AT_ONCE + self._received // BYTES_A_READ and not self.closed:
            assert self._transport is not None
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(CRUMB_SECONDS, self._read_on)

    def _read_on(self) -> None:
        if not self.closed and self._transport is not None:
            self._transport.resume_reading()

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
        """Close at once; a pending answer is dropped."""
        self.closed = True
        self._reader = None
        if self._transport is not None:
            self._transport.abort()

    def _answered(self, response: HttpResponse | None) -> None:
        if response is None:
            return
        self._reader = None
        # a request whose answer came before it was sent completely would leave its rest to the next one
        if not response.keep_alive or (self._transport is not None and self._transport.get_write_buffer_size()):
            self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(response)

    def _failed(self, error: Exception) -> None:
        self.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(error)


def _is_ip(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


class PodPages:
    """Sends requests to pods, by endpoint. `forget` departed ones, and `close` at the end."""

    def __init__(self, *, most_kept: int = 1, key: PodKey | None = None) -> None:
        """`most_kept`: kept connections per pod; `key` is sent to all pods."""
        self._pods: dict[str, PodHttp] = {}
        self._most_kept = most_kept
        self._key = key

    def why_refused(self, status: int) -> str | None:
        """Return why a pod that answers with this status refuses us, or None if it does not."""
        return why_refused(status, shows_key=self._key is not None)

    async def get(self, endpoint: str, path: str, *, timeout_seconds: float, max_body_bytes: int) -> HttpResponse:
        """Return the pod's answer. Raise HttpResponseError or OSError (TimeoutError is one)."""
        async with asyncio.timeout(timeout_seconds):
            return await self._pod(endpoint).get(path, max_body_bytes=max_body_bytes)

    async def post(
        self,
        endpoint: str,
        path: str,
        body: bytes,
        *,
        timeout_seconds: float | None,
        max_body_bytes: int,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> HttpResponse:
        """Return the pod's answer to this JSON. Raise HttpResponseError or OSError (TimeoutError is one)."""
        async with asyncio.timeout(timeout_seconds):
            return await self._pod(endpoint).post(path, body, max_body_bytes=max_body_bytes, headers=headers)

    def keep(self, endpoints: Iterable[str]) -> None:
        """Forget all other endpoints."""
        for endpoint in self._pods.keys() - frozenset(endpoints):
            self.forget(endpoint)

    def forget(self, endpoint: str) -> None:
        """Forget a pod and close its connections."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            pod.close()

    def close(self) -> None:
        """Close all connections."""
        for endpoint in tuple(self._pods):
            self.forget(endpoint)

    def _pod(self, endpoint: str) -> PodHttp:
        pod = self._pods.get(endpoint)
        if pod is None:
            pod = self._pods[endpoint] = PodHttp(
                endpoint, connect_seconds=CONNECT_SECONDS, most_kept=self._most_kept, key=self._key
            )
        return pod
