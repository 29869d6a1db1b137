"""One streamed HTTP/1.1 exchange over a connection of its own, for little CPU. Called by `load`.

Reads server-sent events of the OpenAI API as they arrive; knows chunked bodies, bodies with a length, and none.
"""

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

READ_BYTES = 1 << 16
LARGEST_HEAD_BYTES = 1 << 16
EVENT_END = b"\n\n"
DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None


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
class StreamedAnswer:
    """What has arrived so far; `first_at` is the loop's clock when the first piece of text was there."""

    first_at: float | None = None
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    done: bool = False


class BadAnswerError(Exception):
    """The answer is not a whole stream of events; the message says what it is."""


class Unchunker:
    """Takes the framing off a chunked body, however it is cut."""

    def __init__(self) -> None:
        self._buffer = b""
        self._left = 0  # bytes of the chunk that are still to come, its line end included
        self.ended = False

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`, together with what was held back."""
        self._buffer += data
        payload = []
        while self._buffer and not self.ended:
            if self._left > 2:
                part = self._buffer[: self._left - 2]
                payload.append(part)
                self._buffer = self._buffer[len(part) :]
                self._left -= len(part)
            elif self._left:
                cut = min(self._left, len(self._buffer))
                self._buffer, self._left = self._buffer[cut:], self._left - cut
            elif (end := self._buffer.find(b"\r\n")) >= 0:
                size = int(self._buffer[:end].partition(b";")[0], 16)
                self._buffer, self._left = self._buffer[end + 2 :], size + 2
                self.ended = size == 0
            else:
                break
        return b"".join(payload)


async def exchange(host: str, port: int, request: bytes) -> StreamedAnswer:
    """Send `request` and read the events; raise BadAnswerError or OSError. The caller sets the deadline."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        status, chunked, length = await _head(reader)
        if status != 200:
            body = await _start_of_body(reader)
            raise BadAnswerError(f"status {status}: {body.decode(errors='replace')}")
        return await _events(reader, chunked=chunked, length=length)
    finally:
        writer.close()


def post(host: str, port: int, path: str, body: bytes) -> bytes:
    """The bytes of a POST request that asks for one exchange."""
    head = f"POST {path} HTTP/1.1\r\nhost: {host}:{port}\r\ncontent-type: application/json\r\nconnection: close\r\n"
    return b"%scontent-length: %d\r\n\r\n%s" % (head.encode(), len(body), body)


async def _head(reader: asyncio.StreamReader) -> tuple[int, bool, int | None]:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise BadAnswerError(f"no answer: {type(error).__name__}") from None
    lines = head.lower().split(b"\r\n")
    length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), None)
    chunked = any(line.startswith(b"transfer-encoding:") and b"chunked" in line for line in lines)
    return int(lines[0].split(b" ", 2)[1]), chunked, length


async def _start_of_body(reader: asyncio.StreamReader) -> bytes:
    with suppress(TimeoutError):
        async with asyncio.timeout(1):
            return await reader.read(300)
    return b""


async def _events(reader: asyncio.StreamReader, *, chunked: bool, length: int | None) -> StreamedAnswer:
    answer, unchunker, held, received = StreamedAnswer(), Unchunker(), b"", 0
    while not answer.done:
        data = await reader.read(READ_BYTES)
        if not data:
            raise BadAnswerError("the stream ended before [DONE]")
        received += len(data)
        *events, held = (held + (unchunker.feed(data) if chunked else data)).split(EVENT_END)
        for event in events:
            _take(event, answer)
        if not answer.done and (unchunker.ended or received == length):
            raise BadAnswerError("the stream ended before [DONE]")
    return answer


def _take(event: bytes, answer: StreamedAnswer) -> None:
    data = event.removeprefix(b"data:").strip()
    if data == DONE:
        answer.done = True
        return
    try:
        chunk = _CHUNK.decode(data)
    except (msgspec.DecodeError, ValueError):
        raise BadAnswerError(f"not an event: {event[:200].decode(errors='replace')}") from None
    for choice in chunk.choices:
        text = choice.text if choice.delta is None else choice.delta.content
        if text:
            answer.pieces.append(text)
            if answer.first_at is None:
                answer.first_at = time.monotonic()
    if chunk.usage is not None:
        answer.prompt_tokens = chunk.usage.prompt_tokens
        details = chunk.usage.prompt_tokens_details
        answer.cached_tokens = (details.cached_tokens or 0) if details else 0
