"""Where a block can lie in a pod, best first, and what a hit there is worth. Pure; used by `prefix_match`, by pickers.

The names are those of vLLM's and SGLang's events; `index_changes.TIERS` lists the same.
"""

from collections.abc import Mapping

# share of a GPU hit's worth: the rest is the cost of fetching the block
TIER_WEIGHTS: Mapping[str, float] = {
    "GPU": 1.0,
    "CPU": 0.8,
    "CPU_TIER1": 0.8,  # SGLang's host memory
    "CPU_TIER2": 0.6,  # SGLang's storage behind it, as far as it is told apart
    "STORAGE": 0.5,
    "FS": 0.5,
    "OBJ": 0.4,
}


def tier_weight(tier: str) -> float:
    """Return what a hit in this tier is worth, 0..1; a tier that we do not know counts as storage."""
    return TIER_WEIGHTS.get(tier, TIER_WEIGHTS["STORAGE"])


def weighted_blocks(blocks: Mapping[str, int]) -> float:
    """Sum tier -> blocks up as GPU blocks."""
    return sum(tier_weight(tier) * count for tier, count in blocks.items())
