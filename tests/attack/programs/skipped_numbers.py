"""A pod that skips every second number: each gap voids all that it holds, and nothing can fill it."""

import asyncio
from itertools import count

from tests.attack.hostile_pod import RANKS, hostile_pod, removed, stored
from tests.attack.target import Target


async def attack(target: Target) -> None:
    """Have the indexer begin anew with each batch of each rank."""
    async with hostile_pod(target, ranks=RANKS) as pod:
        for number in count():
            for rank in range(RANKS):
                pod.skip(rank=rank)
                await pod.publish([stored(number % 100 * 10, 10), removed(number % 100 * 10, 10)], rank=rank)
                target.done += 1
            await asyncio.sleep(0.005)
