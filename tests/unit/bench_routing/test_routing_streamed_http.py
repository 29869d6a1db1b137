"""The client of the routing benchmark reads streams however they are cut, and takes no broken one for an answer."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from bench.routing.streamed_http import Unchunker, exchange, post
from operate.load.streamed_answer import BadAnswerError, StreamedAnswer

EVENTS = (
    b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"content": " one"}}]}\n\ndata: {"choices": [{"delta": {"content": " two"}}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}\n\n'
    b"data: [DONE]\n\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
REQUEST = post("127.0.0.1", 80, "/v1/chat/completions", b"{}")


def chunked(payload: bytes, *, size: int) -> bytes:
    parts = [payload[start : start + size] for start in range(0, len(payload), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@asynccontextmanager
async def server(parts: Sequence[bytes]) -> AsyncIterator[int]:
    """Answer each connection with these parts and close it."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    listening = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with listening:
        yield int(listening.sockets[0].getsockname()[1])


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_a_chunked_body_may_arrive_in_any_pieces(step: int) -> None:
    framed, unchunker = chunked(EVENTS, size=10), Unchunker()

    payload = b"".join(unchunker.feed(framed[start : start + step]) for start in range(0, len(framed), step))

    assert (payload, unchunker.ended) == (EVENTS, True)


@pytest.mark.parametrize("framing", ["chunked", "length", "until closed"])
async def test_the_answer_is_its_pieces_and_its_usage(framing: str) -> None:
    body = {
        "chunked": b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS, size=50),
        "length": b"content-length: %d\r\n\r\n%s" % (len(EVENTS), EVENTS),
        "until closed": b"\r\n" + EVENTS,
    }[framing]
    async with server([HEAD + body]) as port:
        answer = StreamedAnswer()
        await exchange("127.0.0.1", port, REQUEST, answer)

    assert (answer.pieces, answer.prompt_tokens, answer.cached_tokens, answer.done) == ([" one", " two"], 40, 32, True)
    assert answer.first_at is not None


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy", "status 503: busy"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunked(EVENTS[:-14], size=50), "the stream ended before"),
        (HEAD + b"\r\n" + EVENTS[:100], "the stream ended before"),
        (HEAD + b'content-length: 9\r\n\r\n{"a": 1}\n', "the stream ended before"),
        (HEAD + b"\r\nnonsense\n\n", "not an event: nonsense"),
        (b"", "no answer"),
    ],
)
async def test_what_is_no_whole_stream_is_a_failure(sent: bytes, says: str) -> None:
    async with server([sent]) as port:
        with pytest.raises(BadAnswerError, match=says):
            await exchange("127.0.0.1", port, REQUEST, StreamedAnswer())
