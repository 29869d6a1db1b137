"""Finds how much of a prompt a hybrid model reuses: up to where a match is a hit for each of its KV cache groups.

The rules are vLLM 0.32's (`v1/core/single_type_kv_cache_manager.py`, `kv_cache_coordinator.py`), without EAGLE and
without states within a block: each group shortens the candidate in turn, until none does. Pure.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvmesh.blocks.cache_groups import STATE, CacheGroup, needed_blocks

HeldRun = tuple[int, int]  # a mask of slots, and how many consecutive blocks they hold
EndRange = tuple[int, int]  # in blocks from the prompt's start: a hit may end at any of these


class HeldBack(msgspec.Struct, frozen=True, kw_only=True):
    """A hit that is shorter than full attention's, and the cause."""

    tokens: int  # held by full attention
    by: CacheGroup  # the group that lacks blocks; of several the one that allows the shortest hit

    @property
    def words(self) -> str:
        """Return the cause in words."""
        of_group = "state" if self.by.kind == STATE else f"window of {self.by.sliding_window} tokens"
        return (
            f"full attention holds {self.tokens} tokens, but what a longer hit needs of the {self.by.kind} group's "
            f"{of_group} is gone or was never kept"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMask:
    """The slots of one stream's groups with the same description."""

    group: CacheGroup
    mask: int


def shorten(
    groups: Sequence[GroupMask], held: Mapping[int, Sequence[HeldRun]], *, tokens: int, step: int
) -> tuple[int, CacheGroup | None]:
    """Return the longest hit of at most `tokens` that all groups accept, and the group that shortened it, if any.

    `held`: block size -> the holders of the prompt's blocks from its start; absent blocks are not held. A hit ends at a
    multiple of `step` tokens.
    """
    ends = [(each.group, _hit_ends(each, held.get(each.group.block_size, ()))) for each in groups]
    longest = tokens // step * step
    alone = [(_longest(of_group, longest, group.block_size), number) for number, (group, of_group) in enumerate(ends)]
    least, number = min(alone, default=(longest, 0))
    by = groups[number].group if least < longest else None
    hit = longest
    while True:
        before = hit
        for group, of_group in ends:
            hit = _longest(of_group, hit, group.block_size) // step * step
        if hit == before:
            return hit, by


def _hit_ends(each: GroupMask, runs: Sequence[HeldRun]) -> Sequence[EndRange]:
    """Return where a hit may end for one group.

    A window of w tokens needs the blocks with the last w - 1 tokens, or all blocks if there are fewer; a state needs
    the one block that ends there.
    """
    needed = needed_blocks(each.group)
    found: list[EndRange] = []
    begin: int | None = None  # of the current run of held blocks
    at = 0
    for mask, count in (*runs, (0, 0)):
        if not mask & each.mask:
            if begin is not None:
                first = begin + needed if begin else 1
                if first <= at:
                    found.append((int(first), at))
            begin = None
        elif begin is None:
            begin = at
        at += count
    return found


def _longest(ends: Sequence[EndRange], tokens: int, block_size: int) -> int:
    """Return the tokens of the longest hit within `tokens` that ends in one of these ranges."""
    limit = tokens // block_size
    for first, last in reversed(ends):
        if first <= limit:
            return min(last, limit) * block_size
    return 0
