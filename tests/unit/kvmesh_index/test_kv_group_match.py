"""What a model with several KV cache groups can reuse; real vLLM is compared in tests/vllm/test_hybrid_hits.py."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.blocks.cache_groups import (
    CacheGroup,
    describe,
    has_rule,
    is_of_group,
    needed_blocks,
    read_tier,
    tier_of,
)
from kvmesh.blocks.source import Registry, SlotRecord, SourceState, StreamRecord
from kvmesh.index.group_match import HeldBack
from kvmesh.index.prefix_match import PrefixLookup, match_table
from tests.unit.kvmesh_index.kv_memory_index import bitmap, match_prompt

POD = "10.0.0.1:8000"
PROMPT_TOKENS = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldGroup:
    """What one group holds of a prompt."""

    group: CacheGroup
    held: Sequence[bool]  # one a block of the group's size, from the prompt's start


def group(kind: str, held: str, *, block_size: int = 16, window: int | None = None) -> HeldGroup:
    """`held` has an x for a block that is held."""
    described = CacheGroup(kind=kind, block_size=block_size, sliding_window=window)
    return HeldGroup(group=described, held=[mark == "x" for mark in held])


def full(held: str, *, block_size: int = 16) -> HeldGroup:
    return group("full_attention", held, block_size=block_size)


def window(held: str, tokens: int, *, block_size: int = 16) -> HeldGroup:
    return group("sliding_window", held, block_size=block_size, window=tokens)


def state(held: str) -> HeldGroup:
    return group("mamba", held)


def look_up(*pods: Sequence[HeldGroup], prompt_tokens: int = PROMPT_TOKENS) -> PrefixLookup:
    """Match a prompt as a lookup does; the pods' endpoints are "0", "1", …"""
    slots: list[SlotRecord] = []
    holders: dict[int, list[set[int]]] = {}
    for pod, groups in enumerate(pods):
        tiers: dict[str, int] = {}
        for each in groups:
            size, tier = each.group.block_size, tier_of("GPU", each.group)
            blocks = holders.setdefault(size, [set() for _ in range((prompt_tokens - 1) // size)])
            is_first = tier not in tiers
            slot = tiers.setdefault(tier, len(slots))
            if is_first:
                slots.append(
                    SlotRecord(slot=slot, endpoint=str(pod), dp_rank=0, tier=tier, epoch=1, block_size=size, blocks=1)
                )
            for number, of_block in enumerate(blocks):
                held = number < len(each.held) and each.held[number]
                if held and is_first:
                    of_block.add(slot)
                elif not held:  # groups that are described alike hold what all of them hold
                    of_block.discard(slot)
    streams = [
        StreamRecord(endpoint=str(pod), dp_rank=0, epoch=1, last_seq=0, last_ts=0.0, state=SourceState.LIVE, reason="")
        for pod in range(len(pods))
    ]
    table = match_table(Registry(version=b"1", streams=tuple(streams), slots=tuple(slots)))
    return match_prompt(table, {size: [bitmap(each) for each in blocks] for size, blocks in holders.items()})


def reused(groups: Sequence[HeldGroup], *, prompt_tokens: int = PROMPT_TOKENS) -> int:
    found = look_up(groups, prompt_tokens=prompt_tokens)
    return found.matched_blocks.get("0", 0) * found.block_size["0"]


def accepts(each: HeldGroup, tokens: int) -> bool:
    size = each.group.block_size
    blocks = int(min(needed_blocks(each.group), tokens // size))
    held = [*each.held, *[False] * (tokens // size)]
    return all(held[tokens // size - blocks : tokens // size])


def plainly(groups: Sequence[HeldGroup], *, prompt_tokens: int) -> int:
    """Return the longest prefix that every group accepts, by trying each."""
    step = lcm(*(each.group.block_size for each in groups))
    lengths = range((prompt_tokens - 1) // step * step, 0, -step)
    return next((tokens for tokens in lengths if all(accepts(each, tokens) for each in groups)), 0)


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
    assert reused(groups) == blocks * 16


def test_the_order_of_groups_does_not_matter() -> None:
    groups = [full("xxxx"), window(".xx", 32), state("..x")]
    assert reused(groups) == reused(groups[::-1]) == 48


def test_the_last_token_is_computed_anew() -> None:
    assert reused([full("xx"), state("xx")], prompt_tokens=33) == 32
    assert reused([full("xx"), state("xx")], prompt_tokens=32) == 16
    assert reused([state("xx")], prompt_tokens=32) == 16


def test_a_hit_ends_where_a_block_of_every_group_ends() -> None:
    assert reused([full("xx.", block_size=16), window("..xxx", 16, block_size=8)]) == 32
    assert reused([full("xxxxx", block_size=8), window("xxxxxx", 16)]) == 32


def test_what_held_a_hit_back_is_said() -> None:
    narrow = window(".xx...", 32)
    found = look_up([full("xxxxxx"), narrow, state("xxxxxx")], [full("xxxxxx"), state("xxxxxx")], [full("")])
    assert (found.matched_blocks, found.held_back) == (
        {"0": 3, "1": 6},
        {"0": HeldBack(tokens=96, by=narrow.group)},
    )


def test_a_hit_that_is_lost_as_a_whole_is_said_to_be_held_back() -> None:
    found = look_up([full("xxxxxx"), state("......")])
    assert found.matched_blocks == {}
    assert found.held_back == {"0": HeldBack(tokens=96, by=state("").group)}


def test_a_window_alone_is_not_held_back() -> None:
    assert look_up([window("..xx..", 33)]).held_back == {}


def test_the_size_and_the_blocks_of_a_pod_are_those_of_full_attention() -> None:
    found = look_up([full("xxx", block_size=16), window("xxxxxx", 16, block_size=8)])
    assert (found.block_size, found.endpoints["0"].cached_blocks) == ({"0": 16}, 1)


@st.composite
def held_groups(draw: st.DrawFn) -> HeldGroup:
    block_size = draw(st.sampled_from((4, 8, 16)))
    kind = draw(st.sampled_from(("full_attention", "sliding_window", "mamba")))
    tokens = draw(st.integers(1, 70)) if kind == "sliding_window" else None
    # long stretches, so that hits come about
    runs = draw(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=6))
    held = [is_held for is_held, count in runs for _ in range(count)]
    return HeldGroup(
        group=CacheGroup(kind=kind, block_size=block_size, sliding_window=tokens),
        held=held,
    )


def one_size_of_full_attention(groups: list[HeldGroup]) -> bool:
    return len({each.group.block_size for each in groups if each.group.kind == "full_attention"}) < 2


@given(
    st.lists(st.lists(held_groups(), min_size=1, max_size=4).filter(one_size_of_full_attention), max_size=4),
    st.integers(1, 200),
)
def test_a_lookup_of_many_pods_finds_what_trying_every_length_finds(
    pods: list[list[HeldGroup]], prompt_tokens: int
) -> None:
    found = look_up(*pods, prompt_tokens=prompt_tokens)
    ours = [found.matched_blocks.get(str(pod), 0) * found.block_size[str(pod)] for pod in range(len(pods))]
    assert ours == [plainly(groups, prompt_tokens=prompt_tokens) for groups in pods]


@pytest.mark.parametrize("kind", [None, "sparse", "unknown", "chunked_local_attention", "sliding_window"])
def test_a_window_needs_its_size_and_other_kinds_have_no_rule(kind: str | None) -> None:
    assert not has_rule(CacheGroup(kind=kind, block_size=16))


@pytest.mark.parametrize(
    ("described", "tier"),
    [
        (CacheGroup(kind="sliding_window", block_size=16, sliding_window=1024), "GPU/sliding_window/16/1024"),
        (CacheGroup(kind="mamba", block_size=528), "GPU/mamba/528"),
    ],
)
def test_the_tier_of_a_group_says_what_must_be_known_of_it(described: CacheGroup, tier: str) -> None:
    assert tier_of("GPU", described) == f"GPU/{describe(described)}" == tier
    assert read_tier(tier) == ("GPU", described)
    assert is_of_group(tier)


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", None])
def test_full_attention_lies_in_the_tier_of_its_medium(kind: str | None) -> None:
    assert tier_of("CPU", CacheGroup(kind=kind, block_size=16)) == tier_of("CPU", None) == "CPU"
    assert read_tier("CPU") == ("CPU", None)
    assert not is_of_group("CPU")


@pytest.mark.parametrize(
    "tier",
    ["GPU/", "GPU/mamba", "GPU/mamba/0", "GPU/mamba/x", "GPU/later/16", "GPU/sliding_window/16", "GPU/mamba/1/2/3"],
)
def test_the_tier_of_an_unknown_group_is_refused(tier: str) -> None:
    with pytest.raises(ValueError, match="tier"):
        read_tier(tier)
