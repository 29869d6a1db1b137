"""Somebody who reaches the picker's gRPC port: connections without end, each of which breaks HTTP/2's rules."""

import asyncio
import contextlib

from extproc.http2 import frames as http2
from tests.attack.target import Target

AT_ONCE = 8
PAUSE_SECONDS = 0.02
NO_SETTINGS = http2.PREFACE + http2.frame(http2.DATA, 0, 1, b"no settings")


async def attack(target: Target) -> None:
    """Connect again and again."""
    target.begin()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(AT_ONCE):
            tasks.create_task(_break(target))


async def _break(target: Target) -> None:
    while True:
        reader, writer = await asyncio.open_connection(*target.picker_address())
        writer.write(NO_SETTINGS)
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()
        target.done += 1
        await asyncio.sleep(PAUSE_SECONDS)
