"""A pod of several ranks that stores on every tier and clears its cache after each block."""

import asyncio

from tests.attack.hostile_pod import CLEARED, RANKS, hostile_pod, stored
from tests.attack.target import Target

BURST = 16  # batches of each rank at a time
TIERS = ("GPU", "CPU", "CPU_TIER1", "CPU_TIER2", "STORAGE", "FS", "OBJ")


async def attack(target: Target) -> None:
    """Have each rank ask for slots as fast as it can."""
    async with hostile_pod(target, ranks=RANKS) as pod:
        while True:
            for rank in (*range(RANKS),) * BURST:
                await pod.publish([CLEARED, *(stored(i, 1, medium=tier) for i, tier in enumerate(TIERS))], rank=rank)
                target.done += 1
            await asyncio.sleep(0.01)
