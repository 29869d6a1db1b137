"""The JSON of the prefix tree in the live feed and of `GET /v1/prefixes`. Shapes only, no I/O.

Made by `live_feed`; `docs/live-feed.md` describes each field.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from extproc.prefixes.prefix_tree import KEY_BYTES, TreeEdge, TreeView

LOOKUPS_PER_EDGE = 16  # blocks of an edge that are looked up: the others are taken to be as these
MOST_HOLDERS = 64  # of a prefix, those who hold most of it: a hundred prefixes may be held by all of a thousand pods


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFacts:
    """What is known beside the tree."""

    name: str  # of the pool
    now: float  # unix seconds
    monotonic: float
    since: float  # unix seconds: when remembering began
    half_life_seconds: float
    sampled_share: float
    shows_text: bool
    cached_blocks: int | None  # of the pool, in the index; None: it is not to be had
    # for each key of `sampled_keys`: endpoint -> tier; None: the index is not to be had
    holders: Sequence[Mapping[str, str]] | None


def sampled_keys(edge: TreeEdge) -> bytes:
    """Return the keys of an edge that are looked up: some evenly over it, the last among them; none of text chunks."""
    if not edge.origin.indexed:
        return b""
    count = min(edge.blocks, LOOKUPS_PER_EDGE)
    at = [edge.blocks * (i + 1) // count - 1 for i in range(count)]
    return b"".join([edge.keys[i * KEY_BYTES : (i + 1) * KEY_BYTES] for i in at])


def prefix_nodes(
    view: TreeView, facts: PrefixFacts, *, name_of: Callable[[bytes], str], text_of: Callable[[TreeEdge], str | None]
) -> Iterator[dict[str, Any]]:
    """Yield the tree's nodes; each may take a millisecond where hundreds of pods hold it.

    `name_of` makes names of keys that tell nobody what is behind them.
    """
    at = 0
    for edge in view.edges:
        looked_up = len(sampled_keys(edge)) // KEY_BYTES
        found = None if facts.holders is None or not edge.origin.indexed else facts.holders[at : at + looked_up]
        at += looked_up
        yield _node(edge, view, facts, found, name_of=name_of, text_of=text_of)


def prefixes_json(view: TreeView, facts: PrefixFacts, nodes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tree as a list; `nodes` are all `prefix_nodes`."""
    indexed = any(edge.origin.indexed for edge in view.edges) or not view.edges
    return {
        "now": facts.now,
        "pool": facts.name,
        "since": facts.since,
        "half_life_seconds": facts.half_life_seconds,
        "sampled_share": round(facts.sampled_share, 4),
        "requests": round(view.requests, 2),
        "hit_tokens": round(view.hit_tokens),
        "cached_blocks": facts.cached_blocks,
        "index": "unavailable" if facts.holders is None else "ok" if indexed else "no-tokens",
        "text_shown": facts.shows_text,
        "left_out": view.left_out,
        "nodes": nodes,
    }


def _node(
    edge: TreeEdge,
    view: TreeView,
    facts: PrefixFacts,
    found: Sequence[Mapping[str, str]] | None,
    *,
    name_of: Callable[[bytes], str],
    text_of: Callable[[TreeEdge], str | None],
) -> dict[str, Any]:
    holders = None if found is None else _holders(edge, found)
    held = None if holders is None else sum(holder["blocks"] for holder in holders)
    return {
        "id": name_of(edge.key),
        "parent": None if edge.parent is None else name_of(edge.parent),
        "model": edge.origin.model,
        "adapter": edge.origin.adapter,
        "depth": edge.depth,
        "from_tokens": edge.first * edge.origin.tokens_each,
        "tokens": edge.blocks * edge.origin.tokens_each,
        "blocks": edge.blocks,
        "requests": round(edge.requests, 2),
        "share_of_requests": _part(edge.requests, view.requests),
        "hit_tokens": round(edge.hit_tokens),
        "share_of_hits": _part(edge.hit_tokens, view.hit_tokens),
        "holders": None if holders is None else holders[:MOST_HOLDERS],
        "holders_left_out": max(len(holders or ()) - MOST_HOLDERS, 0),
        "held_blocks": held,
        "share_of_memory": None if held is None or not facts.cached_blocks else _part(held, facts.cached_blocks),
        "last_at": facts.now - max(facts.monotonic - edge.seen_at, 0.0),
        "text": text_of(edge) if facts.shows_text and edge.head else None,
    }


def _holders(edge: TreeEdge, found: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return who holds how much of an edge, as far as the blocks that were looked up tell; most first."""
    alike: dict[int, list[Any]] = {}  # blocks with the same holders are the same mapping: hundreds of pods each
    for held in found:
        alike.setdefault(id(held), [held, 0])[1] += 1
    tiers: dict[str, dict[str, int]] = {}
    for held, times in alike.values():
        for endpoint, tier in held.items():
            counts = tiers.setdefault(endpoint, {})
            counts[tier] = counts.get(tier, 0) + times
    scale = edge.blocks / max(len(found), 1)
    holders = []
    for endpoint, counts in tiers.items():
        blocks = {tier: round(number * scale) for tier, number in counts.items()}
        holders.append({"endpoint": endpoint, "blocks": sum(blocks.values()), "tiers": blocks})
    return sorted(holders, key=lambda holder: (-holder["blocks"], holder["endpoint"]))


def _part(some: float, everything: float) -> float:
    return round(min(some / everything, 1.0), 5) if everything > 0 else 0.0
