"""Predicted hits of all prompts of one request, summed up."""

from dataclasses import dataclass

from extproc.core.prompt_match import NO_HITS, IndexHits, PromptMatch, match_prompts


@dataclass(frozen=True)
class Hits:
    matched_blocks: dict[str, int]
    block_size: dict[str, int]


def test_prompts_of_one_request_add_up_and_those_not_looked_up_count_as_cold() -> None:
    hits = [Hits({"a": 2}, {"a": 16, "b": 32}), Hits({"a": 1, "b": 1}, {"a": 16, "b": 32})]
    match = match_prompts([40, 50, 60], IndexHits(prompts=hits))
    assert match == PromptMatch(prompt_tokens=150, matched_tokens={"a": 48, "b": 32})


def test_no_prompts_match_nothing() -> None:
    assert match_prompts([], NO_HITS) == PromptMatch(prompt_tokens=0, matched_tokens={})
