"""Uploads of nearly 16 MiB, one after the other, each cut before its end."""

import asyncio

from tests.attack.target import Target

BODY_BYTES = 15_900_000
PIECE = b" " * (1 << 20)


async def attack(target: Target) -> None:
    """Upload and hang up, two at a time."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(2):
            tasks.create_task(_upload(target))


async def _upload(target: Target) -> None:
    while True:
        _, writer = await asyncio.open_connection(*target.gateway_address())
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: {target.gateway}\r\ncontent-length: {BODY_BYTES + 10}\r\n\r\n"
        )
        writer.write(head.encode())
        try:
            for _ in range(BODY_BYTES // len(PIECE)):
                writer.write(PIECE)
                await writer.drain()
        except ConnectionError:
            pass
        writer.transport.abort()
        target.done += 1
