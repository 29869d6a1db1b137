"""A pod whose blocks have no parents, and adapters and salts of megabytes."""

import asyncio
from itertools import count

from tests.attack.hostile_pod import RANKS, engine_hash, hostile_pod, stored
from tests.attack.target import Target

LONG = 300_000  # characters


async def attack(target: Target) -> None:
    """Fill whatever the indexer keeps for them."""
    async with hostile_pod(target, ranks=RANKS) as pod:
        for number in count(1):
            first = number * 1000
            name = f"{number}" + "x" * LONG
            long = stored(first, 1, lora_name=name, cache_salt=name, extra_keys=[[name, name]])
            orphans = [stored(first + i, 4, parent=engine_hash(i), lora_name=name[: LONG // 100]) for i in range(50)]
            for rank in range(RANKS):
                await pod.publish([long] if number % 8 == 0 else orphans, rank=rank)
                target.done += 1
                await asyncio.sleep(0.002)
