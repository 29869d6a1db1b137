"""Who sends and receives at the same time is routed at the headers: WebSockets, gRPC streams, CONNECT.

A real Envoy in each body mode; nobody waits for the end of a body that ends with the exchange.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import pytest_asyncio
from aiohttp import web

from operate.local.envoy_config import SocketAddress, named
from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.stack import Stack, eventually, free_ports, running_stack
from tests.integration.envoy_process import HOST
from tests.integration.scripted_picker import BOTH, DUPLEX, Mesh, mesh, until

AT_ONCE_SECONDS = 10.0
REALTIME = "/v1/realtime"
BIG = b"x" * (1 << 20)
CALL = "/echo.Echo/Talk"

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def converse(request: web.Request, _: bytes = b"") -> web.StreamResponse:
    """Send back what comes, and one word of its own first."""
    if request.headers.get("upgrade", "").lower() != "websocket" or request.path != REALTIME:
        return web.Response(status=404, text=request.path)
    socket = web.WebSocketResponse(max_msg_size=0)
    await socket.prepare(request)
    await socket.send_str("session.created")
    async for message in socket:
        is_text = message.type is aiohttp.WSMsgType.TEXT
        await (socket.send_str(message.data) if is_text else socket.send_bytes(message.data))
    return socket


async def converse_in(conversations: set[object], request: web.Request) -> web.StreamResponse:
    """Converse; `conversations` has a mark of each request under way."""
    mark = object()
    conversations.add(mark)
    try:
        return await converse(request)
    finally:
        conversations.discard(mark)


async def raw(gateway: str, request: bytes, *, until_close: bool = True) -> bytes:
    """Send bytes to the gateway and return what it answers."""
    host, _, port = gateway.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(AT_ONCE_SECONDS):
            return await (reader.read() if until_close else reader.readuntil(b"\r\n\r\n"))
    finally:
        writer.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["duplex", "buffered"])
async def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    ports = free_ports(2)
    async with AsyncExitStack() as started:
        for port in ports:
            conversations: set[object] = set()
            pod = echo_pod(HOST, port, partial(converse_in, conversations), running=conversations.__len__)
            await started.enter_async_context(pod)
        flags = ("--model", MODEL, "--body-mode", request.param)
        endpoints = [f"{HOST}:{port}" for port in ports]
        yield await started.enter_async_context(
            running_stack(tmp_path_factory.mktemp("stack"), *flags, endpoints=endpoints)
        )


async def test_websockets_pass_and_count_as_load(stack: Stack) -> None:
    async def counts(of: str) -> list[int]:
        return sorted(pod[of] or 0 for pod in (await stack.state())["endpoints"])

    sockets: list[aiohttp.ClientWebSocketResponse] = []
    for _ in range(4):
        await eventually(partial(counts, "running"), lambda found: sum(found) == len(sockets))
        async with asyncio.timeout(AT_ONCE_SECONDS):
            socket = await stack.http.ws_connect(stack.ready["gateway"] + REALTIME, max_msg_size=0)
            sockets.append(socket)
            assert await socket.receive_str() == "session.created"
            for number in range(20):
                await socket.send_str(f"{number}")
                assert await socket.receive_str() == f"{number}"
            await socket.send_bytes(BIG)
            assert await socket.receive_bytes() == BIG
    assert await counts("bookings") == [2, 2]
    for socket in sockets:
        await socket.close()
    await eventually(partial(counts, "bookings"), lambda found: found == [0, 0])


async def test_a_pod_that_refuses_the_upgrade_is_heard_and_gets_nothing_else(stack: Stack) -> None:
    hidden = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
    opening = b"GET /none HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n"
    answer = await raw(stack.ready["gateway"], opening + hidden)
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_websocket_that_begins_with_a_post_is_refused_at_once(stack: Stack) -> None:
    opening = b"POST /v1/realtime HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n{}"
    answer = await raw(stack.ready["gateway"], opening)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"x-kvmesh-reason: bad-upgrade\r\n" in answer
    assert answer.endswith(b'"code":"bad_upgrade"}}')


async def test_connect_is_refused_at_once(stack: Stack) -> None:
    answer = await raw(stack.ready["gateway"], b"CONNECT pod:80 HTTP/1.1\r\nHost: pod:80\r\n\r\n")
    assert answer.split(b" ")[1] in (b"403", b"404")


async def test_without_a_pod_a_websocket_is_refused_in_the_form_of_the_api(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    async with running_stack(tmp_path, "--model", MODEL, endpoints=[f"{HOST}:{port}"]) as stack:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with asyncio.timeout(AT_ONCE_SECONDS):
                await stack.http.ws_connect(stack.ready["gateway"] + REALTIME)
        assert refusal.value.status == 503
        assert refusal.value.headers is not None
        assert refusal.value.headers["x-kvmesh-reason"] == "no-ready-endpoint"


async def talk(messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
    """Send each message back, and the number of messages at the end."""
    count = 0
    async for message in messages:
        count += 1
        yield message
    yield b"%d" % count


@asynccontextmanager
async def grpc_mesh(file: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Envoy before a pod that speaks gRPC."""
    server = grpc.aio.server()
    methods = {"Talk": grpc.stream_stream_rpc_method_handler(talk)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("echo.Echo", methods)])
    pod = SocketAddress(host=HOST, port=server.add_insecure_port(f"{HOST}:0"))
    await server.start()

    def edit(clusters: list[dict[str, Any]]) -> None:
        pods = named(clusters, "pods")
        (options,) = pods["typed_extension_protocol_options"].values()
        options["explicit_http_config"] = {"http2_protocol_options": {}}
        address = {"socket_address": {"address": pod.host, "port_value": pod.port}}
        pods["load_assignment"]["endpoints"][0]["lb_endpoints"].append({"endpoint": {"address": address}})

    try:
        async with mesh(file, tmp_path, converse, edit_clusters=edit) as running:
            running.books.endpoints = (str(pod),)
            yield running
    finally:
        await server.stop(None)


@pytest.mark.parametrize("file", BOTH)
async def test_grpc_streams_in_both_directions(file: str, tmp_path: Path) -> None:
    async with grpc_mesh(file, tmp_path) as running:
        async with grpc.aio.insecure_channel(running.gateway.removeprefix("http://")) as channel:
            call = channel.stream_stream(CALL)()
            async with asyncio.timeout(AT_ONCE_SECONDS):
                for message in (b"a", b"b" * (1 << 20), b"c"):
                    await call.write(message)
                    assert await call.read() == message
                await call.done_writing()
                assert await call.read() == b"3"
                assert await call.code() is grpc.StatusCode.OK
        await running.all_released()
        assert running.books.released[-1][1] == 200


@pytest.mark.parametrize("file", BOTH)
async def test_a_picker_that_stops_leaves_an_open_stream_its_time(file: str, tmp_path: Path) -> None:
    async with grpc_mesh(file, tmp_path) as running, grpc.aio.insecure_channel(running.gateway[7:]) as channel:
        call = channel.stream_stream(CALL)()
        async with asyncio.timeout(AT_ONCE_SECONDS):
            await call.write(b"a")
            assert await call.read() == b"a"
            running.server.release_answered()  # as after SIGTERM
            stop = asyncio.create_task(running.server.stop(grace_seconds=AT_ONCE_SECONDS))
            for number in range(50):
                await call.write(b"%d" % number)
            for number in range(50):
                assert await call.read() == b"%d" % number
            await call.done_writing()
            assert await call.read() == b"51"
            assert await call.code() is grpc.StatusCode.OK
            await stop


def native(manager: dict[str, Any]) -> None:
    """Have the filter send both bodies through the picker, as Istio does for its own InferencePools."""
    pick = named(manager["http_filters"], "envoy.filters.http.ext_proc.kvmesh")["typed_config"]
    pick["processing_mode"]["response_body_mode"] = "FULL_DUPLEX_STREAMED"


async def test_websockets_pass_where_answers_pass_the_picker_too(tmp_path: Path) -> None:
    async with mesh(DUPLEX, tmp_path, converse, edit=native) as running, aiohttp.ClientSession() as session:
        async with asyncio.timeout(AT_ONCE_SECONDS), session.ws_connect(running.gateway + REALTIME) as socket:
            assert await socket.receive_str() == "session.created"
            for number in range(20):
                await socket.send_str(f"{number}")
                assert await socket.receive_str() == f"{number}"
        await running.all_released()


def tunnels(manager: dict[str, Any]) -> None:
    """Let CONNECT through, to the pod itself."""
    manager.setdefault("upgrade_configs", []).append({"upgrade_type": "CONNECT"})
    (host,) = manager["route_config"]["virtual_hosts"]
    connect = {"upgrade_type": "CONNECT", "connect_config": {}}
    route = {"cluster": "pods", "timeout": "0s", "upgrade_configs": [connect]}
    host["routes"].insert(0, {"match": {"connect_matcher": {}}, "route": route})


@pytest.mark.parametrize("file", BOTH)
async def test_connect_is_routed_where_the_gateway_lets_it_through(file: str, tmp_path: Path) -> None:
    async def answer(request: web.Request, _: bytes) -> web.Response:
        return web.Response(text=f"{request.path} of the pod", headers={"connection": "close"})

    async with mesh(file, tmp_path, answer, edit=tunnels) as running:
        opening = b"CONNECT pod:80 HTTP/1.1\r\nHost: pod:80\r\n\r\n"
        inner = b"GET /inside HTTP/1.1\r\nHost: pod\r\nConnection: close\r\n\r\n"
        answers = await raw(running.gateway, opening + inner)
        assert answers.startswith(b"HTTP/1.1 200 ")
        assert b"/inside of the pod" in answers
        await until(lambda: not running.books.open)
