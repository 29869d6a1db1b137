"""The JSON of the admin pages: decisions, explanations, the state of the endpoints. Shapes only, no I/O."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from extproc.core.admission import is_saturated
from extproc.core.decision import Decision, apply_filters
from extproc.core.endpoint import Candidate, EndpointStatus
from extproc.core.exchange import RequestFacts
from extproc.core.policy import PickPolicy
from extproc.core.request import InferenceRequest
from extproc.errors import PickError


class DecisionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of one request; no part of its prompt."""

    at: float  # unix seconds
    facts: RequestFacts
    model: str | None
    outcome: Decision | PickError


def decision_json(record: DecisionRecord) -> dict[str, Any]:
    """Return one line of the recent decisions. `status` is 200 for what was routed: the pod answers for itself."""
    common = {
        "at": record.at,
        "request_id": record.facts.request_id,
        "model": record.model,
        "path": record.facts.path,
    }
    if isinstance(record.outcome, PickError):
        refusal = record.outcome
        return common | {
            "endpoint": None,
            "status": refusal.http_status,
            "matched_tokens": 0,
            "prompt_tokens": 0,
            "reasons": [f"{refusal.reason}: {refusal.message}"],
            "degraded": [],
        }
    decision = record.outcome
    return common | {
        "endpoint": decision.endpoints[0],
        "status": 200,
        "matched_tokens": decision.matched_tokens,
        "prompt_tokens": decision.prompt_tokens,
        "reasons": decision.reasons(),
        "degraded": list(decision.degraded),
    }


def refusal_json(refusal: PickError, candidates: Sequence[Candidate], *, policy: PickPolicy) -> dict[str, Any]:
    """Return why a request would be refused, and the endpoints as they are now."""
    kept, rejected = apply_filters(candidates)
    return {
        "endpoint": None,
        "status": refusal.http_status,
        "reason": refusal.reason,
        "message": refusal.message,
        "candidates": [_candidate_json(candidate, policy=policy, block_size=None) for candidate in kept],
        "rejected": _rejected_json(rejected),
    }


def explanation_json(
    request: InferenceRequest, decision: Decision, *, policy: PickPolicy, blocks: Mapping[str, int]
) -> dict[str, Any]:
    """Return everything a decision rests on; `blocks` is the block size of each endpoint in tokens."""
    return {
        "request": {
            "api": request.api.value,
            "model": request.model,
            "prompts": len(request.prompts),
            "stream": request.stream,
            "max_tokens": request.max_tokens,
        },
        "endpoint": decision.endpoints[0],
        "status": 200,
        "fallbacks": list(decision.endpoints[1:]),
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "degraded": list(decision.degraded),
        "notes": [f"{word}: {text}" for word, text in decision.degraded.items()],
        "weights": dict(decision.weights),
        "candidates": [
            _candidate_json(candidate, policy=policy, block_size=blocks.get(candidate.address))
            | {
                "scores": {name: scores[i] for name, scores in decision.scores.items()},
                "total": decision.totals[i],
            }
            for i, candidate in enumerate(decision.kept)
        ],
        "rejected": _rejected_json(decision.rejected),
    }


def _rejected_json(rejected: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"endpoint": address, "filter": words} for address, words in rejected.items()]


def _candidate_json(candidate: Candidate, *, policy: PickPolicy, block_size: int | None) -> dict[str, Any]:
    load = candidate.load
    return {
        "endpoint": candidate.address,
        "state": candidate.reachability.value,
        "saturated": is_saturated(candidate, policy=policy),
        "matched_tokens": candidate.matched_tokens,
        "matched_blocks": candidate.matched_tokens // block_size if block_size else 0,
        "waiting": load.waiting_requests if load else None,
        "running": load.running_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "booked_since_report": candidate.booked_requests,
    }


def endpoint_json(
    status: EndpointStatus, *, cached_blocks: int, bookings: int, picks: int, all_picks: int
) -> dict[str, Any]:
    """Return one endpoint's line of the state; numbers that are not known are null."""
    load = status.load
    return {
        "address": status.address,
        "state": status.reachability.value,
        "cached_blocks": cached_blocks,
        "running": load.running_requests if load else None,
        "waiting": load.waiting_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "hit_rate": load.prefix_hit_rate if load else None,
        "bookings": bookings,
        "picks": picks,
        "share": picks / all_picks if all_picks else 0.0,
    }


def state_json(
    *, now: float, endpoints: Sequence[Mapping[str, Any]], index: Mapping[str, Any], decisions: Sequence[Any]
) -> dict[str, Any]:
    """Return the whole state; `now` is unix seconds."""
    return {"now": now, "endpoints": list(endpoints), "index": dict(index), "decisions": list(decisions)}
