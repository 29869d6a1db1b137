"""A pod whose batches take long: 300,000 removals, 100,000 blocks, 10,000 clears, tiers in turn."""

import asyncio
from itertools import cycle
from typing import Any

import msgspec

from tests.attack.hostile_pod import CLEARED, hostile_pod, removed, stored
from tests.attack.target import Target


def batches() -> list[bytes]:
    """Return payloads that are made once: the attack must not be slower than its victim."""
    several: list[list[Any]] = [
        [["BlockRemoved", [i], "GPU", 0] for i in range(300_000)],  # as short as it can be said
        [CLEARED, stored(0, 100_000, token_ids=[7] * 100_000, block_size=1), removed(0, 100_000)],
        [event for i in range(10_000) for event in (stored(i, 1), CLEARED)],
        [stored(i % 8, 1, block_size=1, token_ids=[i % 8], medium=("GPU", "CPU")[i % 2]) for i in range(20_000)]
        + [CLEARED],
    ]
    return [msgspec.msgpack.encode([1.0, events, 0]) for events in several]


async def attack(target: Target) -> None:
    """Publish them, one after the other."""
    payloads = batches()
    async with hostile_pod(target) as pod:
        for payload in cycle(payloads):
            await pod.publish_raw(payload)
            target.done += 1
            await asyncio.sleep(0.2)
