"""A pod that publishes batches that cannot be read, thousands a second, each with another reason in it."""

import asyncio

from tests.attack.hostile_pod import hostile_pod
from tests.attack.target import Target

BATCHES_AT_ONCE = 100
PAUSE_SECONDS = 0.01


async def attack(target: Target) -> None:
    """Publish."""
    async with hostile_pod(target) as pod:
        while True:
            await pod.publish_raw(b"no batch but %d" % target.done)
            target.done += 1
            if target.done % BATCHES_AT_ONCE == 0:
                await asyncio.sleep(PAUSE_SECONDS)
