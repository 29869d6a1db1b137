"""Blocks of groups that leave some out: their store says which prompt they are of, and not where in it. Pure.

They wait until full attention has reported a block of the same hash, which it does within the same engine step. The few
that wait longer are bounded.
"""

from collections.abc import Iterable
from typing import NamedTuple

from kvmesh.blocks.events import BlockRemoved, BlockStored

MAX_BLOCKS = 256  # of one stream: each change looks at all of them


class UnplacedBlock(NamedTuple):
    """One block of one group."""

    medium: str
    group: int
    engine_hash: int


class UnplacedBlocks:
    """The blocks of one stream that wait, the oldest first."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._waiting: dict[UnplacedBlock, tuple[int, int, bool]] = {}  # -> block size, copies, whether it is a report

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: BlockStored, *, is_report: bool) -> int:
        """Let the blocks of a store wait; return how many had to go for them."""
        for engine_hash in event.block_hashes:
            block = UnplacedBlock(event.medium, event.group_idx or 0, engine_hash)
            _, copies, _ = self._waiting.get(block, (0, 0, False))
            self._waiting[block] = event.block_size, copies + 1, is_report
        surplus = len(self._waiting) - self._max_blocks
        for block in list(self._waiting)[: max(surplus, 0)]:
            del self._waiting[block]
        return max(surplus, 0)

    def entries(self) -> Iterable[tuple[UnplacedBlock, int, int, bool]]:
        """Return all that wait: the block, its size in tokens, how often it was stored, whether that was a report."""
        return [(block, *entry) for block, entry in self._waiting.items()]

    def take(self, block: UnplacedBlock) -> None:
        """Take out a block that has its place."""
        del self._waiting[block]

    def remove(self, event: BlockRemoved, engine_hash: int) -> bool:
        """Take one copy of a block back; False if it does not wait here."""
        block = UnplacedBlock(event.medium, event.group_idx or 0, engine_hash)
        size, copies, is_report = self._waiting.get(block, (0, 0, False))
        if copies > 1:
            self._waiting[block] = size, copies - 1, is_report
        elif copies:
            del self._waiting[block]
        return copies > 0

    def clear(self) -> None:
        """Forget all of them: the blocks are gone."""
        self._waiting.clear()
