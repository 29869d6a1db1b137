"""What the files of `envoy/` do in a real Envoy, seen from a scripted picker and trivial pods: none of our own code."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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

from extproc.local.envoy_config import SocketAddress, fill_in, named, read_template
from extproc.local.ports import pick_free_port
from extproc.local.processes import ProcessSpec, Supervisor
from extproc.local.programs import find_envoy
from extproc.local.readiness import HttpReady

HOST = "127.0.0.1"
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
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedPicker:
    """Gives every request the same answer, a pick or a refusal, in whichever body mode Envoy is set to."""

    def __init__(self) -> None:
        self.answer: str | Refusal = ""
        self.exchanges: list[Seen] = []

    async def process(self, _: object, context: Any) -> None:
        seen = Seen()
        self.exchanges.append(seen)
        duplex = False
        chunks: list[bytes] = []
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                kind = message.WhichOneof("request")
                if kind == "request_headers":
                    duplex = message.protocol_config.request_body_mode == FULL_DUPLEX_STREAMED
                    seen.headers = {
                        part.key: part.raw_value.decode() for part in message.request_headers.headers.headers
                    }
                    if message.request_headers.end_of_stream:
                        await self._decide(context, on="request_headers")
                    elif not duplex:
                        await context.write(pb.ProcessingResponse(request_headers=pb.HeadersResponse()))
                elif kind == "request_body":
                    seen.body_bytes += len(message.request_body.body)
                    chunks.append(message.request_body.body)
                    if self._refuses(seen) or message.request_body.end_of_stream:
                        await self._decide(context, on="request_headers" if duplex else "request_body")
                        if duplex and not isinstance(self.answer, Refusal):
                            await send_back(context, chunks)
                elif kind == "response_headers":
                    attributes = message.attributes["envoy.filters.http.ext_proc"].fields
                    seen.served = attributes["upstream.address"].string_value
                    await context.write(pb.ProcessingResponse(response_headers=pb.HeadersResponse()))
        finally:
            seen.ended.set()

    def _refuses(self, seen: Seen) -> bool:
        return isinstance(self.answer, Refusal) and 0 <= self.answer.above_bytes < seen.body_bytes

    async def _decide(self, context: Any, *, on: str) -> None:
        if isinstance(self.answer, Refusal):
            refusal = pb.ImmediateResponse(
                status=HttpStatus(code=self.answer.status),
                headers=pb.HeaderMutation(set_headers=[set_header("content-type", "application/json")]),
                body=self.answer.body,
            )
            await context.write(pb.ProcessingResponse(immediate_response=refusal))
            return
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
        await context.write(response)


def set_header(name: str, value: str) -> HeaderValueOption:
    return HeaderValueOption(
        header=HeaderValue(key=name, raw_value=value.encode()),
        append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


async def send_back(context: Any, chunks: list[bytes]) -> None:
    body = b"".join(chunks)
    for start in range(0, max(len(body), 1), 62_000):
        part = pb.StreamedBodyResponse(body=body[start : start + 62_000], end_of_stream=start + 62_000 >= len(body))
        mutation = pb.BodyMutation(streamed_response=part)
        answer = pb.CommonResponse(body_mutation=mutation)
        await context.write(pb.ProcessingResponse(request_body=pb.BodyResponse(response=answer)))


@dataclass(frozen=True, kw_only=True)
class Mesh:
    gateway: str
    picker: ScriptedPicker
    pods: tuple[str, ...]  # live ones; every answer names its pod
    dead_pod: str
    stop_picker: Callable[[], Any]


@asynccontextmanager
async def mesh(file: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """A real Envoy with that file before a scripted picker, two live pods and a dead one."""
    picker = ScriptedPicker()
    server, picker_port = await start_picker(picker)
    ports: set[int] = {picker_port}
    for _ in range(3):
        ports.add(pick_free_port(host=HOST, avoid=ports))
    gateway, admin, dead = (SocketAddress(host=HOST, port=port) for port in sorted(ports - {picker_port}))
    runners = [await start_pod() for _ in range(2)]
    live = [SocketAddress(host=HOST, port=runner.addresses[0][1]) for runner in runners]
    config = tmp_path / "envoy.json"
    config.write_text(json.dumps(configuration(file, gateway, admin, picker_port, [dead, *live])))
    envoy = ProcessSpec(
        name="envoy",
        argv=(str(find_envoy()), "-c", str(config), "--disable-hot-restart", "--concurrency", "1"),
        ready=(HttpReady(url=f"http://{admin}/ready"),),
    )
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    supervisor = Supervisor(log_directory=tmp_path)
    run = asyncio.create_task(supervisor.run([[envoy]], environment=os.environ, when_ready=when_ready))
    try:
        began = asyncio.create_task(ready.wait())
        await asyncio.wait({run, began}, timeout=DEADLINE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        began.cancel()
        if run.done():
            run.result()
        yield Mesh(
            gateway=f"http://{gateway}",
            picker=picker,
            pods=tuple(map(str, live)),
            dead_pod=str(dead),
            stop_picker=lambda: server.stop(0),
        )
    finally:
        run.cancel()
        with suppress(asyncio.CancelledError):
            await run
        await server.stop(0)
        for runner in runners:
            await runner.cleanup()


async def start_picker(picker: ScriptedPicker) -> tuple[Any, int]:
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * MIB)])
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=pb.ProcessingRequest.FromString,
        response_serializer=pb.ProcessingResponse.SerializeToString,
    )
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Process": handler}),))
    port = server.add_insecure_port(f"{HOST}:0")
    await server.start()
    return server, port


async def start_pod() -> web.AppRunner:
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
    await web.TCPSite(runner, HOST, 0).start()
    return runner


def configuration(
    file: str, gateway: SocketAddress, admin: SocketAddress, picker_port: int, pods: list[SocketAddress]
) -> dict[str, Any]:
    template = read_template(file)
    if file == "original-dst.yaml":  # has no list of pods: one is lent to it, and taken away again
        named(template["static_resources"]["clusters"], "pods")["load_assignment"] = {}
    config = fill_in(
        template, gateway=gateway, admin=admin, picker=SocketAddress(host=HOST, port=picker_port), pods=pods
    )
    if file == "original-dst.yaml":
        del named(config["static_resources"]["clusters"], "pods")["load_assignment"]
    return config


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
    async with asyncio.timeout(DEADLINE_SECONDS):
        await exchange.ended.wait()


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
        await running.stop_picker()

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
