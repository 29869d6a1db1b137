"""The expected prefix hit of a request at each endpoint, in tokens.

The index knows the cached blocks. A prompt just routed to an endpoint is expected to be cached there until its event
comes. The longer of the two matches counts, never their sum.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from extproc.policy.values import tier_worth
from extproc.shared.quota import QuotaVerdict
from extproc.shared.shared_load import SharedView
from kvmesh.blocks.block_keys import KEY_BYTES
from kvmesh.index.prefix_match import PrefixLookup

_Tokens = TypeVar("_Tokens", int, float)


class PromptKeys(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt's leading keys: recent routing is looked up by them."""

    keys: bytes  # packed 8-byte keys: of blocks, or of text chunks if tokens are unknown
    tokens_each: int

    @property
    def tokens(self) -> int:
        """Number of tokens covered by the keys."""
        return len(self.keys) // KEY_BYTES * self.tokens_each


class IndexHits(msgspec.Struct, frozen=True, kw_only=True):
    """The index's hits for a request's prompts, in order; hits of the last prompts may be missing."""

    prompts: Sequence[PrefixLookup] = ()
    keys: Sequence[PromptKeys] = ()
    states: Mapping[str, str] = {}  # endpoint -> state of its events; without endpoints unknown to the index
    view: SharedView | None = None  # the other replicas' bookings, read in the same round trip
    quota: QuotaVerdict | None = None  # answer to the quota ask, or None without one
    degraded: Mapping[str, str] = {}  # degradation -> explanation


NO_HITS = IndexHits()
LIVE = "live"  # state of an endpoint with complete events


class PromptMatch(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over all prompts of one request, in tokens by endpoint."""

    prompt_tokens: int
    matched_tokens: Mapping[str, int] = {}  # by index or recent routing
    worth_tokens: Mapping[str, float] = {}  # the same, weighted by cache tier (GPU = 1)
    indexed_tokens: Mapping[str, int] = {}
    recent_tokens: Mapping[str, int] = {}


NO_MATCH = PromptMatch(prompt_tokens=0)


def match_prompts(
    prompt_tokens: int,
    hits: Sequence[PrefixLookup],
    *,
    recent: Sequence[tuple[Mapping[str, int], int]] = (),
    tier_weights: Mapping[str, float] | None = None,
    indexed: Mapping[str, int] | None = None,
) -> PromptMatch:
    """Sum up the hits of all prompts, which have `prompt_tokens` tokens in total.

    `recent`: for each prompt, endpoint -> leading keys recently routed there, and the tokens per key.
    `indexed`: the result of `indexed_tokens` for a single prompt, if the caller has it already.
    """
    weights = tier_weights or {}
    if len(hits) <= 1 and len(recent) <= 1:  # nearly always
        return _with_recent(_match_one(hits[0], weights, indexed) if hits else NO_MATCH, prompt_tokens, *recent)
    matched: dict[str, int] = {}
    worth: dict[str, float] = {}
    held: dict[str, int] = {}
    routed: dict[str, int] = {}
    for i in range(max(len(hits), len(recent))):
        one = _with_recent(_match_one(hits[i], weights) if i < len(hits) else NO_MATCH, 0, *recent[i : i + 1])
        _add(matched, one.matched_tokens)
        _add(worth, one.worth_tokens)
        _add(held, one.indexed_tokens)
        _add(routed, one.recent_tokens)
    return PromptMatch(
        prompt_tokens=prompt_tokens,
        matched_tokens=matched,
        worth_tokens=worth,
        indexed_tokens=held,
        recent_tokens=routed,
    )


def _with_recent(one: PromptMatch, prompt_tokens: int, recent: tuple[Mapping[str, int], int] = ({}, 0)) -> PromptMatch:
    """Merge a prompt's index match with recent routing: per endpoint the longer one."""
    indexed, ends, tokens_each = one.indexed_tokens, recent[0], recent[1]
    if not ends:
        return PromptMatch(
            prompt_tokens=prompt_tokens, matched_tokens=indexed, worth_tokens=one.worth_tokens, indexed_tokens=indexed
        )
    matched, worth = dict(indexed), dict(one.worth_tokens)
    routed = {endpoint: keys * tokens_each for endpoint, keys in ends.items()}
    for endpoint, sent in routed.items():
        if sent > matched.get(endpoint, 0):
            matched[endpoint] = sent
        if sent > worth.get(endpoint, 0.0):  # recently used blocks are in the GPU tier
            worth[endpoint] = float(sent)
    return PromptMatch(
        prompt_tokens=prompt_tokens,
        matched_tokens=matched,
        worth_tokens=worth,
        indexed_tokens=indexed,
        recent_tokens=routed,
    )


def indexed_tokens(hit: PrefixLookup) -> dict[str, int]:
    """Return endpoint -> leading tokens of the prompt in the index."""
    sizes = hit.block_size
    return {endpoint: blocks * sizes[endpoint] for endpoint, blocks in hit.matched_blocks.items() if blocks}


def reported_tokens(hit: PrefixLookup, indexed: Mapping[str, int]) -> Mapping[str, int]:
    """Return endpoint -> leading tokens in its events, even if its other cache groups do not allow such a hit.

    `indexed`: the result of `indexed_tokens`. Recent routing up to there is no longer expected: the index knows better.
    """
    held_back = hit.held_back
    return {**indexed, **{endpoint: each.tokens for endpoint, each in held_back.items()}} if held_back else indexed


def _match_one(
    hit: PrefixLookup, tier_weights: Mapping[str, float], indexed: Mapping[str, int] | None = None
) -> PromptMatch:
    sizes: Mapping[str, int] = hit.block_size
    tiers: Mapping[str, Mapping[str, int]] = hit.tiers
    matched = indexed if indexed is not None else indexed_tokens(hit)
    worth: dict[str, float] = {}
    for endpoint, tokens in matched.items():
        of_tier = tiers.get(endpoint)
        worth[endpoint] = (
            float(tokens)
            if not of_tier or (len(of_tier) == 1 and "GPU" in of_tier)
            else sizes[endpoint] * sum([tier_worth(tier, tier_weights) * count for tier, count in of_tier.items()])
        )
    return PromptMatch(prompt_tokens=0, matched_tokens=matched, worth_tokens=worth, indexed_tokens=matched)


def _add(sums: dict[str, _Tokens], addends: Mapping[str, _Tokens]) -> None:
    for endpoint, tokens in addends.items():
        sums[endpoint] = sums.get(endpoint, 0) + tokens
