"""The client of the overload benchmark reads answers and refusals, however they are cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from bench.overload.refusable_http import Answer, exchange, post
from operate.load.streamed_answer import BadAnswerError

EVENTS = (
    b'data: {"choices": [{"text": " one"}]}\n\ndata: {"choices": [{"text": " two"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"data: [DONE]\n\n"


def chunked(payload: bytes) -> bytes:
    parts = [payload[start : start + 50] for start in range(0, len(payload), 50)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def server(answer: bytes) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answer each connection with these bytes and close it; also gives what was received."""
    received: list[bytes] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readuntil(b"{}"))
        writer.write(answer)
        writer.close()

    listening = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1]), received


async def asked(answer: bytes, *, headers: dict[str, str] | None = None) -> tuple[Answer, bytes]:
    got = Answer()
    async with server(answer) as (port, received), asyncio.timeout(5):
        await exchange("127.0.0.1", port, post("127.0.0.1", port, "/v1/completions", b"{}", headers or {}), got)
    return got, received[0]


async def test_an_answer_is_its_pieces_and_its_usage() -> None:
    answer, _ = await asked(HEAD + chunked(EVENTS + END))

    assert (answer.status, answer.pieces, answer.prompt_tokens, answer.cached_tokens, answer.done) == (
        *(200, 2, 40, 32),
        True,
    )
    assert answer.first_at is not None


async def test_a_refusal_is_an_answer_with_its_headers() -> None:
    answer, _ = await asked(b"HTTP/1.1 503 Busy\r\nRetry-After: 4\r\nX-Kvmesh-Reason: overload\r\n\r\n{}")

    assert (answer.status, answer.done, answer.first_at) == (503, False, None)
    assert (answer.headers["retry-after"], answer.headers["x-kvmesh-reason"]) == ("4", "overload")


async def test_headers_go_along() -> None:
    _, received = await asked(HEAD + chunked(END), headers={"x-tenant": "flood"})

    assert b"\r\nx-tenant: flood\r\n" in received


@pytest.mark.parametrize("broken", [HEAD + chunked(EVENTS), HEAD + chunked(b"data: nonsense\n\n"), b""])
async def test_a_broken_stream_is_no_answer(broken: bytes) -> None:
    with pytest.raises(BadAnswerError):
        await asked(broken)
