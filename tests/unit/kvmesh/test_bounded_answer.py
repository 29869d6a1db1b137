"""An HTTP answer is read up to a bound of unpacked bytes."""

import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest
from aiohttp import web

from kvmesh.bounded_answer import AnswerTooLongError, pieces_within, read_within

MOST_BYTES = 1 << 20


@asynccontextmanager
async def answer(*pieces: bytes, repeats: int = 1, encoding: str = "identity") -> AsyncIterator[aiohttp.ClientResponse]:
    """Ask a server that sends these pieces."""

    async def send(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-encoding": encoding})
        await response.prepare(request)
        with suppress(ConnectionError):
            for _ in range(repeats):
                for piece in pieces:
                    await response.write(piece)
        return response

    app = web.Application()
    app.router.add_get("/", send)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        address = f"http://127.0.0.1:{runner.addresses[0][1]}/"
        async with aiohttp.ClientSession() as http, http.get(address) as response:
            yield response
    finally:
        await runner.cleanup()


async def test_an_answer_up_to_the_bound_is_read() -> None:
    async with answer(b"a" * MOST_BYTES) as response:
        assert await read_within(response, MOST_BYTES) == b"a" * MOST_BYTES


async def test_a_packed_answer_is_unpacked_no_further_than_the_bound() -> None:
    async with answer(gzip.compress(bytes(64 * MOST_BYTES)), encoding="gzip") as response:
        read = 0
        with pytest.raises(AnswerTooLongError, match="longer than 1048576 bytes"):
            async for piece in pieces_within(response, MOST_BYTES):
                assert len(piece) <= MOST_BYTES
                read += len(piece)
        assert read <= MOST_BYTES


async def test_an_endless_answer_is_given_up() -> None:
    async with answer(bytes(1 << 16), repeats=1 << 20) as response:
        with pytest.raises(AnswerTooLongError):
            await read_within(response, MOST_BYTES)
