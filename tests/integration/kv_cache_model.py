"""A pod's block cache as vLLM keeps it, and the events it would publish; the truth that an index is compared with.

Written from vLLM's rules, not from ours: a hit is at most all tokens but one, a prompt is computed from its first block
that is not cached, a full block is cached at once and told of, the newest prefix is evicted last.
"""

import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

BLOCK = 4  # tokens


def engine_hashes(tokens: list[int]) -> list[int]:
    """Chained and content-addressed, as vLLM's are."""
    digest, hashes = b"none", []
    for start in range(0, len(tokens) // BLOCK * BLOCK, BLOCK):
        digest = hashlib.sha256(digest + bytes(tokens[start : start + BLOCK])).digest()
        hashes.append(int.from_bytes(digest[-8:], "big"))
    return hashes


class CacheModel:
    """Physical blocks with the hash that each caches, the next to be evicted first."""

    def __init__(self, *, blocks: int, seed: int, reports_hits: bool = False) -> None:
        """Take `reports_hits` for a pod some of whose clients ask for kv_cache_report_mode=full."""
        self._capacity = blocks
        self._reports_hits = reports_hits
        self._random = random.Random(seed)
        self._physical: OrderedDict[int, int] = OrderedDict()
        self._next = 0
        self.ever: set[int] = set()

    def held(self) -> Counter[int]:
        """Engine hash -> physical copies."""
        return Counter(self._physical.values())

    def reset(self) -> dict[str, Any]:
        """Forget all, as /reset_prefix_cache or a new process does."""
        self._physical.clear()
        return {"type": "AllBlocksCleared"}

    def step(self) -> list[Mapping[str, Any]]:
        """One request, as long as it pleases."""
        family, own = self._random.randrange(4), self._random.randrange(6)
        shared, length = self._random.choice([4, 8, 12]), self._random.choice([4, 8, 9, 15, 16, 24, 30])
        tokens = ([family] * shared + [100 + own] * 40)[:length]
        hashes = engine_hashes(tokens)
        held = self.held()
        limit = (length - 1) // BLOCK
        hits = next((place for place in range(limit) if not held[hashes[place]]), min(limit, len(hashes)))
        events: list[Mapping[str, Any]] = []
        # a lone block cannot be told from a second copy; see docs/limits.md
        if self._reports_hits and hits > 1 and self._random.random() < 0.2:
            events.append(self._stored(tokens, hashes, 0, hits))
        gone = self._evict(len(hashes) - hits, keep=set(hashes[:hits]))
        if gone:
            events.append({"type": "BlockRemoved", "block_hashes": gone, "medium": "GPU", "group_idx": 0})
        new = [self._add(each) for each in hashes[hits:]]
        if new:
            events.append(self._stored(tokens, hashes, hits, len(hashes)))
        self._release(hashes, new)
        return events

    def _add(self, engine_hash: int) -> int:
        self._physical[self._next] = engine_hash
        self.ever.add(engine_hash)
        self._next += 1
        return self._next - 1

    def _evict(self, wanted: int, *, keep: set[int]) -> list[int]:
        free = [number for number, engine_hash in self._physical.items() if engine_hash not in keep]
        surplus = max(len(self._physical) + wanted - self._capacity, 0)
        return [self._physical.pop(number) for number in free[:surplus]]

    def _release(self, hashes: list[int], new: list[int]) -> None:
        """The request has ended: its blocks become the last to be evicted, the end of the prompt before its start."""
        used = {engine_hash: number for number, engine_hash in self._physical.items()}
        used.update({self._physical[number]: number for number in new})
        for engine_hash in reversed(hashes):
            self._physical.move_to_end(used[engine_hash])

    def _stored(self, tokens: list[int], hashes: list[int], first: int, last: int) -> dict[str, Any]:
        return {
            "type": "BlockStored",
            "block_hashes": hashes[first:last],
            "parent_block_hash": hashes[first - 1] if first else None,
            "token_ids": tokens[first * BLOCK : last * BLOCK],
            "block_size": BLOCK,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
