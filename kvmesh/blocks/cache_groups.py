"""KV cache groups of hybrid models: their description by vLLM, their condition for a hit, and the names of their tiers.

The index has a source for each tier. Blocks of full attention are in the tier of their medium, `GPU`. A group of
another kind has its own tier, whose name holds all that a reader needs: `GPU/sliding_window/16/1024` (kind, tokens per
block, window in tokens), `GPU/mamba/16`. Groups with equal descriptions share it. Pure.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import inf

DENSE_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
STATE = "mamba"
SPARSE = "sparse"  # our own name: unknown blocks are left out; the publisher need not have named a kind


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One group, as a store described it."""

    kind: str | None  # `full_attention`, `sliding_window`, …; None if the publisher does not say
    block_size: int  # tokens
    sliding_window: int | None = None  # tokens


def has_rule(group: CacheGroup) -> bool:
    """Tell whether this group's condition for a hit is known."""
    kind = group.kind
    if kind in DENSE_KINDS or kind == STATE:
        return True
    return kind in WINDOW_KINDS and group.sliding_window is not None and group.sliding_window > 0


def needed_blocks(group: CacheGroup) -> float:
    """Return how many consecutive blocks a hit needs before its end; infinity for all of them."""
    if group.kind in WINDOW_KINDS:
        assert group.sliding_window is not None
        return max(1, -(-(group.sliding_window - 1) // group.block_size))
    return 1 if group.kind == STATE else inf


def tier_of(medium: str, group: CacheGroup | None) -> str:
    """Return the tier of a group's blocks in this medium: the medium itself for full attention."""
    if group is None or group.kind is None or group.kind in DENSE_KINDS:
        return medium
    return f"{medium}/{describe(group)}"


def is_of_group(tier: str | None) -> bool:
    """Tell whether a tier belongs to a group other than full attention."""
    return tier is not None and "/" in tier


def describe(group: CacheGroup) -> str:
    """Return kind, tokens per block and, if there is one, window of a group, separated by slashes."""
    described = f"{group.kind}/{group.block_size}"
    return described if group.sliding_window is None else f"{described}/{group.sliding_window}"


@lru_cache(maxsize=4096)
def read_tier(tier: str) -> tuple[str, CacheGroup | None]:
    """Return the medium of a tier and its group, None for full attention.

    Raise ValueError for a group without a rule, which a newer version has written.
    """
    medium, slash, described = tier.partition("/")
    if not slash:
        return medium, None
    kind, *numbers = described.split("/")
    if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for number in numbers):
        raise ValueError(f"tier {tier!r}: not a kind, a block size and a window")
    window = int(numbers[1]) if len(numbers) > 1 else None
    group = CacheGroup(kind=kind, block_size=int(numbers[0]), sliding_window=window)
    if group.block_size < 1 or kind in DENSE_KINDS or not has_rule(group):
        raise ValueError(f"tier {tier!r}: no rule is known for such a group")
    return medium, group
