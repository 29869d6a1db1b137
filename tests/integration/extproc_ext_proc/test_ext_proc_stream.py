"""A real gRPC server and a scripted ext_proc client in Envoy's place: answers, refusals, and that nothing leaks."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc

from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.errors import ConfigError, MalformedRequestError
from extproc.ext_proc.call import OpenResponse
from extproc.ext_proc.exchange import BodyMode, RequestFacts
from extproc.ext_proc.grpc_server import ExtProcServer, Transport
from extproc.ext_proc.messages import encode_note
from tests.integration.grpc_servers import on_both_servers

pytestmark = on_both_servers
DEADLINE_SECONDS = 20.0
CALL_SECONDS = 60.0  # at which gRPC ends a call


@dataclass
class FakeExchange:
    picks: "FakePicks"
    endpoints: Sequence[str] = ("10.0.0.1:8000", "10.0.0.2:8000")
    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN
    response_headers: Mapping[str, str] = field(default_factory=dict)
    responses: list[tuple[int, str | None]] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        self.responses.append((status, served_by))

    def response_missed(self, why: str) -> None:
        self.missed.append(why)

    def finish(self) -> None:
        self.picks.open.remove(self)
        self.picks.finished.append(self)


@dataclass
class FakePicks:
    fails: Exception | None = None
    change: bytes | None = None  # goes to the pod in place of the client's body
    plan: ResponsePlan = PASS_PLAN
    told: Mapping[str, str] = field(default_factory=dict)
    bodies: list[bytes | None] = field(default_factory=list)
    open: list[FakeExchange] = field(default_factory=list)
    finished: list[FakeExchange] = field(default_factory=list)

    async def pick(self, facts: RequestFacts, body: bytes | None) -> FakeExchange:
        if self.fails is not None:
            raise self.fails
        self.bodies.append(body)
        exchange = FakeExchange(self, body=self.change, plan=self.plan, response_headers=self.told)
        self.open.append(exchange)
        return exchange

    def response(self, plan: ResponsePlan) -> OpenResponse:
        raise NotImplementedError


@asynccontextmanager
async def serving(
    picks: FakePicks, transport: type[Transport], *, max_body_bytes: int = 1 << 20
) -> AsyncIterator[tuple[ExtProcServer, Any, int]]:
    server = ExtProcServer(picks=picks, max_body_bytes=max_body_bytes, transport=transport)
    port = await server.start(host="127.0.0.1", port=0)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )
            yield server, partial(method, timeout=CALL_SECONDS), port
    finally:
        await server.stop(grace_seconds=0)


def headers(*, mode: BodyMode, end_of_stream: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":method", raw_value=b"POST")
    message.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    message.request_headers.end_of_stream = end_of_stream
    message.protocol_config.request_body_mode = mode
    return message


def body(content: bytes, *, end_of_stream: bool) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = end_of_stream
    return message


def response_headers(status: bytes) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=status)
    message.attributes["envoy.filters.http.ext_proc"].fields["upstream.address"].string_value = "10.0.0.2:8000"
    return message


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def read(call: Any) -> ProcessingResponse:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await call.read()


async def test_a_streamed_body_is_picked_whole_and_released_at_the_end_of_the_stream(
    transport: type[Transport],
) -> None:
    picks = FakePicks()
    async with serving(picks, transport) as (server, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.FULL_DUPLEX_STREAMED))
        await call.write(body(b'{"prompt":', end_of_stream=False))
        await call.write(body(b'"x"}', end_of_stream=False))
        await call.write(body(b"", end_of_stream=True))
        answers = [(await read(call)).WhichOneof("response") for _ in range(2)]
        assert answers == ["request_headers", "request_body"]
        assert picks.bodies == [b'{"prompt":"x"}']
        await call.write(response_headers(b"200"))
        assert (await read(call)).WhichOneof("response") == "response_headers"
        assert len(picks.open) == 1
        await call.done_writing()
        assert await read(call) is grpc.aio.EOF
        await eventually(lambda: not picks.open and server.open_streams == 0)
        assert picks.finished[0].responses == [(200, "10.0.0.2:8000")]


async def test_a_client_that_vanishes_leaves_no_booking(transport: type[Transport]) -> None:
    picks = FakePicks()
    async with serving(picks, transport) as (server, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.BUFFERED))
        await read(call)
        await call.write(body(b"{}", end_of_stream=True))
        await read(call)
        assert len(picks.open) == 1
        call.cancel()
        await eventually(lambda: not picks.open and server.open_streams == 0)


async def test_a_stopping_server_lets_go_of_answered_exchanges_and_waits_for_the_others(
    transport: type[Transport],
) -> None:
    picks = FakePicks()
    async with serving(picks, transport) as (server, method, _):
        answered, asking = method(), method()
        for call in (answered, asking):
            await call.write(headers(mode=BodyMode.NONE))
            await read(call)
        await answered.write(response_headers(b"200"))
        await read(answered)
        streamed = ProcessingRequest()
        streamed.response_body.body = b"data: 1"
        await answered.write(streamed)
        assert (await read(answered)).WhichOneof("response") == "response_body"
        server.release_answered()
        assert await read(answered) is grpc.aio.EOF
        assert await answered.code() is grpc.StatusCode.OK
        assert len(picks.open) == 1
        await asking.write(response_headers(b"200"))
        assert (await read(asking)).WhichOneof("response") == "response_headers"
        assert await read(asking) is grpc.aio.EOF
        assert await asking.code() is grpc.StatusCode.OK
        await eventually(lambda: not picks.open and server.open_streams == 0)


async def test_a_client_that_vanishes_before_the_pick_leaves_no_stream(transport: type[Transport]) -> None:
    picks = FakePicks()
    async with serving(picks, transport) as (server, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.FULL_DUPLEX_STREAMED))
        await eventually(lambda: server.open_streams == 1)
        call.cancel()
        await eventually(lambda: server.open_streams == 0)


async def answer_to(
    transport: type[Transport], picks: FakePicks, *messages: ProcessingRequest, max_body_bytes: int = 1 << 20
) -> ProcessingResponse:
    """Send all messages and return the last answer, which must end the stream."""
    async with serving(picks, transport, max_body_bytes=max_body_bytes) as (server, method, _):
        call = method()
        for message in messages:
            await call.write(message)
        answers: list[Any] = []
        while (answer := await read(call)) is not grpc.aio.EOF:
            answers.append(answer)
        await eventually(lambda: server.open_streams == 0)
        return answers[-1]


async def test_a_refusal_ends_the_stream_with_its_status(transport: type[Transport]) -> None:
    answer = await answer_to(transport, FakePicks(fails=MalformedRequestError("bad")), headers(mode=BodyMode.NONE))
    assert answer.immediate_response.status.code == 400


async def test_a_defect_is_answered_500_and_the_server_lives_on(transport: type[Transport]) -> None:
    picks = FakePicks(fails=ZeroDivisionError())
    answer = await answer_to(transport, picks, headers(mode=BodyMode.NONE))
    assert answer.immediate_response.status.code == 500
    assert json.loads(answer.immediate_response.body)["error"]["type"] == "server_error"


async def test_a_body_over_the_limit_is_answered_413_before_it_has_ended(transport: type[Transport]) -> None:
    answer = await answer_to(
        transport,
        FakePicks(),
        headers(mode=BodyMode.FULL_DUPLEX_STREAMED),
        body(b"x" * 11, end_of_stream=False),
        max_body_bytes=10,
    )
    assert answer.immediate_response.status.code == 413


async def test_a_buffered_body_of_the_largest_size_fits_into_one_message_and_is_not_kept(
    transport: type[Transport],
) -> None:
    limit = 8 << 20  # more than gRPC takes by default
    picks = FakePicks()
    async with serving(picks, transport, max_body_bytes=limit) as (_, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.BUFFERED))
        await read(call)
        await call.write(body(b"x" * limit, end_of_stream=True))
        assert (await read(call)).WhichOneof("response") == "request_body"
        frames = [frame for task in asyncio.all_tasks() for frame in task.get_stack()]
        kept = [name for frame in frames for name, value in frame.f_locals.items() if isinstance(value, bytes)]
        assert kept == []  # it would stay for as long as the exchange lasts
        call.cancel()


async def test_a_changed_body_is_not_kept_for_as_long_as_the_exchange_lasts(transport: type[Transport]) -> None:
    picks = FakePicks(change=b"changed")
    async with serving(picks, transport) as (_, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.BUFFERED))
        await read(call)
        await call.write(body(b"x", end_of_stream=True))
        answer = await read(call)
        assert answer.request_body.response.body_mutation.body == b"changed"
        assert [exchange.body for exchange in picks.open] == [None]
        call.cancel()


async def test_a_response_without_a_body_is_not_waited_for_and_so_not_missed(transport: type[Transport]) -> None:
    picks = FakePicks(plan=ResponsePlan(requested_model="gpt-x"))  # it opens no response: that would be a defect
    async with serving(picks, transport) as (_, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.BUFFERED))
        await read(call)
        await call.write(body(b"x", end_of_stream=True))
        await read(call)
        message = response_headers(b"204")
        message.response_headers.end_of_stream = True
        await call.write(message)
        assert (await read(call)).WhichOneof("response") == "response_headers"
        alone = method()
        namespace = message.metadata_context.filter_metadata["kvmesh"]
        namespace.fields["response"].string_value = encode_note(picks.plan).decode()
        await alone.write(message)
        assert (await read(alone)).WhichOneof("response") == "response_headers"
        assert await read(alone) is grpc.aio.EOF
        assert picks.open[0].missed == []
        call.cancel()


async def test_a_buffered_body_over_the_limit_is_answered_413(transport: type[Transport]) -> None:
    limit = 4 << 20
    body_over = body(b"x" * (limit * 2), end_of_stream=True)
    answer = await answer_to(transport, FakePicks(), headers(mode=BodyMode.BUFFERED), body_over, max_body_bytes=limit)
    assert answer.immediate_response.status.code == 413


@pytest.mark.parametrize("service", ["", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"])
async def test_health_follows_readiness(transport: type[Transport], service: str) -> None:
    async with (
        serving(FakePicks(), transport) as (server, _, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        check: Callable[..., Awaitable[Any]] = health_pb2_grpc.HealthStub(channel).Check
        request = health_pb2.HealthCheckRequest(service=service)
        await server.set_serving(True)
        serving_status = (await check(request, timeout=DEADLINE_SECONDS)).status
        await server.set_serving(False)
        assert (serving_status, (await check(request, timeout=DEADLINE_SECONDS)).status) == (
            health_pb2.HealthCheckResponse.SERVING,
            health_pb2.HealthCheckResponse.NOT_SERVING,
        )


async def test_a_port_in_use_is_named(transport: type[Transport]) -> None:
    async with serving(FakePicks(), transport) as (_, _, port):
        second = ExtProcServer(picks=FakePicks(), max_body_bytes=10, transport=transport)
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            await second.start(host="127.0.0.1", port=port)
        await second.stop(grace_seconds=0)


async def test_what_the_client_is_told_rides_on_the_answer_to_the_response_headers(transport: type[Transport]) -> None:
    picks = FakePicks(told={"x-kvmesh-degraded": "cap-output"})
    async with serving(picks, transport) as (_, method, _):
        call = method()
        await call.write(headers(mode=BodyMode.FULL_DUPLEX_STREAMED, end_of_stream=True))
        await read(call)
        await call.write(response_headers(b"200"))
        (option,) = (await read(call)).response_headers.response.header_mutation.set_headers
        assert (option.header.key, option.header.raw_value) == ("x-kvmesh-degraded", b"cap-output")
        await call.done_writing()
        assert await read(call) is grpc.aio.EOF
