"""The JSON of the admin pages: decisions, explanations, the state of the endpoints. Shapes only, no I/O."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from extproc.admission.degradation import StepInForce
from extproc.admission.prepared_request import Preview
from extproc.choosing.decision import Decision, apply_filters
from extproc.choosing.room import Room
from extproc.errors import PickError
from extproc.pods.endpoint import Candidate, EndpointStatus
from extproc.pods.latency_estimate import EstimateError
from extproc.policy.priority import PriorityPolicy
from extproc.policy.request_class import RequestClass
from extproc.policy.values import PickPolicy
from extproc.records.request_story import AskedFor, DecisionRecord

LONGEST_PATH = 500  # characters of a request's path that are shown


def decision_json(record: DecisionRecord) -> dict[str, Any]:
    """Return one line of the recent decisions. `status` is 200 for what was routed: the pod answers for itself."""
    common = {
        "at": record.at,
        "request_id": record.facts.request_id,
        "model": record.model,
        "path": shown_path(record.facts.path),
    }
    if isinstance(record.outcome, PickError):
        refusal = record.outcome
        return common | {
            "endpoint": None,
            "status": refusal.status,
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


def record_json(record: DecisionRecord, *, policy: PickPolicy) -> dict[str, Any]:
    """Return the whole explanation of an answered request."""
    common = {"at": record.at, "request_id": record.facts.request_id, "path": shown_path(record.facts.path)}
    if isinstance(record.outcome, PickError):
        refusal = record.outcome
        return common | {
            "endpoint": None,
            "status": refusal.status,
            "reason": refusal.reason,
            "message": refusal.message,
        }
    assert record.asked is not None, "what was routed was asked for"
    return common | explanation_json(record.asked, record.outcome, policy=policy)


def refusal_json(refusal: PickError, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Return why a request would be refused, and the endpoints as they are now."""
    kept, rejected = apply_filters(candidates)
    return {
        "endpoint": None,
        "status": refusal.status,
        "reason": refusal.reason,
        "message": refusal.message,
        "candidates": [_candidate_json(candidate, block_size=None) for candidate in kept],
        "rejected": _rejected_json(rejected),
    }


def explanation_json(
    asked: AskedFor,
    decision: Decision,
    *,
    policy: PickPolicy,
    blocks: Mapping[str, int] | None = None,
    rooms: Mapping[str, Room] | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Return everything a decision rests on.

    `blocks` is the block size of each endpoint in tokens; `rooms` how full each is for the request's class; `most`: so
    many candidates and rejected endpoints, the winner and the best of the others.
    """
    sizes, request_class = blocks or {}, asked.request_class
    explanation = {
        "request": {
            "api": asked.api,
            "model": asked.model,
            "served_model": asked.served_model,
            "adapter": asked.adapter,
            "arm": asked.arm,
            "prompts": asked.prompts,
            "stream": asked.stream,
            "max_tokens": asked.max_tokens,
            "class": request_class.class_name,
            "class_by": request_class.why,
            "priority": request_class.priority_class.priority,
            "tenant": shown_tenant(request_class, policy.priorities),
            "steps": list(asked.steps),
        },
        "endpoint": decision.endpoints[0],
        "status": 200,
        "fallbacks": list(decision.endpoints[1:]),
        "prompt_tokens": decision.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "best_matched_tokens": decision.best_matched_tokens,
        "degraded": list(decision.degraded),
        "notes": [*(f"{word}: {text}" for word, text in decision.degraded.items()), *decision.notes],
        "strategy": policy.strategy.value,
        "weights": dict(decision.weights),
        "candidates": [
            _candidate_json(
                candidate,
                block_size=sizes.get(candidate.address, asked.block_tokens or None),
                room=rooms.get(candidate.address) if rooms else None,
            )
            | {
                "scores": {name: scores[i] for name, scores in decision.scores.items()},
                "total": decision.totals[i],
            }
            for i, candidate in _shown(decision, most=most)
        ],
        "rejected": _rejected_json(dict(islice(decision.rejected.items(), most))),
    }
    if most is None:
        return explanation
    return explanation | {
        "candidates_left_out": max(len(decision.kept) - most, 0),
        "rejected_left_out": max(len(decision.rejected) - most, 0),
    }


def shown_path(path: str) -> str:
    """Return the path without its query, which may hold a secret."""
    return path.partition("?")[0][:LONGEST_PATH]


def shown_tenant(request_class: RequestClass, policy: PriorityPolicy) -> str:
    """Return the tenant as it may be shown: those that the policy names, "" where nobody told, else "other".

    Clients write what they like into the header that tells it, secrets as well.
    """
    tenant = request_class.tenant
    return tenant if not tenant or any(quota.tenant == tenant for quota in policy.quotas) else "other"


def _shown(decision: Decision, *, most: int | None) -> Iterable[tuple[int, Candidate]]:
    """Return the candidates by their number: all as they are, or the winner and the best of the others."""
    if most is None:
        return enumerate(decision.kept)
    winner = next(i for i, candidate in enumerate(decision.kept) if candidate.address == decision.endpoints[0])
    best_first = sorted(range(len(decision.kept)), key=decision.totals.__getitem__, reverse=True)
    best_first.remove(winner)
    return [(i, decision.kept[i]) for i in (winner, *best_first[: most - 1])]


def admission_json(request_class: RequestClass, preview: Preview) -> dict[str, Any]:
    """Return what would become of a request, and what its class is promised."""
    return {
        "verdict": preview.verdict,
        "expected_ttft_ms": round(preview.expected_ttft_seconds * 1000),
        "target_ttft_ms": round(request_class.priority_class.targets.ttft_seconds * 1000),
        "waiting_requests": preview.waiting_requests,
    }


def classes_json(
    policy: PriorityPolicy, *, waiting: Mapping[str, int], steps: Sequence[StepInForce]
) -> list[dict[str, Any]]:
    """Return a line for each class, the most important first."""
    in_force: dict[str, set[str]] = {}
    for step in steps:
        in_force.setdefault(step.class_name, set()).add(step.step.step.value)
    ordered = sorted(policy.classes.items(), key=lambda item: (-item[1].priority, item[0]))
    return [
        {
            "class": name,
            "priority": item.priority,
            "sheddable": item.sheddable,
            "waiting": waiting.get(name, 0),
            "steps": sorted(in_force.get(name, ())),
        }
        for name, item in ordered
    ]


def _rejected_json(rejected: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"endpoint": address, "filter": words} for address, words in rejected.items()]


def _candidate_json(candidate: Candidate, *, block_size: int | None, room: Room | None = None) -> dict[str, Any]:
    load = candidate.load
    return {
        "endpoint": candidate.address,
        "state": candidate.reachability.value,
        "fill": round(room.fill, 3) if room else None,
        "full": room.why if room and room.fill >= 1.0 else None,
        "matched_tokens": candidate.matched_tokens,
        "matched_blocks": candidate.matched_tokens // block_size if block_size else 0,
        "indexed_tokens": candidate.indexed_tokens,
        "recent_tokens": candidate.recent_tokens,
        "worth_tokens": round(candidate.saved_tokens, 1),
        "waiting": load.waiting_requests if load else None,
        "running": load.running_requests if load else None,
        "kv_usage": load.kv_usage if load else None,
        "booked_since_report": candidate.booked_requests,
        "open_requests": candidate.open_requests,
        "backlog_tokens": round(candidate.backlog_tokens),
        "context_tokens": candidate.context_tokens,
        "filled_tokens": round(candidate.filled_tokens),
        "prefill_tokens_per_second": _rounded(candidate.trend.prefill_tokens_per_second),
        "inter_token_ms": _rounded(candidate.trend.inter_token_seconds, times=1000.0),
        "session": candidate.session,
        "unhealthy": candidate.unhealthy,
        "index_state": candidate.source_state or None,
    }


def _rounded(value: float | None, *, times: float = 1.0) -> float | None:
    return None if value is None else round(value * times, 1)


def endpoint_json(
    status: EndpointStatus, *, cached_blocks: int, bookings: int, picks: int, all_picks: int, avoided: str | None = None
) -> dict[str, Any]:
    """Return one endpoint's line of the state; numbers that are not known are null."""
    load, models = status.load, status.models
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
        "avoided": avoided,
        "models": sorted(models.models) if models else None,
        "adapters": sorted(models.adapters) if models else None,
        "max_model_len": models.max_model_len if models else None,
        "prefill_tokens_per_second": _rounded(status.trend.prefill_tokens_per_second),
        "inter_token_ms": _rounded(status.trend.inter_token_seconds, times=1000.0),
    }


def state_json(
    *,
    now: float,
    endpoints: Sequence[Mapping[str, Any]],
    index: Mapping[str, Any],
    decisions: Sequence[Any],
    classes: Sequence[Mapping[str, Any]],
    estimate_errors: Mapping[str, EstimateError],
    quotas: Mapping[str, Any],
    replicas: Mapping[str, Any] | None = None,
    findings: Sequence[Any] | None = None,
) -> dict[str, Any]:
    """Return the whole state; `now` is unix seconds; `replicas` null where no load is shared."""
    return {
        "now": now,
        "endpoints": list(endpoints),
        "index": dict(index),
        "classes": list(classes),
        "ttft_estimate_errors_ms": {
            endpoint: round(error.mean_seconds * 1000) for endpoint, error in estimate_errors.items()
        },
        "quotas": dict(quotas),
        "replicas": replicas,
        "findings": findings,
        "decisions": list(decisions),
    }
