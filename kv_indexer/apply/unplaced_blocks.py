"""Blocks of groups that leave some out: their store names the prompt, but not their place in it. Pure.

vLLM keeps a window's last blocks, and a state now and then, where later prompts may continue. They wait here until full
attention has reported a block of the same hash, which it does within the same engine step. The few that wait longer are
bounded.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvmesh.blocks.events import BlockRemoved, BlockStored

MAX_BLOCKS = 4096  # per stream, between two changes: a long batch is applied in several


class UnplacedBlock(NamedTuple):
    """One block of one group."""

    medium: str
    group: int
    engine_hash: int


class Waiting(NamedTuple):
    """How an unplaced block was stored."""

    block_size: int  # tokens
    is_reported: bool  # its first store was a report, which adds no copy of a held block
    copies: int  # stored since


class UnplacedBlocks:
    """The waiting blocks of one stream, oldest first."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._waiting: dict[UnplacedBlock, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: BlockStored, *, is_report: bool) -> Sequence[UnplacedBlock]:
        """Let the blocks of a store wait, and return them."""
        blocks = [UnplacedBlock(event.medium, event.group_idx or 0, each) for each in event.block_hashes]
        for block in blocks:
            before = self._waiting.get(block)
            if before is None:
                before = Waiting(event.block_size, is_reported=is_report, copies=0)
            self._waiting[block] = before if is_report else before._replace(copies=before.copies + 1)
        return blocks

    def entries(self, blocks: Iterable[UnplacedBlock] | None = None) -> Sequence[tuple[UnplacedBlock, Waiting]]:
        """Return the waiting blocks, each once: all, or just the given ones."""
        wanted = self._waiting if blocks is None else dict.fromkeys(blocks)
        return [(block, self._waiting[block]) for block in wanted if block in self._waiting]

    def take(self, block: UnplacedBlock) -> None:
        """Take out a block whose place is known."""
        del self._waiting[block]

    def remove(self, event: BlockRemoved, engine_hash: int) -> bool:
        """Remove one copy of a block; return False if none waits here, so that the index must remove it."""
        block = UnplacedBlock(event.medium, event.group_idx or 0, engine_hash)
        waiting = self._waiting.get(block)
        if waiting is None:
            return False
        if waiting.copies > 1 or (waiting.copies and waiting.is_reported):
            self._waiting[block] = waiting._replace(copies=waiting.copies - 1)
        else:
            del self._waiting[block]
        return bool(waiting.copies)

    def forget_oldest(self) -> int:
        """Evict the oldest beyond the limit; return how many."""
        surplus = max(len(self._waiting) - self._max_blocks, 0)
        for block in list(self._waiting)[:surplus]:
            del self._waiting[block]
        return surplus

    def clear(self) -> None:
        """Drop all: the blocks are gone."""
        self._waiting.clear()
