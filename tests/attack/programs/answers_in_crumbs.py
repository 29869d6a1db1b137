"""Answers in chunks of a byte, one byte at a time, with interim answers without end and with thousands of headers."""

import asyncio
import itertools

from tests.attack.raw_pod import raw_pod
from tests.attack.target import Target

OK = b"HTTP/1.1 200 OK\r\n"
ENDLESS = (
    (OK + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000),
    (b"", b"HTTP/1.1 103 \r\n\r\n" * 5_000),
    (OK, b"a:\r\n" * 10_000),
    (OK + b"Content-Length: 4000000\r\n\r\n", b"x"),
    (OK, b"x"),
)


async def attack(target: Target) -> None:
    """Begin each answer with the next of these, and go on with it until the other side gives up."""
    target.begin()
    ways = itertools.cycle(ENDLESS)

    async def answer(_: str, writer: asyncio.StreamWriter) -> None:
        begin, more = next(ways)
        writer.write(begin)
        while not writer.transport.is_closing():
            writer.write(more)
            await writer.drain()
            await asyncio.sleep(0)

    async with raw_pod(target, answer):
        await asyncio.Event().wait()
