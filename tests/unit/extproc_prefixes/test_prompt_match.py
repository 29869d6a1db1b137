"""Expected hits of all prompts of one request, summed up: of index and recent routing the longer."""

from msgspec import structs

from extproc.prefixes.prompt_match import PromptMatch, match_prompts, reported_tokens
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.source import Registry
from kvmesh.index.group_match import HeldBack
from kvmesh.index.prefix_match import PrefixLookup


def Hits(  # noqa: N802 - reads as the value that it makes
    matched_blocks: dict[str, int], block_size: dict[str, int], tiers: dict[str, dict[str, int]] | None = None
) -> PrefixLookup:
    return PrefixLookup(
        matched_blocks=matched_blocks,
        block_size=block_size,
        tiers=tiers or {},
        endpoints={},
        registry=Registry(version=b""),
        indexer_alive=True,
    )


SIZES = {"a": 16, "b": 32}


def test_prompts_of_one_request_add_up_and_those_not_looked_up_count_as_cold() -> None:
    match = match_prompts(150, [Hits({"a": 2}, SIZES), Hits({"a": 1, "b": 1}, SIZES)])
    tokens = {"a": 48, "b": 32}
    assert match == PromptMatch(prompt_tokens=150, matched_tokens=tokens, worth_tokens=tokens, indexed_tokens=tokens)


def test_what_full_attention_has_reported_is_reported_also_where_other_groups_allow_no_such_hit() -> None:
    plain = Hits({"a": 2}, SIZES)
    tokens = {"a": 32}
    assert reported_tokens(plain, tokens) is tokens
    back = HeldBack(tokens=96, by=CacheGroup(kind="mamba", block_size=16))
    assert reported_tokens(structs.replace(plain, held_back={"b": back}), tokens) == {"a": 32, "b": 96}


def test_no_prompts_match_nothing() -> None:
    assert match_prompts(0, []) == PromptMatch(prompt_tokens=0)


def test_a_block_in_a_slower_tier_is_worth_less_than_one_in_the_gpu() -> None:
    hits = Hits({"a": 10, "b": 2}, SIZES, {"a": {"GPU": 5, "CPU": 5}, "b": {"tape": 2}})
    assert match_prompts(200, [hits]).worth_tokens == {"a": 16 * (5 + 0.8 * 5), "b": 32 * 0.5 * 2}
    assert match_prompts(200, [hits], tier_weights={"CPU": 0.1}).worth_tokens["a"] == 16 * 5.5


def test_what_was_just_routed_counts_where_the_index_knows_less_and_never_adds_to_it() -> None:
    hits = Hits({"a": 4, "b": 1}, SIZES, {"a": {"CPU": 4}})
    match = match_prompts(200, [hits], recent=[({"a": 2, "b": 4, "c": 1}, 16)])
    assert match == PromptMatch(
        prompt_tokens=200,
        matched_tokens={"a": 64, "b": 64, "c": 16},
        worth_tokens={"a": 51.2, "b": 64.0, "c": 16.0},
        indexed_tokens={"a": 64, "b": 32},
        recent_tokens={"a": 32, "b": 64, "c": 16},
    )


def test_recent_routing_alone_matches_where_there_is_no_index() -> None:
    match = match_prompts(100, [], recent=[({"a": 1}, 64), ({"a": 1}, 64)])
    assert (match.matched_tokens, match.indexed_tokens) == ({"a": 128}, {})
