"""What a hit in each tier is worth."""

import pytest

from kvmesh.blocks.index_changes import TIER_WEIGHTS, TIERS, tier_weight, weighted_blocks


def test_every_tier_that_is_indexed_has_a_weight() -> None:
    assert TIER_WEIGHTS.keys() == TIERS
    assert all(0 < weight <= 1 for weight in TIER_WEIGHTS.values())
    assert max(TIER_WEIGHTS, key=tier_weight) == "GPU"


def test_an_unknown_tier_is_worth_no_more_than_storage() -> None:
    assert tier_weight("unheard-of") == tier_weight("STORAGE")


def test_blocks_are_summed_as_gpu_blocks() -> None:
    assert weighted_blocks({"GPU": 2, "CPU": 5, "STORAGE": 2}) == pytest.approx(2 + 4 + 1)
    assert weighted_blocks({}) == 0
