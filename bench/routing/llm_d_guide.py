"""How llm-d's guide "optimized baseline" picks, after its public description: a peer to be compared with. Pure.

Prompts are known by hashes of blocks of 64 tokens, and a pod is believed to hold what it was sent, the latest blocks
first (`approx-prefix-cache-producer`). Each pod's uncached tokens are counted from a pick until the first piece of its
answer (`inflight-load-producer`). Pods that hold at least 0.8 of the prompt are kept alone, unless the first token
would come there so much later than elsewhere (`prefix-cache-affinity-filter`). Of these the one with the fewest tokens
in flight, this prompt's among them, is picked (`token-load-scorer`), at random among equals. The guide has neither a
tokenizer nor the pods' reports, and a replica knows of itself alone.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

BLOCK_TOKENS = 64  # the least that its producer takes
BYTES_A_TOKEN = 4  # of a text whose tokens it does not know
BLOCK_BYTES = BLOCK_TOKENS * BYTES_A_TOKEN


def block_keys(prompt: bytes) -> list[int]:
    """A key for each block and all before it; the last one need not be full."""
    keys, parent = [], 0
    for start in range(0, len(prompt), BLOCK_BYTES):
        parent = xxhash.xxh3_64_intdigest(prompt[start : start + BLOCK_BYTES], seed=parent)
        keys.append(parent)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class GuideSettings:
    """Its parameters, with its defaults."""

    affinity_threshold: float = 0.8  # of a prompt's blocks
    most_penalty_seconds: float = 18.0
    peak_tokens_per_second: float = 15_928.0
    cache_blocks: int = 31_250  # remembered of each pod


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidePick:
    """Where a request was sent, until its answer begins."""

    pod: int
    uncached_tokens: int


class Guide:
    """One replica's memory and its picks."""

    def __init__(self, pods: int, settings: GuideSettings, *, random: Callable[[], float]) -> None:
        """`random` breaks ties."""
        self._settings = settings
        self._random = random
        self._caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(pods)]
        self.in_flight = [0] * pods  # tokens of each pod

    def pick(self, blocks: Sequence[int], *, tokens: int) -> GuidePick:
        """Pick for a prompt of so many tokens, and count it; `blocks` are keys, each of a block and all before it."""
        matches = self._matches(blocks)
        uncached = [max(tokens - match * BLOCK_TOKENS, 0) for match in matches]
        kept = self._kept(matches, total=len(blocks))
        pod = min(kept, key=lambda number: (self.in_flight[number] + uncached[number], self._random()))
        self.in_flight[pod] += uncached[pod]
        self._remember(self._caches[pod], blocks)
        return GuidePick(pod=pod, uncached_tokens=uncached[pod])

    def answered(self, pick: GuidePick) -> None:
        """The first piece of the answer has come, or the request has failed; to be called once for each pick."""
        self.in_flight[pick.pod] -= pick.uncached_tokens

    def _matches(self, blocks: Sequence[int]) -> list[int]:
        """Leading blocks that each pod holds; one that was forgotten in between is passed over while others have it."""
        matches = [0] * len(self._caches)
        for block in blocks:
            holders = [number for number, cache in enumerate(self._caches) if block in cache]
            if not holders:
                break
            for number in holders:
                matches[number] += 1
        return matches

    def _kept(self, matches: Sequence[int], *, total: int) -> Sequence[int]:
        everyone, settings = range(len(matches)), self._settings
        if not total:
            return everyone
        sticky = [number for number in everyone if matches[number] / total >= settings.affinity_threshold]
        others = [number for number in everyone if number not in sticky]
        if not sticky or not others:
            return everyone
        penalty = self._seconds(sticky) - self._seconds(others)
        return everyone if penalty > settings.most_penalty_seconds else sticky

    def _seconds(self, pods: Sequence[int]) -> float:
        return min(self.in_flight[number] for number in pods) / self._settings.peak_tokens_per_second

    def _remember(self, cache: OrderedDict[int, None], blocks: Sequence[int]) -> None:
        for block in blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > self._settings.cache_blocks:
            cache.popitem(last=False)
