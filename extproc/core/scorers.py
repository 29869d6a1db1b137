"""Scorers: how good each candidate is on one count, from 0.0 (worst) to 1.0 (best). Weights are in `policy`."""

from collections.abc import Callable, Mapping, Sequence

from extproc.core.endpoint import Candidate


def prefix(candidates: Sequence[Candidate]) -> list[float]:
    """Score the share of the prompt's tokens that the endpoint already holds."""
    return [
        candidate.matched_tokens / candidate.prompt_tokens if candidate.prompt_tokens else 0.0
        for candidate in candidates
    ]


def queue_depth(candidates: Sequence[Candidate]) -> list[float]:
    """Score 1.0 for the shortest queue and 0.0 for the longest; an unknown queue counts as the longest."""
    depths = [candidate.queue_depth for candidate in candidates]
    known = [depth for depth in depths if depth is not None]
    shortest, longest = min(known, default=0), max(known, default=0)
    # equal queues must not outvote the other scorers, hence 1.0 for all of them
    spread = longest - shortest
    return [0.0 if depth is None else (longest - depth) / spread if spread else 1.0 for depth in depths]


def kv_usage(candidates: Sequence[Candidate]) -> list[float]:
    """Score the share of KV cache blocks not in use; unknown counts as full."""
    return [0.0 if candidate.load is None else 1.0 - candidate.load.kv_usage for candidate in candidates]


SCORERS: Mapping[str, Callable[[Sequence[Candidate]], list[float]]] = {
    "prefix": prefix,
    "queue-depth": queue_depth,
    "kv-usage": kv_usage,
}
