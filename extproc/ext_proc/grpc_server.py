"""The picker's gRPC server: serves ext_proc, health and further methods over a transport, by default our own HTTP/2.

docs/decisions/0002 says why.
"""

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from extproc.errors import ConfigError
from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.call import ExtProcCalls, Picks
from extproc.ext_proc.exchange import UPLOAD_BYTES_PER_BODY_BYTE, Uploads
from extproc.ext_proc.grpc_tls import ServerTls
from extproc.http2.connection import Http2Connection, Turns
from extproc.http2.grpc_messages import GrpcError, GrpcStatus
from extproc.http2.grpc_stream import Call, GrpcStream, Methods, UnaryCall, refuse_longer
from extproc.http2.limits import Http2Limits

SERVICE = "grpc.health.v1.Health"
SERVING: int = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING: int = health_pb2.HealthCheckResponse.NOT_SERVING
LONGEST_HEALTH_REQUEST = 4_096  # bytes: a service's name
SERVICE_UNKNOWN: int = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health of each service, and the streams that watch it."""

    def __init__(self, services: Iterable[str]) -> None:
        self.states = dict.fromkeys(services, NOT_SERVING)
        self.watches: set[_Watch] = set()

    def methods(self) -> Methods:
        """Return the handlers by method."""
        short = partial(UnaryCall, most_bytes=LONGEST_HEALTH_REQUEST)
        return {
            f"/{SERVICE}/Check".encode(): partial(short, answer=self._check),
            f"/{SERVICE}/List".encode(): partial(short, answer=self._list),
            f"/{SERVICE}/Watch".encode(): lambda stream: _Watch(stream, self),
        }

    def set(self, service: str, *, serving: bool) -> None:
        """Set one service's state; if it changed, send it to the streams that watch it."""
        state = SERVING if serving else NOT_SERVING
        if self.states.get(service) == state:
            return
        self.states[service] = state
        for watch in list(self.watches):
            if watch.service == service:
                watch.send(state)

    def _check(self, data: bytes) -> bytes:
        state = self.states.get(_service(data))
        if state is None:
            raise GrpcError(GrpcStatus.NOT_FOUND, "unknown service")
        return encoded(state)

    def _list(self, _: bytes) -> bytes:
        response = health_pb2.HealthListResponse()
        for service, state in self.states.items():
            response.statuses[service].status = state
        message: bytes = response.SerializeToString()
        return message


def encoded(state: int) -> bytes:
    """Return the encoded response with this state."""
    message: bytes = health_pb2.HealthCheckResponse(status=state).SerializeToString()
    return message


class _Watch(Call):
    """Sends the state at once and after every change, until the client ends the stream."""

    def __init__(self, stream: GrpcStream, health: Health) -> None:
        self.service: str | None = None
        self._stream = stream
        self._health = health

    def message(self, data: bytes) -> None:
        if self.service is not None:
            raise GrpcError(GrpcStatus.INTERNAL, "one request is enough")
        self.service = _service(data)
        self._health.watches.add(self)
        self._stream.send(encoded(self._health.states.get(self.service, SERVICE_UNKNOWN)))

    def partial(self, size: int) -> None:
        refuse_longer(size, most_bytes=LONGEST_HEALTH_REQUEST)

    def half_closed(self) -> None:
        if self.service is None:
            raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        self._health.watches.discard(self)

    def send(self, state: int) -> None:
        self._stream.send(encoded(state))
        self._stream.flush()


def _service(data: bytes) -> str:
    try:
        request: Any = health_pb2.HealthCheckRequest.FromString(data)
    except DecodeError as error:
        raise GrpcError(GrpcStatus.INTERNAL, "the request cannot be decoded") from error
    service: str = request.service
    return service


# A buffered body comes in one message. One above the limits must still arrive: otherwise Envoy sees a gRPC error and
# the client gets a 503 instead of our 413. Envoy's own buffer limit (64 MiB in envoy/buffered.yaml) stops larger ones.
MAX_MESSAGE_BYTES_PER_BODY_BYTE = 2 * UPLOAD_BYTES_PER_BODY_BYTE
MESSAGE_OVERHEAD_BYTES = 1 << 20
# the health services in the probes of Istio and the Gateway API, besides "", the server as a whole
HEALTH_SERVICES = ("", "liveness", "readiness", ext_proc.PROCESSOR_SERVICE)
BACKLOG = 1024  # connections waiting for accept; a whole mesh may reconnect at once
CLOSE_SECONDS = 2.0  # for peers to read our last bytes


class Transport(ABC):
    """Listens on one port, and opens a stream for each call of its methods."""

    def __init__(self, methods: Methods, *, limits: Http2Limits, max_message_bytes: int) -> None:
        self._methods = methods
        self._limits = limits
        self._max_message_bytes = max_message_bytes

    @abstractmethod
    async def start(self, *, host: str, port: int, tls: ServerTls | None) -> int:
        """Listen, and return the port; raise OSError if the address is unusable."""

    @abstractmethod
    async def stop(self, *, grace_seconds: float) -> None:
        """Refuse new connections and streams, and cut the open ones that have not ended after the grace period."""


class Http2Transport(Transport):
    """Our own HTTP/2."""

    def __init__(self, methods: Methods, *, limits: Http2Limits, max_message_bytes: int) -> None:
        super().__init__(methods, limits=limits, max_message_bytes=max_message_bytes)
        self._listener: asyncio.Server | None = None
        self.connections: set[Http2Connection] = set()
        self._turns = Turns()

    async def start(self, *, host: str, port: int, tls: ServerTls | None) -> int:
        """See `Transport`."""
        loop = asyncio.get_running_loop()
        context = tls.context if tls is not None else None
        if host == "::":
            # asyncio would listen on IPv6 only, but "every address" includes IPv4
            listening = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
            self._listener = await loop.create_server(self._accept, sock=listening, backlog=BACKLOG, ssl=context)
        else:
            # reuse_port: a second picker on the same port is a mistake, not a replica
            self._listener = await loop.create_server(
                self._accept, host, port, backlog=BACKLOG, reuse_port=False, ssl=context
            )
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def _accept(self) -> Http2Connection:
        return Http2Connection(
            methods=self._methods,
            limits=self._limits,
            max_message_bytes=self._max_message_bytes,
            connections=self.connections,
            turns=self._turns,
        )

    async def stop(self, *, grace_seconds: float) -> None:
        """See `Transport`."""
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.drain()
        await self._all_closed(within_seconds=grace_seconds)
        for connection in list(self.connections):
            connection.close()
        await self._all_closed(within_seconds=CLOSE_SECONDS)
        for connection in list(self.connections):
            connection.abort()

    async def _all_closed(self, *, within_seconds: float) -> None:
        if self.connections and within_seconds > 0:
            await asyncio.wait([connection.closed for connection in self.connections], timeout=within_seconds)


class ExtProcServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and gRPC health on one port."""

    def __init__(
        self,
        *,
        picks: Picks,
        max_body_bytes: int,
        uploads: Uploads | None = None,
        further_headers: frozenset[str] = frozenset(),
        claims: frozenset[str] = frozenset(),
        limits: Http2Limits | None = None,
        further_methods: Methods | None = None,
        transport: type[Transport] = Http2Transport,
    ) -> None:
        """`further_headers` are request headers (lowercase) for the pick, in addition to `FURTHER_HEADERS`.

        `claims` are the claims, of a JWT verified by Envoy, for the pick. `further_methods` are the port's other
        services.
        """
        self.calls = ExtProcCalls(picks=picks, max_body_bytes=max_body_bytes, uploads=uploads)
        self.want(further_headers=further_headers, claims=claims)
        self._health = Health(HEALTH_SERVICES)
        self._health.set("liveness", serving=True)
        process = f"/{ext_proc.PROCESSOR_SERVICE}/Process".encode()
        self.transport = transport(
            {process: self.calls.serve, **self._health.methods(), **(further_methods or {})},
            limits=limits or Http2Limits(),
            max_message_bytes=MAX_MESSAGE_BYTES_PER_BODY_BYTE * max_body_bytes + MESSAGE_OVERHEAD_BYTES,
        )

    def want(self, *, further_headers: frozenset[str], claims: frozenset[str]) -> None:
        """Replace the headers and claims for the picks, after a change of the policy."""
        self.calls.wanted_headers = ext_proc.wanted_headers(ext_proc.FURTHER_HEADERS | further_headers)
        self.calls.claims = claims

    @property
    def open_streams(self) -> int:
        """The number of open ext_proc streams."""
        return len(self.calls.open)

    async def start(self, *, host: str, port: int, tls: ServerTls | None = None) -> int:
        """Listen, in clear text without `tls`, and return the port; raise ConfigError if the address is unusable."""
        try:
            return await self.transport.start(host=host, port=port, tls=tls)
        except OSError as error:
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            raise ConfigError(f"cannot listen for Envoy on {address} (--grpc-port): {error}") from error

    async def set_serving(self, serving: bool) -> None:
        """Set the answer to health checks; liveness is serving as long as the process answers at all."""
        for service in HEALTH_SERVICES:
            self._health.set(service, serving=serving or service == "liveness")

    async def stop(self, *, grace_seconds: float) -> None:
        """Refuse new connections and streams, and cut the open ones that have not ended after the grace period."""
        await self.transport.stop(grace_seconds=grace_seconds)
        if self.calls.tasks:
            await asyncio.wait(self.calls.tasks, timeout=CLOSE_SECONDS)

    def release_answered(self) -> None:
        """End each stream whose response has begun, now and from now on: Envoy finishes that exchange without us.

        Cutting these streams instead would cut the answers of all their clients.
        """
        self.calls.release_answered()
