"""One streamed HTTP/1.1 exchange that may also be refused: `load` needs a refusal's status and headers.

The framing is that of `bench.routing.streamed_http`.
"""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from bench.routing.streamed_http import READ_BYTES, Unchunker
from operate.load.streamed_answer import DONE, EVENT_END, BadAnswerError


class _Choice(msgspec.Struct):
    text: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class Answer:
    """What has arrived so far; it can be read when the exchange fails or is cancelled, too."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    first_at: float | None = None  # time.monotonic
    pieces: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False


async def exchange(host: str, port: int, request: bytes, answer: Answer) -> None:
    """Send a completion and fill `answer` in; raise BadAnswerError or OSError.

    A status other than 200 is an answer, and no error: `done` stays False. The caller sets the deadline.
    """
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        await _read_head(reader, answer)
        if answer.status == 200:
            await _read_events(reader, answer)
        else:
            await reader.read(READ_BYTES)
    finally:
        writer.close()


def post(host: str, port: int, path: str, body: bytes, headers: Mapping[str, str]) -> bytes:
    """The bytes of a POST request that asks for one exchange."""
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%s%scontent-length: %d\r\n\r\n%s" % (head.encode(), lines.encode(), len(body), body)


async def _read_head(reader: asyncio.StreamReader, answer: Answer) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise BadAnswerError(f"no answer: {type(error).__name__}") from None
    first, *lines = head.decode("latin-1").split("\r\n")
    answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    answer.status = int(first.split(" ", 2)[1])


async def _read_events(reader: asyncio.StreamReader, answer: Answer) -> None:
    unchunker = Unchunker() if "chunked" in answer.headers.get("transfer-encoding", "") else None
    held = b""
    while not answer.done:
        data = await reader.read(READ_BYTES)
        if not data:
            raise BadAnswerError("the stream ended before [DONE]")
        *events, held = (held + (unchunker.feed(data) if unchunker else data)).split(EVENT_END)
        for event in events:
            _take(event.removeprefix(b"data:").strip(), answer)
        if not answer.done and unchunker is not None and unchunker.ended:
            raise BadAnswerError("the stream ended before [DONE]")


def _take(data: bytes, answer: Answer) -> None:
    if data == DONE:
        answer.done = True
        return
    try:
        chunk = _CHUNK.decode(data)
    except (msgspec.DecodeError, ValueError):
        raise BadAnswerError(f"not an event: {data[:200].decode(errors='replace')}") from None
    if any(choice.text for choice in chunk.choices):
        answer.pieces += 1
        if answer.first_at is None:
            answer.first_at = time.monotonic()
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        answer.cached_tokens = (details.cached_tokens or 0) if details else 0
