"""How many tokens of a prompt a model with several KV cache groups can reuse, from the blocks that each group holds.

The rules are vLLM 0.32's (`v1/core/single_type_kv_cache_manager.py`, `kv_cache_coordinator.py`), without EAGLE and
without states within a block. There, each group shortens the candidate in turn until none does. That gives the longest
length that every group accepts, which is found here directly. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, lcm

from kvmesh.blocks.events import DENSE_KINDS, CacheGroup

WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
STATE = "mamba"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """What one group holds of a prompt."""

    group: CacheGroup
    held: Sequence[bool]  # one a block of the group's size, from the prompt's start; what is absent is not held


def has_rule(group: CacheGroup) -> bool:
    """Tell whether it is known what this group needs for a hit."""
    if group.kind in WINDOW_KINDS:
        return group.sliding_window is not None and group.sliding_window > 0
    return group.kind == STATE or group.kind in DENSE_KINDS


def reusable_tokens(groups: Sequence[HeldGroup], *, prompt_tokens: int) -> int:
    """Return the tokens of the longest prefix that all groups accept; 0 without a group or without a rule for one.

    The last token is always computed anew, so a hit is shorter than the prompt. A hit ends where a block of every group
    ends.
    """
    if not groups or not all(has_rule(each.group) for each in groups):
        return 0
    step = lcm(*(each.group.block_size for each in groups))
    longest = (prompt_tokens - 1) // step
    accepted = [accepted_steps(each, step=step, longest=longest) for each in groups]
    for steps in range(longest, 0, -1):
        if all(of_group[steps] for of_group in accepted):
            return steps * step
    return 0


def accepted_steps(each: HeldGroup, *, step: int, longest: int) -> list[bool]:
    """Return for 0 to `longest` steps of `step` tokens whether the group accepts a hit of that length.

    Full attention needs all blocks before the end; a window of w tokens the blocks with the last w - 1, or all where
    there are fewer; a recurrent state the one block that ends there.
    """
    per_step = step // each.group.block_size
    runs = run_lengths(each.held, blocks=longest * per_step)
    needed = needed_blocks(each.group)
    return [steps == 0 or runs[steps * per_step - 1] >= min(needed, steps * per_step) for steps in range(longest + 1)]


def needed_blocks(group: CacheGroup) -> float:
    """Return how many consecutive blocks must precede a hit's end; infinity for all of them."""
    if group.kind in WINDOW_KINDS:
        assert group.sliding_window is not None
        return max(1, -(-(group.sliding_window - 1) // group.block_size))
    return 1 if group.kind == STATE else inf


def run_lengths(held: Sequence[bool], *, blocks: int) -> list[int]:
    """Return for each block how many held blocks in a row end with it."""
    runs, run = [], 0
    for is_held in held[:blocks]:
        run = run + 1 if is_held else 0
        runs.append(run)
    return runs + [0] * (blocks - len(runs))
