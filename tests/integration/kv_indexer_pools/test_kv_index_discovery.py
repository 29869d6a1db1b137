"""What a pod answers when it is asked where it publishes: in pieces, without end, or not at all what vLLM says."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from kv_indexer.pools.event_sources import MAX_SOURCES_BYTES, EventSourceDirectory
from kvmesh.blocks.source import EventAddresses
from kvmesh.errors import FeedLostError, NoEventSourceError
from kvmesh.pods.pod_http import PodPages

PIECE = 1 << 14


@asynccontextmanager
async def pod_that_answers(*pieces: bytes, path: str = "") -> AsyncIterator[tuple[EventSourceDirectory, str]]:
    """A pod whose every answer comes in these pieces, each its own HTTP chunk, sent once the one before has gone.

    With `path` it answers 404 to any other.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        if path and request.path != path:
            return web.Response(status=404)
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        await response.write_eof()
        return response

    app = web.Application()
    app.add_routes([web.get("/{path:.*}", answer)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    pages = PodPages()
    try:
        yield EventSourceDirectory(pages=pages, configured={}), f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        pages.close()
        await runner.cleanup()


async def test_an_answer_in_many_pieces_is_read_to_its_end() -> None:
    spaces = b" " * (MAX_SOURCES_BYTES // 2)
    async with pod_that_answers(b'{"0": {"endpoint"', spaces, b': "tcp://*:5557"}', b"}") as (directory, endpoint):
        assert await directory.find(endpoint) == {0: EventAddresses(events="tcp://127.0.0.1:5557", announced=True)}


async def test_an_answer_beyond_the_limit_is_given_up_and_said_so() -> None:
    async with pod_that_answers(*[b" " * PIECE] * (MAX_SOURCES_BYTES // PIECE + 1)) as (directory, endpoint):
        with pytest.raises(FeedLostError, match=f"is larger than {MAX_SOURCES_BYTES} bytes"):
            await directory.find(endpoint)


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda directory, endpoint: directory.find(endpoint), NoEventSourceError),
        (lambda directory, endpoint: directory.served_models(endpoint), FeedLostError),
    ],
)
@pytest.mark.parametrize("body", [b"", b"no json", b'{"x": {"endpoint": "tcp://*:1"}, "data": 5}', b"[" * 100_000])
async def test_an_answer_that_is_not_vllms_is_an_error_of_ours(
    ask: Callable[..., object], error: type[Exception], body: bytes
) -> None:
    async with pod_that_answers(body) as (directory, endpoint):
        with pytest.raises(error):
            await ask(directory, endpoint)  # type: ignore[misc]


@pytest.mark.parametrize("rank", ["-1", "1024", "007", "1" * 5000])
async def test_a_rank_that_cannot_be_is_refused(rank: str) -> None:
    body = b'{"%s": {"endpoint": "tcp://*:5557"}}' % rank.encode()
    async with pod_that_answers(body) as (directory, endpoint):
        with pytest.raises(NoEventSourceError, match="is not what vLLM answers"):
            await directory.find(endpoint)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"0": {"endpoint": "ipc:///tmp/x"}}', "no TCP port of 127.0.0.1"),
        (b'{"0": {"endpoint": "tcp://10.0.0.9:5557"}}', "no TCP port of 127.0.0.1"),
        (b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:22"}}', "only ports from 1024 to 65535"),
        (b'{"0": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": "tcp://*:5557"}}', "one address twice"),
        (b'{"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5557"}}', "one address twice"),
    ],
)
async def test_a_pod_that_announces_what_is_not_its_own_has_no_events(body: bytes, why: str) -> None:
    async with pod_that_answers(body) as (directory, endpoint):
        with pytest.raises(NoEventSourceError, match=why):
            await directory.find(endpoint)


async def test_sglang_says_where_it_publishes_in_its_server_info() -> None:
    found = (
        b'{"version": "0.5.23", "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 5557, '
    )
    found += b'"topic": "", "block_size": 64, "dp_size": 2, "replay_endpoint_port_base": 6557}}'
    async with pod_that_answers(found, path="/server_info") as (directory, endpoint):
        assert await directory.find(endpoint) == {
            rank: EventAddresses(
                events=f"tcp://127.0.0.1:{5557 + rank}", replay=f"tcp://127.0.0.1:{6557 + rank}", announced=True
            )
            for rank in range(2)
        }


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b'{"kv_events": null}', "publishes no KV events"),
        (b"{}", "publishes no KV events"),
        (b"[]", "is not what SGLang answers"),
        (b'{"kv_events": {"endpoint_port_base": 99999}}', "is not what SGLang answers"),
        (b'{"kv_events": {"endpoint_port_base": 5557, "dp_size": 100000}}', "is not what SGLang answers"),
        (b'{"kv_events": {"endpoint_port_base": 80}}', "only ports from 1024 to 65535"),
        (b'{"kv_events": {"endpoint_port_base": 5557, "replay_endpoint_port_base": 5557}}', "one address twice"),
    ],
)
async def test_an_sglang_pod_that_says_nothing_of_use_has_no_events(body: bytes, why: str) -> None:
    async with pod_that_answers(body, path="/server_info") as (directory, endpoint):
        with pytest.raises(NoEventSourceError, match=why):
            await directory.find(endpoint)


async def test_a_pod_that_says_nowhere_where_it_publishes_is_to_be_named() -> None:
    async with pod_that_answers(b"{}", path="/health") as (directory, endpoint):
        with pytest.raises(NoEventSourceError, match="name it in --event-sources"):
            await directory.find(endpoint)
