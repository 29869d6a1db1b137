"""The ext_proc server as it was on grpc.aio, kept to be compared with: docs/decisions/0002-grpc-transport.md.

`bench.bare_picker --server grpc-aio` serves with it. Import it only after GRPC_EXPERIMENTS is settled: grpc reads it
once. One coroutine a stream; `context.read`/`write` and bytes out, because async generators cost 10-25 % more.
"""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from extproc.ext_proc import answers as ext_proc
from extproc.ext_proc.call import OpenExchange, Picks
from extproc.ext_proc.exchange import Answer, Exchange, Pick, Step
from extproc.ext_proc.messages import BodyPart, HeadersMessage, Message, read_message


def _read(message: bytes) -> Message:
    return read_message(message, ext_proc.wanted_headers())


class GrpcAioServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` and gRPC health on one port."""

    def __init__(self, *, picks: Picks, max_body_bytes: int) -> None:
        self._picks = picks
        self._max_body_bytes = max_body_bytes
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", 2 * max_body_bytes + (1 << 20)),
                ("grpc.max_send_message_length", -1),
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_time_ms", 30_000),
                ("grpc.keepalive_timeout_ms", 10_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]
        )
        handler = grpc.stream_stream_rpc_method_handler(self._process, request_deserializer=_read)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(ext_proc.PROCESSOR_SERVICE, {"Process": handler}),)
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    async def start(self, *, host: str, port: int) -> int:
        """Listen and return the port."""
        bound: int = self._server.add_insecure_port(f"{host}:{port}")
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Answer health checks accordingly."""
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)

    async def stop(self, *, grace_seconds: float) -> None:
        """Let the open streams end within the grace, then cut them."""
        await self._server.stop(grace_seconds)

    async def _process(self, _: Any, context: Any) -> None:
        exchange = Exchange(max_body_bytes=self._max_body_bytes)
        picked: OpenExchange | None = None
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                steps = _steps(exchange, message)
                if len(steps) == 1 and isinstance(pick := steps[0], Pick):
                    picked = await self._picks.pick(pick.facts, pick.body)
                    steps = exchange.picked(picked.endpoints, body=picked.body, removed_headers=picked.removed_headers)
                elif picked is not None and isinstance(message, HeadersMessage):
                    served_by, from_pod = ext_proc.response_origin(message)
                    picked.responded(
                        status=ext_proc.response_status(message),
                        served_by=served_by,
                        from_pod=from_pod,
                        content_type="",
                    )
                for step in steps:
                    await context.write(ext_proc.encode_step(step))
        finally:
            if picked is not None:
                picked.finish()


def _steps(exchange: Exchange, message: Message) -> Sequence[Step]:
    """Feed one message to the exchange; responses pass unchanged."""
    if isinstance(message, HeadersMessage):
        if message.is_response:
            return (Answer.RESPONSE_HEADERS,)
        return exchange.request_headers(
            ext_proc.request_facts(message),
            mode=message.request_mode,
            response_mode=message.response_mode,
            end_of_stream=message.end_of_stream,
        )
    if isinstance(message, BodyPart):
        take = exchange.response_body if message.is_response else exchange.request_body
        return take(message.content, end_of_stream=message.end_of_stream)
    return (Answer.RESPONSE_TRAILERS,) if message.is_response else exchange.request_trailers()
