"""Two thousand batches a second that nobody can read: each is worth a log line, and none has to wait."""

import asyncio

from tests.attack.hostile_pod import hostile_pod
from tests.attack.target import Target

AT_ONCE = 20


async def attack(target: Target) -> None:
    """Publish them."""
    async with hostile_pod(target) as pod:
        while True:
            for _ in range(AT_ONCE):
                await pod.publish_raw(b"\xc1" * 16)
            target.done += AT_ONCE
            await asyncio.sleep(AT_ONCE / 2000)
