"""The gRPC port on `grpc.aio`, gRPC's own server (--grpc-server grpcio). Import it late: grpc takes 0.1 s to load.

Each stream has two tasks: grpc's writes and ends the stream, ours reads. A pending read is never cancelled, because
grpcio would leak it (grpc/grpc#43360); it returns when the stream has ended.
"""

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from extproc.ext_proc.grpc_server import CLOSE_SECONDS, Transport
from extproc.ext_proc.grpc_tls import Pair, ServerTls
from extproc.http2.connection import STOPPED
from extproc.http2.grpc_messages import MAX_STATUS_TEXT, GrpcStatus
from extproc.http2.grpc_stream import Call, GrpcStream, Methods
from extproc.http2.headers import POOL_METADATA
from extproc.http2.limits import Http2Limits

POOL = POOL_METADATA.decode()
Serve = Callable[[GrpcStream], Call]


class GrpcioStream(GrpcStream):
    """One call of grpc.aio, as a stream of bytes. grpc does not tell its `authority`."""

    __slots__ = ("_context", "_free", "_status", "_unsent", "_wake")

    def __init__(self, context: Any) -> None:
        super().__init__(pool=dict(context.invocation_metadata()).get(POOL, "").strip())
        self._context = context
        self._unsent: deque[bytes] = deque()
        self._status = GrpcStatus.OK, ""
        self._wake = asyncio.Event()  # there is something to write, or the end
        self._free = asyncio.Event()  # the call may get the next message
        self._free.set()

    def send(self, message: bytes, body: bytes = b"") -> None:
        """See `GrpcStream`."""
        if not self.ended:
            self._unsent.append(message + body)
            self._wake.set()

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """See `GrpcStream`."""
        if not self.ended:
            self._status = status, text[:MAX_STATUS_TEXT]
            self.cut()

    def hold(self) -> None:
        """See `GrpcStream`."""
        self._free.clear()

    def release(self) -> None:
        """See `GrpcStream`."""
        self._free.set()

    def flush(self) -> None:
        """Do nothing: `send` wakes the writer."""

    def cut(self) -> None:
        """End the call, and its reader; the writer still sends what is left if the client is there."""
        if not self.ended:
            self._end_call()
        self._free.set()
        self._wake.set()

    async def write(self) -> None:
        """Write the messages as they come, and return at the end with the status set."""
        while True:
            while self._unsent:
                await self._context.write(self._unsent.popleft())
            if self.ended:
                break
            self._wake.clear()
            await self._wake.wait()
        status, text = self._status
        if status is not GrpcStatus.OK:
            self._context.set_code(int(status))
            self._context.set_details(text)

    async def read(self) -> None:
        """Deliver each message unless the call holds them, then the client's end."""
        try:
            # a local variable would keep a body until the next message
            while not self.ended and self._deliver(await self._context.read()):
                await self._free.wait()
        except Exception as error:
            if not self.ended:  # otherwise grpc says that the call is over
                self._fail(error)

    def _deliver(self, data: Any) -> bool:
        """Return whether there may be more."""
        if self._call is None:
            return False
        if data is grpc.aio.EOF:
            self._call.half_closed()
            return False
        self._call.message(data)
        return True


class GrpcioTransport(Transport):
    """gRPC's own server. Of the limits it keeps those on streams and pings."""

    def __init__(self, methods: Methods, *, limits: Http2Limits, max_message_bytes: int) -> None:
        super().__init__(methods, limits=limits, max_message_bytes=max_message_bytes)
        self._server: Any = None
        self._reading: dict[asyncio.Task[None], GrpcioStream] = {}

    async def start(self, *, host: str, port: int, tls: ServerTls | None) -> int:
        """See `Transport`."""
        _check_free(host, port)
        limits = self._limits
        server = grpc.aio.server(
            handlers=[self._handler(path.decode(), serve) for path, serve in self._methods.items()],
            options=(
                ("grpc.so_reuseport", 0),  # a second picker on the same port is a mistake, not a replica
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.max_concurrent_streams", limits.max_concurrent_streams),
                ("grpc.keepalive_time_ms", int(limits.ping_after_seconds * 1000)),
                ("grpc.keepalive_timeout_ms", int(limits.ping_timeout_seconds * 1000)),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0),
                ("grpc.http2.max_ping_strikes", 0),  # an Envoy may ping us as often as it likes
            ),
        )
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = (
                server.add_insecure_port(address) if tls is None else server.add_secure_port(address, _credentials(tls))
            )
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await server.start()
        self._server = server
        return bound

    async def stop(self, *, grace_seconds: float) -> None:
        """See `Transport`."""
        server, self._server = self._server, None
        if server is None:
            return
        stopping = asyncio.create_task(server.stop(grace_seconds + CLOSE_SECONDS), name="stop grpc")
        if self._reading and grace_seconds > 0:
            await asyncio.wait(self._reading, timeout=grace_seconds)
        for stream in self._reading.values():
            stream.finish(GrpcStatus.UNAVAILABLE, STOPPED)
        await stopping
        if self._reading:
            await asyncio.wait(self._reading, timeout=CLOSE_SECONDS)

    def _handler(self, path: str, serve: Serve) -> Any:
        _, service, method = path.split("/")
        handler = grpc.stream_stream_rpc_method_handler(partial(self._serve, serve))
        return grpc.method_handlers_generic_handler(service, {method: handler})

    async def _serve(self, serve: Serve, _: Any, context: Any) -> None:
        """Serve one stream until it ends; grpc cancels this if the client has left, or its deadline has passed."""
        stream = GrpcioStream(context)
        stream.begin(serve)
        reader = asyncio.create_task(stream.read(), name="read a stream")
        self._reading[reader] = stream
        reader.add_done_callback(self._reading.pop)
        try:
            await stream.write()
        finally:
            stream.cut()


def _check_free(host: str, port: int) -> None:
    """Raise OSError with the reason if nothing can listen there; grpc's own error has none."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    socket.create_server((host, port), family=family).close()


def _credentials(tls: ServerTls) -> Any:
    """Return credentials that ask for the current pair at each handshake."""
    shown = tls.latest()

    def change() -> Any:
        nonlocal shown
        latest = tls.latest()
        if latest is shown:
            return None
        shown = latest
        return _configuration(latest)

    return grpc.dynamic_ssl_server_credentials(_configuration(shown), change)


def _configuration(pair: Pair) -> Any:
    return grpc.ssl_server_certificate_configuration([(pair.key, pair.cert)])
