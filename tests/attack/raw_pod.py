"""A pod whose answers are whatever bytes an attack wants."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from tests.attack.target import Target

Answer = Callable[[str, asyncio.StreamWriter], Awaitable[None]]  # a path, and where the answer goes


def page(body: bytes) -> bytes:
    """Return a whole answer."""
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@asynccontextmanager
async def raw_pod(target: Target, answer: Answer) -> AsyncIterator[None]:
    """Serve where the mesh looks for a pod; each answer counts."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                target.done += 1
                await answer(head.split(b" ", 2)[1].decode(), writer)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # at the end; asyncio would print it
            await serve(reader, writer)

    host, port = target.hostile_address()
    async with await asyncio.start_server(connected, host, port):
        yield
