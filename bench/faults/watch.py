"""Compares what a picker would be told with what the pods hold, some fifty times a second."""

import asyncio
import time
from array import array
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bench.faults.pod import BLOCKS, MODEL, Pod, tokens_of
from kvmesh.blocks.block_keys import root_key
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.prefix_match import PrefixLookup
from kvmesh.index.redis_reader import PrefixIndexReader

SEED = "kvmesh"
LOOK_SECONDS = 0.015
LOOKUP_SECONDS = 0.5  # longer than a picker waits, so that nothing is missed
ROOT = root_key(hash_seed=SEED, model=MODEL)

_Block = tuple[str, int, int]  # pod, prompt, place


class Watch:
    """One picker's reader. `reset` begins a new measurement."""

    def __init__(self, url: str, pods: Sequence[Pod]) -> None:
        self._reader = PrefixIndexReader(url=url, hash_seed=SEED, tracks=True)
        self._pods = {pod.endpoint: pod for pod in pods}
        # and one token more: the last one is never a hit
        self._prompts = {number: array("I", [*tokens_of(number), 7]).tobytes() for number in pods[0].truth}
        self._false_since: dict[_Block, float] = {}
        self._unused_since: dict[str, float] = {}
        self._claims: dict[str, dict[int, int]] = {}
        self.reset()

    def reset(self) -> None:
        """Forget the past; what is false now counts from now on."""
        self.longest_false = dict.fromkeys((pod.name for pod in self._pods.values()), 0.0)
        self.longest_unused = dict(self.longest_false)
        self.states: dict[str, list[str]] = {name: [] for name in self.longest_false}
        self.looks = self.failed_looks = 0
        self._false_since.clear()
        self._unused_since.clear()

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self._look()
            await asyncio.sleep(LOOK_SECONDS)

    async def close(self) -> None:
        """Close the connections."""
        await self._reader.close()

    def is_full(self, pod: Pod) -> bool:
        """Whether a pod holds all prompts, and all of them were found at the last look."""
        return self._claims.get(pod.endpoint) == pod.truth == dict.fromkeys(pod.truth, BLOCKS)

    async def _look(self) -> None:
        claims: dict[str, dict[int, int]] = {endpoint: {} for endpoint in self._pods}
        looked: PrefixLookup | None = None
        for number, tokens in self._prompts.items():
            try:
                async with asyncio.timeout(LOOKUP_SECONDS):
                    looked = await self._reader.lookup(tokens, root=ROOT)
            except (IndexUnavailableError, TimeoutError):
                self.failed_looks += 1  # the picker has no hits then, false ones neither
                looked = None
            for endpoint, pod in self._pods.items():
                claimed = looked.matched_blocks.get(endpoint, 0) if looked else 0
                claims[endpoint][number] = claimed
                self._compare(pod, number, claimed)
        self.looks += 1
        self._claims = claims
        for endpoint, pod in self._pods.items():
            is_unused = any(pod.truth.values()) and not any(claims[endpoint].values())
            self._note(self._unused_since, pod.name, is_unused, self.longest_unused, pod.name)
            if looked and (cache := looked.endpoints.get(endpoint)):
                state = f"{cache.state} ({cache.reason})" if cache.reason else str(cache.state)
                if self.states[pod.name][-1:] != [state]:
                    self.states[pod.name].append(state)

    def _compare(self, pod: Pod, number: int, claimed: int) -> None:
        held = pod.truth[number]
        for place in range(BLOCKS):
            is_false = held <= place < claimed
            if is_false or (pod.name, number, place) in self._false_since:
                self._note(self._false_since, (pod.name, number, place), is_false, self.longest_false, pod.name)

    def _note(self, since: dict[Any, float], key: Any, holds: bool, longest: dict[str, float], pod: str) -> None:
        now = time.monotonic()
        if not holds:
            with suppress(KeyError):
                longest[pod] = max(longest[pod], now - since.pop(key))
            return
        longest[pod] = max(longest[pod], now - since.setdefault(key, now))
