"""Candidates with sensible values, for tests of the decision."""

from collections.abc import Sequence
from typing import Any

from extproc.choosing.decision import Decision, decide, require_some
from extproc.pods.endpoint import NOTHING_ASKED, Ask, Candidate, EndpointModels, EndpointTrend, Reachability
from kvmesh.pods.pod_report import EndpointLoad


def load(**values: Any) -> EndpointLoad:
    idle = {
        "waiting_requests": 0,
        "running_requests": 0,
        "kv_usage": 0.0,
        "prefix_hit_tokens": 0,
        "prefix_query_tokens": 0,
        "reported_at": 0.0,
    }
    return EndpointLoad(**(idle | values))


def candidate(
    address: str,
    *,
    reported: EndpointLoad | str | None = "idle",
    prompt: int = 1000,
    matched: int = 0,
    tokens_per_second: float | None = None,
    **values: Any,
) -> Candidate:
    facts: dict[str, Any] = {
        "reachability": Reachability.READY,
        "load": load() if isinstance(reported, str) else reported,
        "booked_requests": 0,
        "matched_tokens": matched,
        "prompt_tokens": prompt,
        "trend": EndpointTrend(prefill_tokens_per_second=tokens_per_second),
    }
    return Candidate(address=address, **(facts | values))


def serving(*models: str, adapters: tuple[str, ...] = (), max_model_len: int | None = None) -> EndpointModels:
    return EndpointModels(
        models=frozenset(models),
        adapters=dict.fromkeys(adapters, models[0]),
        max_model_len=max_model_len,
    )


def decided(
    candidates: Sequence[Candidate],
    *,
    ask: Ask = NOTHING_ASKED,
    strict: frozenset[str] = frozenset(),
    **what: Any,
) -> Decision:
    """Filter and decide, as the use case does where there is room everywhere."""
    kept, rejected, _ = require_some(candidates, ask=ask, strict=strict)
    return decide(kept, rejected=rejected, ask=ask, **what)
