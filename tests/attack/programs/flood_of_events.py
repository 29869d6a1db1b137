"""A pod that publishes long batches as fast as the network takes them, on several ranks."""

import asyncio
import time

import msgspec

from tests.attack.hostile_pod import hostile_pod
from tests.attack.target import Target

FLOODED = 2


async def attack(target: Target) -> None:
    """Send without a pause."""
    payload = msgspec.msgpack.encode([time.time(), [["BlockRemoved", [i], "GPU", 0] for i in range(100_000)], 0])
    async with hostile_pod(target, ranks=FLOODED) as pod:
        while True:
            for rank in range(FLOODED):
                await pod.publish_raw(payload, rank=rank)
                target.done += 1
            await asyncio.sleep(0.01)
