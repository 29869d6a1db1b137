"""One streamed HTTP/1.1 exchange over a connection of its own, for little CPU. Called by `load`.

Reads server-sent events of the OpenAI API as they arrive; knows chunked bodies, bodies with a length, and none.
"""

import asyncio
import time
from contextlib import suppress

from operate.load.streamed_answer import BadAnswerError, StreamedAnswer

READ_BYTES = 1 << 16
LARGEST_HEAD_BYTES = 1 << 16


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


async def exchange(host: str, port: int, request: bytes, answer: StreamedAnswer) -> None:
    """Send `request` and fill the answer in; raise BadAnswerError or OSError. The caller sets the deadline."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(request)
        status, chunked, length = await _head(reader)
        if status != 200:
            body = await _start_of_body(reader)
            raise BadAnswerError(f"status {status}: {body.decode(errors='replace')}")
        answer.status = status
        await _events(reader, answer, chunked=chunked, length=length)
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


async def _events(reader: asyncio.StreamReader, answer: StreamedAnswer, *, chunked: bool, length: int | None) -> None:
    unchunker, received = Unchunker(), 0
    while not answer.done:
        data = await reader.read(READ_BYTES)
        if not data:
            raise BadAnswerError("the stream ended before [DONE]")
        received += len(data)
        answer.feed(unchunker.feed(data) if chunked else data, at=time.monotonic())
        if not answer.done and (unchunker.ended or received == length):
            raise BadAnswerError("the stream ended before [DONE]")
