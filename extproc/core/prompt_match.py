"""How many of a request's prompt tokens each endpoint is expected to find in its cache."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class BlockHits(Protocol):
    """What the index knows of one prompt."""

    @property
    def matched_blocks(self) -> Mapping[str, int]:
        """Leading blocks that vLLM will find, by endpoint: the prompt's last token is never among them."""

    @property
    def block_size(self) -> Mapping[str, int]:
        """Tokens a block, by endpoint."""


class IndexHits(msgspec.Struct, frozen=True, kw_only=True):
    """What the index knows of a request's prompts, in order; hits of the last ones may be missing."""

    prompts: Sequence[BlockHits]
    stale_reason: str | None = None  # why the answer may be out of date


NO_HITS = IndexHits(prompts=())


class PromptMatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all prompts of one request."""

    prompt_tokens: int
    matched_tokens: Mapping[str, int]  # by endpoint


def match_prompts(prompt_lengths: Sequence[int], hits: IndexHits) -> PromptMatch:
    """Sum up the prompts (lengths in tokens) and their hits."""
    matched: dict[str, int] = {}
    for hit in hits.prompts:
        for endpoint, blocks in hit.matched_blocks.items():
            matched[endpoint] = matched.get(endpoint, 0) + blocks * hit.block_size[endpoint]
    return PromptMatch(prompt_tokens=sum(prompt_lengths), matched_tokens=matched)
