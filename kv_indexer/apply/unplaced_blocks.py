"""Blocks of groups that leave some out: their store says which prompt they are of, and not where in it. Pure.

vLLM keeps a window's last blocks and a state now and then, where later prompts may go on. They wait here until full
attention has reported a block of the same hash, which it does within the same engine step. The few that wait longer are
bounded.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmesh.blocks.events import BlockRemoved, BlockStored

MAX_BLOCKS = 4096  # of one stream, from one change to the next: a long batch is applied in several


class UnplacedBlock(NamedTuple):
    """One block of one group."""

    medium: str
    group: int
    engine_hash: int


class Waiting(NamedTuple):
    """How it was stored."""

    block_size: int  # tokens
    copies: int
    is_report: bool  # of a block that is there already


class UnplacedBlocks:
    """The blocks of one stream that wait, the oldest first."""

    def __init__(self, *, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._waiting: dict[UnplacedBlock, Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, event: BlockStored, *, is_report: bool) -> None:
        """Let the blocks of a store wait."""
        for engine_hash in event.block_hashes:
            block = UnplacedBlock(event.medium, event.group_idx or 0, engine_hash)
            before = self._waiting.get(block)
            self._waiting[block] = Waiting(event.block_size, before.copies + 1 if before else 1, is_report)

    def entries(self) -> Sequence[tuple[UnplacedBlock, Waiting]]:
        """Return all that wait."""
        return list(self._waiting.items())

    def take(self, block: UnplacedBlock) -> None:
        """Take out a block that has its place."""
        del self._waiting[block]

    def remove(self, event: BlockRemoved, engine_hash: int) -> bool:
        """Take one copy of a block back; False if it does not wait here."""
        block = UnplacedBlock(event.medium, event.group_idx or 0, engine_hash)
        waiting = self._waiting.get(block)
        if waiting is None:
            return False
        if waiting.copies > 1:
            self._waiting[block] = waiting._replace(copies=waiting.copies - 1)
        else:
            del self._waiting[block]
        return True

    def forget_oldest(self) -> int:
        """Keep within the bound; return how many had to go."""
        surplus = max(len(self._waiting) - self._max_blocks, 0)
        for block in list(self._waiting)[:surplus]:
            del self._waiting[block]
        return surplus

    def clear(self) -> None:
        """Forget all of them: the blocks are gone."""
        self._waiting.clear()
