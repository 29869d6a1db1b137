"""Many uploads of nearly 16 MiB at once that never end: more than the picker may hold within SECONDS.

The rate is half a gigabit: at a whole one two slow cores are busy with moving bytes alone, and no version, however it
took them, kept the innocents below 0.3 s at p99.
"""

import asyncio
import contextlib

from tests.attack.http1_client import upload_head
from tests.attack.target import Target

BODY_BYTES = 15_900_000
PIECE = b" " * 300_000
UPLOADS = 130
BYTES_PER_SECOND = 55e6  # of all together
SECONDS = 6.0  # to reach 256 MiB


async def attack(target: Target) -> None:
    """Begin all of them and hold them."""
    target.begin()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(UPLOADS):
            tasks.create_task(_upload(target))
            await asyncio.sleep(len(PIECE) / BYTES_PER_SECOND)  # not all of them at the same moment


async def _upload(target: Target) -> None:
    reader, writer = await asyncio.open_connection(*target.gateway_address())
    writer.write(upload_head(target, BODY_BYTES + 10))
    with contextlib.suppress(ConnectionError):
        for _ in range(BODY_BYTES // len(PIECE)):
            writer.write(PIECE)
            await writer.drain()
            target.done += 1
            await asyncio.sleep(UPLOADS * len(PIECE) / BYTES_PER_SECOND)
        await reader.read()
    writer.transport.abort()
