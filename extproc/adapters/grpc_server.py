"""The ext_proc gRPC server: one coroutine a stream, which feeds an `Exchange` and carries out its steps.

Uses `context.read`/`write` with generic handlers and raw bytes out: async generators cost 10-25 % more CPU a request.
Decides nothing: the pick and the booking come through `Picks`.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.core.exchange import Answer, Exchange, Pick, RequestFacts, Step
from extproc.errors import ConfigError, InternalPickError, PickError
from extproc.wire import ext_proc

log = logging.getLogger(__name__)

# A buffered body comes in one message. One that is too large must still arrive, or Envoy sees a gRPC error and the
# client a 503 instead of our 413; Envoy's own buffer limit (32 MiB in envoy/buffered.yaml) ends it above that.
MAX_MESSAGE_BYTES_PER_BODY_BYTE = 2
MESSAGE_OVERHEAD_BYTES = 1 << 20
# the health services that Istio's and the Gateway API's probes ask for, besides the server as a whole
HEALTH_SERVICES = ("", "liveness", "readiness", ext_proc.PROCESSOR_SERVICE)


class OpenExchange(Protocol):
    """What a pick holds until its exchange ends."""

    @property
    def endpoints(self) -> Sequence[str]:
        """The winner, then the fallbacks in order."""

    def responded(self, *, status: int, served_by: str | None) -> None:
        """Take note of the pod's HTTP status and of which pod it was, where Envoy tells."""

    def finish(self) -> None:
        """Release what the pick holds: the exchange is over, whatever ended it. Called exactly once."""


class Picks(Protocol):
    """Where picks come from."""

    async def pick(self, facts: RequestFacts, body: bytes | None) -> OpenExchange:
        """Choose and book, or raise PickError with the answer for the client."""


class ExtProcServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and gRPC health on one port."""

    def __init__(self, *, picks: Picks, max_body_bytes: int) -> None:
        self._picks = picks
        self._max_body_bytes = max_body_bytes
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                (
                    "grpc.max_receive_message_length",
                    MAX_MESSAGE_BYTES_PER_BODY_BYTE * max_body_bytes + MESSAGE_OVERHEAD_BYTES,
                ),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),  # a second picker on the same port is a mistake, not a replica
                # an Envoy whose machine has vanished says no goodbye: without this its streams and bookings would stay
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._process, request_deserializer=ext_proc.parse_message)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(ext_proc.PROCESSOR_SERVICE, {"Process": handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.open_streams = 0
        self._draining = False
        self._answered: set[asyncio.Future[None]] = set()  # one for each stream that only waits for its exchange's end

    async def start(self, *, host: str, port: int) -> int:
        """Listen and return the port; raise ConfigError naming it when it is taken."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            bound: int = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"cannot listen for Envoy on {address} (--grpc-port): {error}") from error
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks accordingly; liveness is true as long as the process answers at all."""
        status = health_pb2.HealthCheckResponse
        for service in HEALTH_SERVICES:
            value = status.SERVING if serving or service == "liveness" else status.NOT_SERVING
            await self._health.set(service, value)

    async def stop(self, *, grace_seconds: float) -> None:
        """Refuse new streams, let the open ones end within the grace, then cut them."""
        await self._server.stop(grace_seconds)

    def release_answered(self) -> None:
        """End each stream whose response has begun, now and from now on: Envoy finishes that exchange without us.

        Cutting these streams instead would cut the answers of all their clients.
        """
        self._draining = True
        for ended in self._answered:
            _set(ended)

    async def _end_of_exchange(self, context: Any) -> Any:
        """Return the next message after the response headers, or EOF when the exchange or the server ends."""
        if self._draining:
            return grpc.aio.EOF
        reading = asyncio.ensure_future(context.read())
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        reading.add_done_callback(lambda _: _set(ended))
        self._answered.add(ended)
        try:
            await ended
            return reading.result() if reading.done() else grpc.aio.EOF
        finally:
            self._answered.discard(ended)
            reading.cancel()

    async def _process(self, _: Any, context: Any) -> None:
        """Serve one stream. Its end is the end of the HTTP exchange, however that came about."""
        exchange = Exchange(max_body_bytes=self._max_body_bytes)
        picked: OpenExchange | None = None
        self.open_streams += 1
        try:
            answered = False
            message = await context.read()
            while message is not grpc.aio.EOF:
                steps = _steps(exchange, message)
                is_answer = message.HasField("response_headers")
                answered = answered or is_answer
                if len(steps) == 1 and isinstance(pick := steps[0], Pick):
                    picked = await self._picks.pick(pick.facts, pick.body)
                    steps = exchange.picked(picked.endpoints)
                elif picked is not None and is_answer:
                    picked.responded(
                        status=ext_proc.response_status(message.response_headers), served_by=ext_proc.served_by(message)
                    )
                for step in steps:
                    await context.write(ext_proc.encode_step(step))
                message = await (self._end_of_exchange(context) if answered else context.read())
        except PickError as refusal:
            await context.write(ext_proc.encode_refusal(refusal))
        except (asyncio.CancelledError, grpc.RpcError):
            raise  # Envoy or the client went away, or the server is stopping
        except Exception:
            log.exception("an exchange failed; the client gets a 500")
            await context.write(
                ext_proc.encode_refusal(InternalPickError("kvmesh failed to route this request; its log says why"))
            )
        finally:
            self.open_streams -= 1
            if picked is not None:
                picked.finish()


def _set(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


def _steps(exchange: Exchange, message: Any) -> Sequence[Step]:
    """Feed one message to the exchange."""
    kind = message.WhichOneof("request")
    if kind == "request_headers":
        headers = message.request_headers
        return exchange.request_headers(
            ext_proc.request_facts(headers),
            mode=ext_proc.request_body_mode(message),
            response_mode=ext_proc.response_body_mode(message),
            end_of_stream=headers.end_of_stream,
        )
    if kind == "request_body":
        return exchange.request_body(message.request_body.body, end_of_stream=message.request_body.end_of_stream)
    if kind == "request_trailers":
        return exchange.request_trailers()
    if kind == "response_headers":
        return (Answer.RESPONSE_HEADERS,)
    if kind == "response_body":
        return exchange.response_body(message.response_body.body, end_of_stream=message.response_body.end_of_stream)
    return (Answer.RESPONSE_TRAILERS,)
