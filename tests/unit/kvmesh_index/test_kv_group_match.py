"""What a model with several KV cache groups can reuse; real vLLM is compared in tests/vllm/test_hybrid_hits.py."""

import pytest

from kvmesh.blocks.events import CacheGroup
from kvmesh.index.group_match import HeldGroup, has_rule, reusable_tokens


def group(kind: str | None, held: str, *, block_size: int = 16, window: int | None = None) -> HeldGroup:
    """`held` has an x for a block that is held."""
    described = CacheGroup(kind=kind, block_size=block_size, sliding_window=window)
    return HeldGroup(group=described, held=[mark == "x" for mark in held])


def full(held: str, *, block_size: int = 16) -> HeldGroup:
    return group("full_attention", held, block_size=block_size)


def window(held: str, tokens: int, *, block_size: int = 16) -> HeldGroup:
    return group("sliding_window", held, block_size=block_size, window=tokens)


def state(held: str) -> HeldGroup:
    return group("mamba", held)


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ([full("xxx.x")], 3),
        ([full(".xxxx")], 0),
        ([window("..xx..", 33)], 4),  # 32 tokens before the next one: 2 blocks
        ([window("..xx..", 34)], 0),  # 33 tokens: 3 blocks
        ([window("xx....", 100)], 2),  # the window reaches beyond the start
        ([window("..x...", 1)], 3),  # a window of the token itself still takes a block, as in vLLM
        ([state("x..x..")], 4),
        ([full("xxxxxx"), window(".xx...", 32)], 3),
        ([full("xx...."), window(".xxxx.", 32)], 0),  # at 2 only one block of the window is held
        ([full("xxxxx."), state(".x...x")], 2),
        ([full("xxxxxx"), window(".xx.xx", 32), state(".xx...")], 3),
        ([window("..xx.xx", 32), state("...x...")], 4),
        ([full("xxxxxx"), full("xxx...")], 3),
    ],
)
def test_a_hit_is_the_longest_prefix_that_every_group_accepts(groups: list[HeldGroup], blocks: int) -> None:
    assert reusable_tokens(groups, prompt_tokens=1000) == blocks * 16


def test_the_order_of_groups_does_not_matter() -> None:
    groups = [full("xxxx"), window(".xx", 32), state("..x")]
    assert reusable_tokens(groups, prompt_tokens=100) == reusable_tokens(groups[::-1], prompt_tokens=100) == 48


def test_the_last_token_is_computed_anew() -> None:
    assert reusable_tokens([full("xx")], prompt_tokens=33) == 32
    assert reusable_tokens([full("xx")], prompt_tokens=32) == 16
    assert reusable_tokens([full("xx")], prompt_tokens=0) == 0


def test_a_hit_ends_where_a_block_of_every_group_ends() -> None:
    groups = [full("xx.", block_size=16), window("..xxx", 16, block_size=8)]
    assert reusable_tokens(groups, prompt_tokens=100) == 32


def test_a_group_without_a_rule_leaves_no_hit() -> None:
    unknown = group("chunked_local_attention", "xxxx")
    assert reusable_tokens([full("xxxx"), unknown], prompt_tokens=100) == 0
    assert reusable_tokens([], prompt_tokens=100) == 0


@pytest.mark.parametrize("kind", [None, "sparse", "unknown", "chunked_local_attention", "sliding_window"])
def test_a_window_needs_its_size_and_other_kinds_have_no_rule(kind: str | None) -> None:
    assert not has_rule(CacheGroup(kind=kind, block_size=16))
