"""A client that speaks raw HTTP/2 frames, which no library would send as an attack wants them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from extproc.http2 import frames as http2


class RawClient:
    """One connection; what it receives is thrown away."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.next_stream = 1

    def open(self, host: str, *, path: bytes = b"/v1/chat/completions", **fields: bytes) -> tuple[int, bytes]:
        """Return a new stream's number and the frame that opens it."""
        stream_id, self.next_stream = self.next_stream, self.next_stream + 2
        pairs = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", host.encode())]
        pairs += [(name.replace("_", "-").encode(), value) for name, value in fields.items()]
        block = b"".join(http2.literal(name, value) for name, value in pairs)
        return stream_id, http2.frame(http2.HEADERS, http2.END_HEADERS, stream_id, block)

    async def send(self, data: bytes) -> None:
        """Write, and wait while the peer does not read."""
        self.writer.write(data)
        await self.writer.drain()


@asynccontextmanager
async def raw_client(host: str, port: int) -> AsyncIterator[RawClient]:
    """Connect and greet; the end is a reset."""
    reader, writer = await asyncio.open_connection(host, port)
    reading = asyncio.create_task(_throw_away(reader))
    try:
        writer.write(http2.PREFACE + http2.settings_frame({http2.Setting.INITIAL_WINDOW_SIZE: 1 << 30}))
        writer.write(http2.window_frame(0, 1 << 30))
        yield RawClient(writer)
    finally:
        reading.cancel()
        writer.transport.abort()


async def _throw_away(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        pass
