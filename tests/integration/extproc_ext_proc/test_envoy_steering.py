"""What the files of `envoy/` do in a real Envoy, seen from a scripted picker and trivial pods: none of our own code."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from aiohttp import web
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from operate.local.envoy_config import SocketAddress
from tests.integration.envoy_process import HOST, free_addresses, running_envoy

PICK_HEADER = "x-gateway-destination-endpoint"
DEADLINE_SECONDS = 30.0
MIB = 1 << 20
FULL_DUPLEX_STREAMED = 4
STEERED_BY_OVERRIDE_HOST = ("local.yaml", "buffered.yaml")
ALL_FILES = (*STEERED_BY_OVERRIDE_HOST, "original-dst.yaml")


@dataclass(frozen=True, kw_only=True)
class Refusal:
    status: int
    body: bytes
    above_bytes: int = -1  # refuse as soon as the body is larger


@dataclass(kw_only=True)
class Seen:
    """What the picker saw of one exchange."""

    headers: dict[str, str] = field(default_factory=dict)
    body_bytes: int = 0
    served: str = ""
    ended: threading.Event = field(default_factory=threading.Event)


class ScriptedPicker:
    """Gives every request the same answer, a pick or a refusal, in whichever body mode Envoy is set to.

    Its server is grpc's with threads: a test's event loop is not what a poller of the whole process should rest on.
    """

    def __init__(self) -> None:
        self.answer: str | Refusal = ""
        self.exchanges: list[Seen] = []

    def process(self, messages: Iterator[Any], _: Any) -> Iterator[pb.ProcessingResponse]:
        seen = Seen()
        self.exchanges.append(seen)
        duplex = False
        chunks: list[bytes] = []
        try:
            for message in messages:
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    duplex = message.protocol_config.request_body_mode == FULL_DUPLEX_STREAMED
                    seen.headers = {
                        part.key: part.raw_value.decode() for part in message.request_headers.headers.headers
                    }
                    if message.request_headers.end_of_stream:
                        yield self._decision(on="request_headers")
                    elif not duplex:
                        yield pb.ProcessingResponse(request_headers=pb.HeadersResponse())
                elif kind == "request_body":
                    seen.body_bytes += len(message.request_body.body)
                    chunks.append(message.request_body.body)
                    if self._refuses(seen) or message.request_body.end_of_stream:
                        yield self._decision(on="request_headers" if duplex else "request_body")
                        if duplex and not isinstance(self.answer, Refusal):
                            yield from sent_back(chunks)
                elif kind == "response_headers":
                    attributes = message.attributes["envoy.filters.http.ext_proc"].fields
                    seen.served = attributes["upstream.address"].string_value
                    yield pb.ProcessingResponse(response_headers=pb.HeadersResponse())
        finally:
            seen.ended.set()

    def _refuses(self, seen: Seen) -> bool:
        return isinstance(self.answer, Refusal) and 0 <= self.answer.above_bytes < seen.body_bytes

    def _decision(self, *, on: str) -> pb.ProcessingResponse:
        if isinstance(self.answer, Refusal):
            refusal = pb.ImmediateResponse(
                status=HttpStatus(code=self.answer.status),
                headers=pb.HeaderMutation(set_headers=[set_header("content-type", "application/json")]),
                body=self.answer.body,
            )
            return pb.ProcessingResponse(immediate_response=refusal)
        common = pb.CommonResponse(
            header_mutation=pb.HeaderMutation(set_headers=[set_header(PICK_HEADER, self.answer)])
        )
        if on == "request_headers":
            response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
        else:
            response = pb.ProcessingResponse(request_body=pb.BodyResponse(response=common))
        metadata = Struct()
        metadata.update({"envoy.lb": {PICK_HEADER: self.answer}})
        response.dynamic_metadata.CopyFrom(metadata)
        return response


def set_header(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def sent_back(chunks: list[bytes]) -> Iterator[pb.ProcessingResponse]:
    body = b"".join(chunks)
    for start in range(0, max(len(body), 1), 62_000):
        part = pb.StreamedBodyResponse(body=body[start : start + 62_000], end_of_stream=start + 62_000 >= len(body))
        answer = pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part))
        yield pb.ProcessingResponse(request_body=pb.BodyResponse(response=answer))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    gateway: str
    picker: ScriptedPicker
    pods: tuple[str, ...]  # live ones; every answer names its pod
    dead_pod: str
    stop_picker: Callable[[], None]


@asynccontextmanager
async def mesh(file: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """A real Envoy with that file before a scripted picker, two live pods and a dead one."""
    picker = ScriptedPicker()
    async with AsyncExitStack() as stack:
        picker_port, stop_picker = start_picker(picker)
        stack.callback(stop_picker)
        live = [await stack.enter_async_context(pod()) for _ in range(2)]
        [dead] = free_addresses(1, avoid={picker_port, *(each.port for each in live)})
        process = await stack.enter_async_context(
            running_envoy(tmp_path, file=file, picker_port=picker_port, pods=[dead, *live])
        )
        yield Mesh(
            gateway=process.gateway,
            picker=picker,
            pods=tuple(map(str, live)),
            dead_pod=str(dead),
            stop_picker=stop_picker,
        )


def start_picker(picker: ScriptedPicker) -> tuple[int, Callable[[], None]]:
    """Serve it; return its port, and what stops it (also twice)."""
    threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="scripted picker")  # one an open exchange
    server = grpc.server(threads, options=[("grpc.max_receive_message_length", 64 * MIB)])
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Process": handler}),))
    port = server.add_insecure_port(f"{HOST}:0")
    server.start()

    def stop() -> None:
        assert server.stop(0).wait(DEADLINE_SECONDS), "the scripted picker does not stop"

    return port, stop


@asynccontextmanager
async def pod() -> AsyncIterator[SocketAddress]:
    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path == "/slow":
            response = web.StreamResponse()
            await response.prepare(request)
            await response.write(b"begun")
            await asyncio.Event().wait()
        host, port = request.transport.get_extra_info("sockname")  # type: ignore[union-attr]
        facts = {"pod": f"{host}:{port}", "bytes": len(body), "pick": request.headers.get(PICK_HEADER)}
        return web.json_response(facts)

    app = web.Application(client_max_size=64 * MIB)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        yield SocketAddress(host=HOST, port=runner.addresses[0][1])
    finally:
        await runner.cleanup()


@asynccontextmanager
async def post(
    mesh: Mesh, body: bytes = b"{}", *, path: str = "/v1/completions", headers: dict[str, str] | None = None
) -> AsyncIterator[aiohttp.ClientResponse]:
    timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(f"{mesh.gateway}{path}", data=body, headers=headers) as response,
    ):
        yield response


async def until_ended(exchange: Seen) -> None:
    assert await asyncio.to_thread(exchange.ended.wait, DEADLINE_SECONDS)


@pytest.mark.parametrize("file", ALL_FILES)
async def test_a_request_goes_to_the_pod_that_the_picker_names_with_its_body_unchanged(
    file: str, tmp_path: Path
) -> None:
    body = os.urandom(300_000)
    async with mesh(file, tmp_path) as running:
        for pod in (*running.pods, *reversed(running.pods)):
            running.picker.answer = pod

            async with post(running, body) as response:
                answer = await response.json()

            assert (response.status, response.headers["x-kvmesh-upstream"]) == (200, pod)
            assert answer == {"pod": pod, "bytes": len(body), "pick": pod}
            await until_ended(running.picker.exchanges[-1])
        assert [seen.served for seen in running.picker.exchanges] == [*running.pods, *reversed(running.pods)]


@pytest.mark.parametrize("file", STEERED_BY_OVERRIDE_HOST)
async def test_the_next_pod_of_the_list_serves_when_the_first_is_dead_and_the_picker_learns_which(
    file: str, tmp_path: Path
) -> None:
    async with mesh(file, tmp_path) as running:
        expected = running.pods[1]
        running.picker.answer = f"{running.dead_pod},{expected},{running.pods[0]}"

        async with post(running, b"x" * 2 * MIB) as response:
            answer = await response.json()

        assert (response.status, answer["pod"], answer["bytes"]) == (200, expected, 2 * MIB)
        await until_ended(running.picker.exchanges[0])
        assert running.picker.exchanges[0].served == expected


async def test_a_dead_pod_is_answered_503_where_the_data_plane_takes_a_single_address(tmp_path: Path) -> None:
    async with mesh("original-dst.yaml", tmp_path) as running:
        running.picker.answer = running.dead_pod

        async with post(running) as response:
            assert response.status == 503


@pytest.mark.parametrize("file", ALL_FILES)
async def test_neither_the_picker_nor_the_pod_sees_the_pick_that_a_client_made(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        mine, other = running.pods
        running.picker.answer = mine

        async with post(running, headers={PICK_HEADER: other}) as response:
            answer = await response.json()

        assert (answer["pod"], answer["pick"]) == (mine, mine)
        assert PICK_HEADER not in running.picker.exchanges[0].headers


@pytest.mark.parametrize("file", ALL_FILES)
@pytest.mark.parametrize("status", [413, 503])
async def test_a_refusal_of_the_picker_reaches_the_client_as_it_is(file: str, status: int, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.answer = Refusal(status=status, body=b'{"error": {}}')

        async with post(running) as response:
            content = await response.read()

        assert (response.status, content) == (status, b'{"error": {}}')
        assert response.headers["content-type"] == "application/json"


@pytest.mark.parametrize("file", ALL_FILES)
async def test_a_body_over_16_mib_is_refused_by_the_picker_and_not_by_envoy(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.answer = Refusal(status=413, body=b'{"error": {}}', above_bytes=16 * MIB)

        async with post(running, bytes(17 * MIB)) as response:
            content = await response.read()

        assert (response.status, content) == (413, b'{"error": {}}')
        assert running.picker.exchanges[0].body_bytes > 16 * MIB


@pytest.mark.parametrize("file", ALL_FILES)
async def test_a_body_of_15_mib_arrives(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.answer = running.pods[0]

        async with post(running, bytes(15 * MIB)) as response:
            assert (await response.json())["bytes"] == 15 * MIB


@pytest.mark.parametrize("file", ALL_FILES)
async def test_without_a_picker_the_client_gets_503(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        await asyncio.to_thread(running.stop_picker)

        async with post(running) as response:
            assert response.status == 503


@pytest.mark.parametrize("file", ALL_FILES)
async def test_the_stream_to_the_picker_ends_when_the_client_vanishes_and_not_before(file: str, tmp_path: Path) -> None:
    async with mesh(file, tmp_path) as running:
        running.picker.answer = running.pods[0]

        async with post(running, path="/slow") as response:
            assert await response.content.readexactly(5) == b"begun"
            exchange = running.picker.exchanges[0]
            async with post(running) as other:  # a whole exchange: time enough for a stream that ends too early
                assert other.status == 200
            await until_ended(running.picker.exchanges[1])
            assert not exchange.ended.is_set()
            began = time.monotonic()
            response.close()
            await until_ended(exchange)

        assert time.monotonic() - began < 5.0
