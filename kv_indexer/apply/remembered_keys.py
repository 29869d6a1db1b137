"""The block keys of one stream's recent stores, held or not, by engine hash. Pure.

A child names one parent: nearly always the last block of an event. So a run of blocks is kept whole, found by its last
hash, and spread into single hashes only when another of its hashes is asked for. Spreading each run at once took a
sixth of the indexer's time.
"""

from collections.abc import Mapping, Sequence
from itertools import islice

from kvmesh.blocks.block_keys import KEY_BYTES, split_keys

_Run = tuple[Sequence[int], bytes]  # hashes and their keys


class RememberedKeys:
    """Engine hash -> block key. If a publisher gives two blocks one hash (vllm#44701), either key may be returned."""

    def __init__(self, keys: Mapping[int, bytes] | None = None) -> None:
        self._single = dict(keys or {})  # older than all runs
        self._runs: dict[int, bytes | _Run] = {}  # by last hash, oldest first; a run of one block is its key
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
        run = self._runs.get(engine_hash)
        if run is not None:
            return run if isinstance(run, bytes) else run[1][-KEY_BYTES:]
        key = self._single.get(engine_hash)
        if key is None and self._runs:
            self._spread()
            key = self._single.get(engine_hash)
        return key

    def run(self, hashes: Sequence[int]) -> bytes | None:
        """Return the keys of exactly these blocks if they were remembered together, or None."""
        run = self._runs.get(hashes[-1]) if hashes else None
        if isinstance(run, bytes):
            return run if len(hashes) == 1 else None
        return run[1] if run is not None and run[0] == hashes else None

    def update(self, keys: Mapping[int, bytes]) -> None:
        """Remember single blocks."""
        for engine_hash, key in keys.items():
            self.add_run((engine_hash,), key)

    def add_run(self, hashes: Sequence[int], keys: bytes) -> None:
        """Remember the blocks of one store; `keys` are 8 bytes each, in the same order."""
        if len(hashes) * KEY_BYTES != len(keys):
            raise ValueError(f"{len(keys)} bytes of keys for {len(hashes)} blocks")
        if not hashes:
            return
        last = hashes[-1]
        if last in self._runs:  # perhaps with other blocks before it
            self._spread()
        self._runs[last] = keys if len(hashes) == 1 else (hashes, keys)
        self._in_runs += len(hashes)

    def forget_oldest(self, limit: int) -> None:
        """If there are more than `limit` hashes, keep the newest three quarters of `limit`."""
        if len(self) <= limit:
            return
        surplus = len(self) - limit * 3 // 4
        for engine_hash in list(islice(self._single, surplus)):
            del self._single[engine_hash]
            surplus -= 1
        for last, run in list(islice(self._runs.items(), surplus)):
            if not surplus:
                break
            size = 1 if isinstance(run, bytes) else len(run[0])
            gone = min(size, surplus)
            if isinstance(run, bytes) or gone == size:
                del self._runs[last]
            else:
                self._runs[last] = run[0][gone:], run[1][gone * KEY_BYTES :]
            self._in_runs -= gone
            surplus -= gone

    def _spread(self) -> None:
        for last, run in self._runs.items():
            if isinstance(run, bytes):
                self._single[last] = run
            else:
                self._single.update(zip(run[0], split_keys(run[1]), strict=True))
        self._runs.clear()
        self._in_runs = 0
