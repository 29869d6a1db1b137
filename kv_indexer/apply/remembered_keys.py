"""The block keys of what one stream has stored lately, held or not, by engine hash. Pure.

A child names one parent: nearly always the last block of an event. So a run of blocks is kept as it came, found by its
last hash, and spread into single hashes only when another is asked for. Spreading each at once took a seventh of the
indexer's time.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

from kvmesh.blocks.block_keys import KEY_BYTES, split_keys


class RememberedKeys:
    """Engine hash -> block key. Where a publisher gives one hash to two blocks (vllm#44701), either may be meant."""

    def __init__(self, keys: Mapping[int, bytes] | None = None) -> None:
        self._single = dict(keys or {})  # all older than the runs
        self._runs: deque[tuple[Sequence[int], bytes]] = deque()
        self._last: dict[int, bytes] = {}  # of each run: its last hash -> that block's key
        self._in_runs = 0  # hashes

    def __len__(self) -> int:
        return len(self._single) + self._in_runs

    def __contains__(self, engine_hash: int) -> bool:
        return self.get(engine_hash) is not None

    def __getitem__(self, engine_hash: int) -> bytes:
        key = self.get(engine_hash)
        if key is None:
            raise KeyError(engine_hash)
        return key

    def get(self, engine_hash: int) -> bytes | None:
        """Return the key of a block, or None."""
        key = self._last.get(engine_hash) or self._single.get(engine_hash)
        if key is None and self._runs:
            self._spread()
            key = self._single.get(engine_hash)
        return key

    def update(self, keys: Mapping[int, bytes]) -> None:
        """Remember single blocks."""
        for engine_hash, key in keys.items():
            self.add_run((engine_hash,), key)

    def add_run(self, hashes: Sequence[int], keys: bytes) -> None:
        """Remember the blocks of one store; `keys` are 8 bytes each, in the same order."""
        if len(hashes) * KEY_BYTES != len(keys):
            raise ValueError(f"{len(keys)} bytes of keys for {len(hashes)} blocks")
        if hashes:
            self._runs.append((hashes, keys))
            self._last[hashes[-1]] = keys[-KEY_BYTES:]
            self._in_runs += len(hashes)

    def forget_oldest(self, limit: int) -> None:
        """Where there are more than so many, keep the newest three quarters of so many."""
        if len(self) <= limit:
            return
        surplus = len(self) - limit * 3 // 4
        for engine_hash in list(islice(self._single, surplus)):
            del self._single[engine_hash]
            surplus -= 1
        while surplus:
            hashes, keys = self._runs.popleft()
            gone = min(len(hashes), surplus)
            if gone < len(hashes):
                self._runs.appendleft((hashes[gone:], keys[gone * KEY_BYTES :]))
            else:
                self._last.pop(hashes[-1], None)
            self._in_runs -= gone
            surplus -= gone

    def _spread(self) -> None:
        for hashes, keys in self._runs:
            self._single.update(zip(hashes, split_keys(keys), strict=True))
        self._runs.clear()
        self._last.clear()
        self._in_runs = 0
