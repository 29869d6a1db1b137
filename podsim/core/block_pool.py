"""The KV cache of one engine: blocks with reference counts and an LRU free queue, like vLLM's BlockPool.

The scheduler calls it. It handles only blocks and hashes, not requests or time.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from podsim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent


class BlockPool:
    """The blocks of one cache; `total_blocks` includes one that is never handed out, like vLLM's `num_gpu_blocks`.

    A freed block keeps its content until it is allocated again, so the free queue is also the eviction queue. Several
    blocks may hold equal content; each has its own stored event and its own removed event.
    """

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self._references = [0] * total_blocks
        self._hash_of: list[bytes | None] = [None] * total_blocks
        self._oldest: dict[bytes, int] = {}  # the copy that a hit uses
        self._younger: dict[bytes, list[int]] = {}  # other copies of the same content
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, total_blocks))
        self._events: list[CacheEvent] = []

    @property
    def free_blocks(self) -> int:
        """The number of blocks that no sequence uses, whether cached or not."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of blocks in use by sequences, 0 to 1 (cached but unused blocks count as free)."""
        return 1.0 - len(self._free) / (self.total_blocks - 1)

    def cached_prefix(self, hashes: Sequence[bytes], *, max_blocks: int) -> list[int]:
        """Return the blocks that hold the longest cached prefix of `hashes`, at most `max_blocks`."""
        blocks: list[int] = []
        for digest in hashes[:max_blocks]:
            block = self._oldest.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def unused(self, blocks: Iterable[int]) -> int:
        """Count the `blocks` that are in the free queue and would leave it if touched."""
        return [self._references[block] for block in blocks].count(0)

    def touch(self, blocks: Iterable[int]) -> None:
        """Take one more reference to cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head of the free queue; the caller has checked `free_blocks`."""
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
            self._evict(block)
        return blocks

    def cache(self, blocks: Sequence[int], stored: BlockStored) -> None:
        """Make full blocks findable under their hashes and report them in one event."""
        for block, digest in zip(blocks, stored.block_hashes, strict=True):
            self._hash_of[block] = digest
            if self._oldest.setdefault(digest, block) != block:
                self._younger.setdefault(digest, []).append(block)
        self._events.append(stored)

    def report(self, stored: BlockStored) -> None:
        """Announce blocks that are cached already; changes nothing but the events."""
        self._events.append(stored)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference to each of a sequence's blocks, given in the sequence's order.

        Cached blocks go to the end of the queue, the sequence's last block first, so that a prefix stays cached longer
        than what follows it. Blocks without content go to the front and are reused first.
        """
        without_content: list[int] = []
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hash_of[block] is None:
                without_content.append(block)
            else:
                self._free[block] = None
        for block in reversed(without_content):
            self._free[block] = None
            self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Empty the cache; return False and do nothing if any block is in use."""
        if len(self._free) != self.total_blocks - 1:
            return False
        self._hash_of = [None] * self.total_blocks
        self._oldest.clear()
        self._younger.clear()
        self._events.append(AllBlocksCleared())
        return True

    def take_events(self) -> list[CacheEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _evict(self, block: int) -> None:
        digest = self._hash_of[block]
        if digest is None:
            return
        self._hash_of[block] = None
        younger = self._younger.get(digest)
        if younger is None:
            del self._oldest[digest]
        else:
            if self._oldest[digest] == block:
                self._oldest[digest] = younger.pop(0)
            else:
                younger.remove(block)
            if not younger:
                del self._younger[digest]
        self._events.append(BlockRemoved(block_hash=digest))
