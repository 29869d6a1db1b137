"""A pod whose replay socket takes each request and never answers, while its events have gaps, too."""

import asyncio
from itertools import count

from tests.attack.hostile_pod import RANKS, hostile_pod, stored
from tests.attack.target import Target


async def attack(target: Target) -> None:
    """Lose one batch in ten of each rank, and say nothing about it."""
    async with hostile_pod(target, ranks=RANKS) as pod:
        pod.answers_replay = False
        for number in count():
            for rank in range(RANKS):
                if number % 10 == 9:
                    pod.skip(rank=rank)
                await pod.publish([stored(number * 10, 10)], rank=rank)
                target.done += 1
            await asyncio.sleep(0.005)
