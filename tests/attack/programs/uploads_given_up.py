"""Uploads of nearly 16 MiB, one after the other, each cut before its end."""

import asyncio
import contextlib

from tests.attack.http1_client import upload_head
from tests.attack.target import Target

BODY_BYTES = 15_900_000
PAUSE_SECONDS = 0.03
PIECE = b" " * (1 << 20)


async def attack(target: Target) -> None:
    """Upload and hang up, one after the other."""
    target.begin()
    while True:
        _, writer = await asyncio.open_connection(*target.gateway_address())
        writer.write(upload_head(target, BODY_BYTES + 10))
        with contextlib.suppress(ConnectionError):
            for _ in range(BODY_BYTES // len(PIECE)):
                writer.write(PIECE)
                await writer.drain()
        writer.transport.abort()
        target.done += 1
        await asyncio.sleep(PAUSE_SECONDS)
