"""No attack: a pod that fills its cache and clears it, which is what processes keep memory for ever after."""

import asyncio
from itertools import count

from tests.attack.hostile_pod import CLEARED, engine_hash, hostile_pod, stored
from tests.attack.target import Target

CHAIN, BLOCKS = 40, 64  # batches of a prompt, blocks of a batch


async def attack(target: Target) -> None:
    """Store prompt after prompt."""
    async with hostile_pod(target) as pod:
        for number in count():
            if number % 2000 == 1999:
                await pod.publish([CLEARED])
            parent = engine_hash(number * BLOCKS - 1) if number % CHAIN else None
            await pod.publish([stored(number * BLOCKS, BLOCKS, parent=parent)])
            target.done += 1
            await asyncio.sleep(0.0005)
