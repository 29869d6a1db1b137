"""Both servers against gRPC's own client, and our own HTTP/2 against raw frames on a socket; on both event loops."""

import asyncio
import inspect
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest
import uvloop
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hyperframe.frame import DataFrame, Frame, GoAwayFrame, HeadersFrame, RstStreamFrame, SettingsFrame

from extproc.answers.response_plan import PASS_PLAN, ResponsePlan
from extproc.ext_proc.call import OpenResponse
from extproc.ext_proc.exchange import BodyMode, RequestFacts, Uploads
from extproc.ext_proc.grpc_server import ExtProcServer, Http2Transport, Transport
from extproc.http2 import frames as http2
from extproc.http2.limits import Http2Limits
from tests.integration.grpc_servers import on_both_servers

DEADLINE_SECONDS = 20.0
TEST_SECONDS = 120.0
HOST = "127.0.0.1"
PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
REQUEST_BLOCK = b"".join(
    http2.literal(name, value)
    for name, value in [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", PROCESS.encode()),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
)


async def within_limit(test: Coroutine[Any, Any, None]) -> None:
    """Await the test, not for ever: pytest-timeout's alarm does not reach a loop of uvloop's that waits."""
    async with asyncio.timeout(TEST_SECONDS):
        await test


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run the test on asyncio's event loop and on uvloop's: their transports differ."""

    @pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
    def on_loop(*, run: Callable[..., None], **arguments: Any) -> None:
        run(within_limit(test(**arguments)))

    run_parameter = inspect.Parameter("run", inspect.Parameter.KEYWORD_ONLY)
    parameters = [part.replace(kind=run_parameter.kind) for part in inspect.signature(test).parameters.values()]
    on_loop.__signature__ = inspect.Signature([run_parameter, *parameters])
    on_loop.__name__ = test.__name__
    return cast("Callable[..., None]", on_loop)


@dataclass
class FakeExchange:
    picks: "FakePicks"
    endpoints: Sequence[str] = ("10.0.0.1:8000",)

    body: bytes | None = None
    removed_headers: tuple[str, ...] = ()
    set_headers: Mapping[str, str] = field(default_factory=dict)
    plan: ResponsePlan = PASS_PLAN
    response_headers: Mapping[str, str] = field(default_factory=dict)

    def responded(self, *, status: int, served_by: str | None, from_pod: bool, content_type: str) -> None:
        pass

    def response_missed(self, why: str) -> None:
        pass

    def finish(self) -> None:
        self.picks.finished += 1


@dataclass
class FakePicks:
    """Picks when the gate is open."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = 0
    picked: int = 0
    finished: int = 0

    async def pick(self, facts: RequestFacts, body: bytes | None) -> FakeExchange:
        self.started += 1
        await self.gate.wait()
        self.picked += 1
        return FakeExchange(self)

    def response(self, plan: ResponsePlan) -> OpenResponse:
        raise NotImplementedError


@dataclass(kw_only=True)
class Serving:
    server: ExtProcServer
    picks: FakePicks
    port: int
    channel: grpc.aio.Channel

    def call(self, *, timeout: float = TEST_SECONDS, **options: Any) -> Any:
        """A call to the processor; gRPC ends it at the timeout."""
        method = self.channel.stream_stream(
            PROCESS,
            request_serializer=lambda message: message if isinstance(message, bytes) else message.SerializeToString(),
            response_deserializer=ProcessingResponse.FromString,
        )
        return method(timeout=timeout, **options)


@asynccontextmanager
async def serving(
    *,
    open_gate: bool = True,
    max_body_bytes: int = 16 << 20,
    limits: Http2Limits | None = None,
    uploads: Uploads | None = None,
    transport: type[Transport] = Http2Transport,
) -> AsyncIterator[Serving]:
    """A server and a gRPC channel to it; afterwards nothing may be left of either."""
    tasks = asyncio.all_tasks()
    picks = FakePicks()
    if open_gate:
        picks.gate.set()
    server = ExtProcServer(
        picks=picks, max_body_bytes=max_body_bytes, limits=limits, uploads=uploads, transport=transport
    )
    port = await server.start(host=HOST, port=0)
    await server.set_serving(True)
    try:
        async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
            yield Serving(server=server, picks=picks, port=port, channel=channel)
    finally:
        await server.stop(grace_seconds=0)
    assert (server.open_streams, picks.finished) == (0, picks.picked)
    await eventually(lambda: asyncio.all_tasks() <= tasks)


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not condition():
            await asyncio.sleep(0.005)


async def read(call: Any) -> Any:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await call.read()


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await call.code(), await call.details()


def headers(mode: BodyMode) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
    message.protocol_config.request_body_mode = mode
    return message


def body(content: bytes, *, end_of_stream: bool) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = content
    message.request_body.end_of_stream = end_of_stream
    return message


def response_headers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return message


async def refused_for(call: Any) -> tuple[int, str]:
    """The status and the reason of the answer that comes in a pod's place."""
    response = (await read(call)).immediate_response
    values = {each.header.key: each.header.raw_value.decode() for each in response.headers.set_headers}
    return response.status.code, values["x-kvmesh-reason"]


# --- gRPC's own client ---


async def whole_exchange(serving: Serving, content: bytes, piece: int) -> bytes:
    call = serving.call()
    await call.write(headers(BodyMode.FULL_DUPLEX_STREAMED))
    for start in range(0, len(content), piece):
        await call.write(body(content[start : start + piece], end_of_stream=False))
    await call.write(body(b"", end_of_stream=True))
    assert (await read(call)).WhichOneof("response") == "request_headers"
    got = bytearray()
    while True:
        streamed = (await read(call)).request_body.response.body_mutation.streamed_response
        got += streamed.body
        if streamed.end_of_stream:
            break
    await call.write(response_headers())
    assert (await read(call)).WhichOneof("response") == "response_headers"
    await call.done_writing()
    assert await read(call) is grpc.aio.EOF
    assert (await status_of(call))[0] is grpc.StatusCode.OK
    return bytes(got)


async def whole_health_check(serving: Serving) -> None:
    await health_pb2_grpc.HealthStub(serving.channel).Check(health_pb2.HealthCheckRequest(), timeout=DEADLINE_SECONDS)


@on_both_servers
@on_both_loops
async def test_many_streams_at_once_are_each_answered_with_their_own_body(transport: type[Transport]) -> None:
    async with serving(transport=transport) as stage:
        bodies = [bytes([number]) * (1 + 997 * number) for number in range(200)]
        assert await asyncio.gather(*(whole_exchange(stage, content, 30_000) for content in bodies)) == bodies
        assert (stage.picks.started, stage.picks.finished) == (200, 200)


@on_both_servers
@on_both_loops
async def test_a_large_body_passes_through_all_windows_unchanged(transport: type[Transport]) -> None:
    async with serving(transport=transport) as stage:
        content = bytes(range(251)) * 50_000  # 12.5 MB, many times any window
        assert await whole_exchange(stage, content, 64_000) == content


@on_both_loops
async def test_the_largest_of_too_many_unfinished_bodies_gives_way_on_whatever_connection() -> None:
    uploads = Uploads(most_bytes=1 << 20)
    async with serving(uploads=uploads) as stage, raw_peer(stage) as peer:
        # one whose single message, a buffered body's, has not come whole
        message = body(bytes(900_000), end_of_stream=True)
        frames = sent(1, message)[9:]
        peer.writer.write(opened(1) + sent(1, headers(BodyMode.BUFFERED)))
        for start in range(0, 400_000, 16_000):
            peer.writer.write(http2.frame(http2.DATA, 0, 1, frames[start : start + 16_000]))
        await eventually(lambda: uploads.held_bytes == 400_000)
        large, small = stage.call(), stage.call()
        for call, size in ((large, 600_000), (small, 100)):
            await call.write(headers(BodyMode.FULL_DUPLEX_STREAMED))
            await call.write(body(bytes(size), end_of_stream=False))
        await eventually(lambda: uploads.held_bytes == 1_000_100)
        peer.writer.write(http2.frame(http2.DATA, 0, 1, frames[400_000:416_000]))
        await eventually(lambda: uploads.held_bytes == 1_016_100)
        await small.write(body(bytes(100_000), end_of_stream=False))
        assert await refused_for(large) == (503, "uploads-limited")
        await small.write(body(b"", end_of_stream=True))
        assert (await read(small)).WhichOneof("response") == "request_headers"
        assert (uploads.held_bytes, uploads.gave_way) == (416_000, 1)
        small.cancel()
    assert uploads.held_bytes == 0


@on_both_servers
@on_both_loops
async def test_a_cancelled_stream_gives_its_pick_up_and_the_next_one_is_served(transport: type[Transport]) -> None:
    async with serving(open_gate=False, transport=transport) as stage:
        call = stage.call()
        await call.write(headers(BodyMode.NONE))
        await eventually(lambda: stage.picks.started == 1)
        call.cancel()
        await eventually(lambda: stage.server.open_streams == 0)
        stage.picks.gate.set()
        await whole_exchange(stage, b"x", 1)
        assert (stage.picks.picked, stage.picks.finished) == (1, 1)


@on_both_servers
@on_both_loops
async def test_a_message_during_a_pending_pick_waits_for_it(transport: type[Transport]) -> None:
    async with serving(open_gate=False, transport=transport) as stage:
        call = stage.call()
        await call.write(headers(BodyMode.NONE))
        await call.write(response_headers())
        await call.done_writing()
        await eventually(lambda: stage.picks.started == 1)
        await whole_health_check(stage)  # by when the second message has come
        stage.picks.gate.set()
        assert [(await read(call)).WhichOneof("response") for _ in range(2)] == ["request_headers", "response_headers"]
        assert await read(call) is grpc.aio.EOF


@on_both_servers
@on_both_loops
async def test_a_deadline_ends_a_pick_that_takes_too_long(transport: type[Transport]) -> None:
    async with serving(open_gate=False, transport=transport) as stage:
        call = stage.call(timeout=0.3)
        await call.write(headers(BodyMode.NONE))
        assert (await status_of(call))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        await eventually(lambda: stage.server.open_streams == 0)


@pytest.mark.parametrize(
    ("message", "code", "details"),
    [
        (body(b"x" * 2_000_000, end_of_stream=True), grpc.StatusCode.RESOURCE_EXHAUSTED, "1052576"),
        (b"\xff\xff\xff", grpc.StatusCode.INTERNAL, "ProcessingRequest"),
    ],
    ids=["too large", "not protobuf"],
)
@on_both_servers
@on_both_loops
async def test_messages_that_cannot_be_taken_end_the_stream_with_a_status(
    transport: type[Transport], message: Any, code: grpc.StatusCode, details: str
) -> None:
    async with serving(max_body_bytes=1000, transport=transport) as stage:
        call = stage.call()
        await call.write(message)
        got, text = await status_of(call)
        assert (got, details in text) == (code, True)
        await eventually(lambda: stage.server.open_streams == 0)


@on_both_loops
async def test_a_compressed_message_is_refused() -> None:
    async with serving() as stage:
        call = stage.call(compression=grpc.Compression.Gzip)
        await call.write(body(b"x" * 1000, end_of_stream=True))
        assert (await status_of(call))[0] is grpc.StatusCode.UNIMPLEMENTED


@on_both_servers
@on_both_loops
async def test_a_method_that_does_not_exist_is_unimplemented(transport: type[Transport]) -> None:
    async with serving(transport=transport) as stage:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stage.channel.unary_unary("/a.B/C")(b"", timeout=DEADLINE_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@on_both_servers
@on_both_loops
async def test_health_can_be_checked_listed_and_watched(transport: type[Transport]) -> None:
    status = health_pb2.HealthCheckResponse
    async with serving(transport=transport) as stage:
        stub = health_pb2_grpc.HealthStub(stage.channel)
        names = ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"]
        checked = [
            (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=DEADLINE_SECONDS)).status
            for name in names
        ]
        assert checked == [status.SERVING] * 4
        listed = (await stub.List(health_pb2.HealthListRequest(), timeout=DEADLINE_SECONDS)).statuses
        assert {name: listed[name].status for name in listed} == dict.fromkeys(names, status.SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=DEADLINE_SECONDS)
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND

        ready, alive, unknown = (
            stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=TEST_SECONDS)
            for name in ("readiness", "liveness", "nobody")
        )
        assert [(await read(watch)).status for watch in (ready, alive, unknown)] == [
            status.SERVING,
            status.SERVING,
            status.SERVICE_UNKNOWN,
        ]
        await stage.server.set_serving(False)
        await stage.server.set_serving(False)
        await stage.server.set_serving(True)
        assert [(await read(ready)).status for _ in range(2)] == [status.NOT_SERVING, status.SERVING]
        for watch in (ready, alive, unknown):
            watch.cancel()


# --- stopping ---


@on_both_servers
@on_both_loops
async def test_a_stopping_server_serves_what_is_open_and_takes_nothing_new(transport: type[Transport]) -> None:
    async with serving(open_gate=False, transport=transport) as stage:
        call = stage.call()
        await call.write(headers(BodyMode.NONE))
        await eventually(lambda: stage.picks.started == 1)
        stopping = asyncio.create_task(stage.server.stop(grace_seconds=DEADLINE_SECONDS))
        async with asyncio.timeout(DEADLINE_SECONDS):
            with pytest.raises(OSError):
                while True:
                    _, writer = await asyncio.open_connection(HOST, stage.port)
                    writer.close()
        stage.picks.gate.set()
        assert (await read(call)).WhichOneof("response") == "request_headers"
        await call.done_writing()
        assert (await status_of(call))[0] is grpc.StatusCode.OK
        async with asyncio.timeout(DEADLINE_SECONDS / 2):
            await stopping


@on_both_servers
@on_both_loops
async def test_streams_that_outlive_the_grace_are_cut_and_their_picks_released(transport: type[Transport]) -> None:
    async with serving(transport=transport) as stage:
        call = stage.call()
        await call.write(headers(BodyMode.NONE))
        await read(call)
        async with asyncio.timeout(DEADLINE_SECONDS):
            await stage.server.stop(grace_seconds=0.05)
        assert (await status_of(call))[0] is grpc.StatusCode.UNAVAILABLE
        assert stage.picks.finished == 1


@pytest.mark.parametrize(("host", "reached_at"), [("::1", ["::1"]), ("::", ["::1", HOST]), ("0.0.0.0", [HOST])])
@on_both_servers
@on_both_loops
async def test_every_kind_of_address_can_be_listened_on(
    transport: type[Transport], host: str, reached_at: list[str]
) -> None:
    server = ExtProcServer(picks=FakePicks(), max_body_bytes=10, transport=transport)
    port = await server.start(host=host, port=0)
    for address in reached_at:
        _, writer = await asyncio.open_connection(address, port)
        writer.close()
        await writer.wait_closed()
    await server.stop(grace_seconds=0)


# --- raw frames ---


@dataclass(kw_only=True)
class RawPeer:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def until(self, kind: type[Frame]) -> Any:
        """Read frames until there is one of this kind."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                head = await self.reader.readexactly(9)
                frame, length = Frame.parse_frame_header(memoryview(head))
                frame.parse_body(memoryview(await self.reader.readexactly(length)))
                if isinstance(frame, kind):
                    return frame

    async def ended(self) -> bool:
        """Whether the server closes the connection."""
        async with asyncio.timeout(DEADLINE_SECONDS):
            try:
                while await self.reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
            return True


@asynccontextmanager
async def raw_peer(stage: Serving, *, greet: bool = True) -> AsyncIterator[RawPeer]:
    reader, writer = await asyncio.open_connection(HOST, stage.port)
    peer = RawPeer(reader=reader, writer=writer)
    try:
        if greet:
            writer.write(http2.PREFACE + http2.settings_frame({}))
            await peer.until(SettingsFrame)
        yield peer
    finally:
        writer.transport.abort()


def opened(stream_id: int) -> bytes:
    return http2.frame(http2.HEADERS, http2.END_HEADERS, stream_id, REQUEST_BLOCK)


def sent(stream_id: int, message: ProcessingRequest) -> bytes:
    content = message.SerializeToString()
    return http2.frame(http2.DATA, 0, stream_id, b"\0" + len(content).to_bytes(4, "big") + content)


@pytest.mark.parametrize(
    ("flood", "code"),
    [
        (http2.frame(http2.PING, 0, 0, bytes(8)) * 40_000, http2.ErrorCode.ENHANCE_YOUR_CALM),
        (http2.settings_frame({}) * 40_000, http2.ErrorCode.ENHANCE_YOUR_CALM),
        (opened(1) + http2.frame(http2.DATA, 0, 1) * 40_000, http2.ErrorCode.ENHANCE_YOUR_CALM),
        (
            http2.frame(http2.HEADERS, 0, 1, b"") + http2.frame(http2.CONTINUATION, 0, 1) * 1000,
            http2.ErrorCode.ENHANCE_YOUR_CALM,
        ),
        (http2.frame(http2.PUSH_PROMISE, 4, 1, bytes(4)), http2.ErrorCode.PROTOCOL_ERROR),
        (http2.frame(http2.HEADERS, 4, 1, b"\x80"), http2.ErrorCode.COMPRESSION_ERROR),
    ],
    ids=["ping", "settings", "empty data", "continuation", "push", "hpack"],
)
@on_both_loops
async def test_abuse_ends_its_connection_with_a_reason_and_no_other(flood: bytes, code: http2.ErrorCode) -> None:
    async with serving() as stage, raw_peer(stage) as peer:
        peer.writer.write(flood)
        goaway = await peer.until(GoAwayFrame)
        assert (goaway.error_code, await peer.ended()) == (code, True)
        assert await whole_exchange(stage, b"abc", 3) == b"abc"


@on_both_loops
async def test_rapid_resets_with_the_product_s_limits_retire_the_connection_and_serve_what_is_open() -> None:
    async with serving() as stage, raw_peer(stage) as peer:
        peer.writer.write(opened(1) + sent(1, headers(BodyMode.NONE)))
        await peer.until(DataFrame)
        resets = [opened(stream) + http2.reset_frame(stream, http2.ErrorCode.CANCEL) for stream in range(3, 28_003, 2)]
        for start in range(0, len(resets), 500):
            peer.writer.write(b"".join(resets[start : start + 500]))
        goaway = await peer.until(GoAwayFrame)
        assert goaway.error_code == http2.ErrorCode.ENHANCE_YOUR_CALM
        assert stage.picks.finished == 0
        assert (await peer.until(GoAwayFrame)).error_code == http2.ErrorCode.ENHANCE_YOUR_CALM  # it went on regardless
        assert await peer.ended()
        assert await whole_exchange(stage, b"abc", 3) == b"abc"


@on_both_loops
async def test_what_is_not_http2_is_hung_up_on() -> None:
    async with serving() as stage, raw_peer(stage, greet=False) as peer:
        peer.writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await peer.ended()


@on_both_loops
async def test_a_connection_without_a_preface_is_hung_up_on() -> None:
    limits = Http2Limits(preface_seconds=0.1, check_every_seconds=0.02)
    async with serving(limits=limits) as stage, raw_peer(stage, greet=False) as peer:
        assert await peer.ended()


@on_both_loops
async def test_a_peer_that_never_answers_a_ping_loses_its_streams() -> None:
    limits = Http2Limits(ping_after_seconds=0.1, ping_timeout_seconds=0.1, check_every_seconds=0.02)
    async with serving(limits=limits) as stage, raw_peer(stage) as peer:
        peer.writer.write(opened(1) + sent(1, headers(BodyMode.NONE)))
        await peer.until(HeadersFrame)
        await eventually(lambda: stage.picks.finished == 1)
        assert await peer.ended()


@on_both_loops
async def test_a_peer_that_reads_nothing_is_not_read_from_and_holds_nobody_up() -> None:
    async with serving() as stage, raw_peer(stage) as peer:
        peer.writer.write(
            http2.settings_frame({http2.Setting.INITIAL_WINDOW_SIZE: 1 << 30}) + http2.window_frame(0, 1 << 30)
        )
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        # pings whose answers are not read: far more than the kernel's buffers hold, far less than the flood's limit
        big = body(b"x" * 1_000_000, end_of_stream=True)
        content = big.SerializeToString()
        message = b"\0" + len(content).to_bytes(4, "big") + content
        for stream in range(1, 121, 2):
            peer.writer.write(opened(stream) + sent(stream, headers(BodyMode.FULL_DUPLEX_STREAMED)))
            peer.writer.write(
                b"".join(
                    http2.frame(http2.DATA, 0, stream, message[start : start + 16_384])
                    for start in range(0, len(message), 16_384)
                )
            )
        own = cast("Http2Transport", stage.server.transport)
        await eventually(lambda: [each.session.outbound.paused for each in own.connections].count(True) == 1)
        assert await whole_exchange(stage, b"abc", 3) == b"abc"
        peer.reader._transport.resume_reading()  # type: ignore[attr-defined]
        got = 0
        while got < 60 * 1_000_000:
            got += len((await peer.until(DataFrame)).data)


@on_both_loops
async def test_a_window_that_stays_shut_costs_the_stream_and_not_the_connection() -> None:
    limits = Http2Limits(stall_seconds=0.2, check_every_seconds=0.02)
    async with serving(limits=limits) as stage, raw_peer(stage) as peer:
        peer.writer.write(http2.settings_frame({http2.Setting.INITIAL_WINDOW_SIZE: 0}))
        peer.writer.write(opened(1) + sent(1, headers(BodyMode.NONE)))
        assert (await peer.until(RstStreamFrame)).stream_id == 1
        await eventually(lambda: stage.picks.finished == 1)
        peer.writer.write(http2.frame(http2.PING, 0, 0, b"12345678"))
        await peer.until(Frame)


def test_the_picker_s_process_does_without_grpc() -> None:
    code = "import sys, extproc.service, operate.local.commands; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
