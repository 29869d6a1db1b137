"""The JSON of the live feed: pods, classes, the index, what happens to requests. Shapes only, no I/O.

Made by `live_feed` once a second for all who watch; `docs/live-feed.md` describes each field. Whatever clients wrote is
shown short, and tenants only where the policy names them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from extproc.admission.degradation import StepInForce
from extproc.doctor.findings import Finding
from extproc.errors import PickError
from extproc.pages.admin_json import endpoint_json, explanation_json, shown_path
from extproc.pods.endpoint import EndpointStatus, Role
from extproc.pods.latency_estimate import EstimateError
from extproc.policy.values import PickPolicy
from extproc.records.request_events import Decided, DecisionRecord, Ended, RequestOutcome
from kvmesh.blocks.source import IndexStatus, SourceStatus

MOST_PODS = 1000
MOST_SOURCES = 500
MOST_FINDINGS = 200
MOST_UNREADABLE = 20
MOST_CANDIDATES = 8  # of a decision in the feed; all of them are in GET /v1/decisions
LONGEST_TEXT = 200  # characters of what clients wrote
NO_INDEXER = "no indexer is alive: the index stands still"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFacts:
    """One pool as its picker sees it at one time."""

    name: str  # "" for the pool of --endpoints
    policy: PickPolicy
    now: float  # unix seconds
    monotonic: float
    statuses: Sequence[EndpointStatus]
    avoided: Mapping[str, str]  # endpoint -> why
    bookings: Mapping[str, int]  # endpoint -> open requests of this picker
    picks: Mapping[str, int]  # endpoint -> since start
    estimate_errors: Mapping[str, EstimateError]
    waiting: Mapping[str, int]  # class -> requests
    steps: Sequence[StepInForce]
    quotas: Mapping[str, Any]
    replicas: Mapping[str, Any] | None
    findings: Sequence[Finding] | None  # of the checks at start-up; None: not done yet
    own_findings: Sequence[Finding]  # of predictions that never come true
    recent: Sequence[DecisionRecord]  # newest first


def policy_json(policy: PickPolicy) -> dict[str, Any]:
    """Return what of the policy a page shows or goes by."""
    shown = policy.observability
    return {
        "strategy": policy.strategy.value,
        "weights": dict(policy.weights),
        "show_prompt_text": shown.show_prompt_text,
        "gpu_hour_price": shown.gpu_hour_price,
        "currency": shown.currency,
    }


def pods_json(facts: PoolFacts, index: IndexStatus | None) -> dict[str, Any]:
    """Return a line for each endpoint, in the order in which they are configured; `index` None: not to be had."""
    sources = sources_by_endpoint(index)
    all_picks = sum(facts.picks.values())
    pods = [_pod(facts, status, sources.get(status.address, ()), all_picks) for status in facts.statuses]
    return {
        "now": facts.now,
        "pods": pods[:MOST_PODS],
        "left_out": max(len(pods) - MOST_PODS, 0),
        "totals": {
            "pods": len(pods),
            "ready": sum(pod["state"] == "ready" for pod in pods),
            **{name: _sum(pods, name) for name in ("cached_blocks", "cached_tokens", "running", "waiting")},
            **{name: _sum(pods, name) for name in ("bookings", "picks")},
        },
    }


def sources_by_endpoint(index: IndexStatus | None) -> Mapping[str, Sequence[SourceStatus]]:
    """Return endpoint -> its sources."""
    sources: dict[str, list[SourceStatus]] = {}
    for source in index.sources if index is not None else ():
        sources.setdefault(source.endpoint, []).append(source)
    return sources


def _pod(facts: PoolFacts, status: EndpointStatus, sources: Sequence[SourceStatus], all_picks: int) -> dict[str, Any]:
    address = status.address
    tiers: dict[str, int] = {}
    for source in sources:
        if source.tier is not None:
            tiers[source.tier] = tiers.get(source.tier, 0) + source.cached_blocks
    error = facts.estimate_errors.get(address)
    worst = min(sources, key=lambda source: _TRUST.get(source.state.value, 0), default=None)
    line = endpoint_json(
        status,
        cached_blocks=sum(tiers.values()),
        bookings=facts.bookings.get(address, 0),
        picks=facts.picks.get(address, 0),
        all_picks=all_picks,
        avoided="cordoned" if address in facts.policy.cordoned else facts.avoided.get(address),
    )
    return line | {
        "role": facts.policy.roles.get(address, Role.BOTH).value,
        "tiers": tiers,
        "cached_tokens": sum(source.cached_blocks * (source.block_size or 0) for source in sources),
        "block_tokens": min((source.block_size for source in sources if source.block_size), default=None),
        "index_state": worst.state.value if worst is not None else None,
        "index_reason": worst.reason if worst is not None else "",
        "ttft_estimate_error_ms": None if error is None else round(error.mean_seconds * 1000),
    }


_TRUST = {"lost": 0, "replaying": 1, "degraded": 2, "live": 3}


def _sum(pods: Iterable[Mapping[str, Any]], name: str) -> int:
    return sum(pod[name] or 0 for pod in pods)


def live_classes_json(facts: PoolFacts) -> dict[str, Any]:
    """Return a line for each class, the most important first, and what became of the last requests."""
    priorities = facts.policy.priorities
    steps: dict[str, list[dict[str, Any]]] = {}
    for entry in facts.steps:
        steps.setdefault(entry.class_name, []).append(
            {
                "step": entry.step.step.value,
                "model_pool": entry.pool,
                "since_seconds": round(max(facts.monotonic - entry.since, 0.0), 1),
                "pressure": round(entry.pressure, 2),
            }
        )
    routed: dict[str, int] = {}
    refusals: dict[str, int] = {}
    for record in facts.recent:
        if isinstance(record.outcome, PickError):
            refusals[record.outcome.reason] = refusals.get(record.outcome.reason, 0) + 1
        elif record.asked is not None:
            name = record.asked.request_class.class_name
            routed[name] = routed.get(name, 0) + 1
    ordered = sorted(priorities.classes.items(), key=lambda item: (-item[1].priority, item[0]))
    return {
        "now": facts.now,
        "waiting": sum(facts.waiting.values()),
        "remembered": len(facts.recent),
        "classes": [
            {
                "class": name,
                "priority": item.priority,
                "sheddable": item.sheddable,
                "target_ttft_ms": round(item.targets.ttft_seconds * 1000),
                "waiting": facts.waiting.get(name, 0),
                "steps": sorted({line["step"] for line in steps.get(name, ())}),
                "in_force": steps.get(name, []),
                "routed": routed.get(name, 0),
            }
            for name, item in ordered
        ],
        "refusals": refusals,
        "quotas": dict(facts.quotas),
    }


def live_index_json(facts: PoolFacts, index: IndexStatus | None, problem: str | None) -> dict[str, Any]:
    """Return how the index stands; `problem`: why it is not to be had, where `index` is None."""
    sources = list(index.sources) if index is not None else []
    alive = index is not None and index.indexer_alive
    found = [] if index is None else [_index_finding(finding) for finding in index.findings]
    own = [_finding(finding) for finding in (*facts.own_findings, *(facts.findings or ()))]
    state = "unavailable" if index is None else "ok" if alive else "stale"
    return {
        "now": facts.now,
        "state": state,
        "problem": problem if index is None else None if alive else NO_INDEXER,
        "indexer_alive": alive,
        "sources_count": len(sources),
        "sources": [_source(source) for source in sources[:MOST_SOURCES]],
        "left_out": max(len(sources) - MOST_SOURCES, 0),
        "unreadable": list(index.unreadable[:MOST_UNREADABLE]) if index is not None else [],
        "findings": (found + own)[:MOST_FINDINGS],
        "findings_state": "not-yet" if facts.findings is None and not facts.name else "done",
        "replicas": facts.replicas,
        "degraded": _degraded(facts.recent),
    }


def of_pool(status: IndexStatus | None, pool: str, statuses: Sequence[Any]) -> IndexStatus | None:
    """Return what belongs to the pool; the one of `--endpoints` is shown everything, strangers as well."""
    if status is None or not pool:
        return status
    addresses = {each.address for each in statuses}
    return IndexStatus(
        sources=tuple(line for line in status.sources if line.endpoint in addresses),
        indexer_alive=status.indexer_alive,
        unreadable=status.unreadable,
        findings=tuple(line for line in status.findings if line.endpoint in addresses),
    )


def _source(source: SourceStatus) -> dict[str, Any]:
    return {
        "endpoint": source.endpoint,
        "dp_rank": source.dp_rank,
        "tier": source.tier,
        "state": source.state.value,
        "reason": source.reason,
        "cached_blocks": source.cached_blocks,
        "block_tokens": source.block_size,
        "last_batch_at": source.last_batch_at,
        "applied_at": source.applied_at,
        "events": source.events,
        "owner": source.owner,
    }


def _index_finding(finding: Any) -> dict[str, Any]:
    return {
        "check": finding.reason,
        "severity": "error",
        "subject": finding.subject,
        "seen": finding.message,
        "fix": "",
        "since": finding.since,
        "found_by": "indexer",
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "severity": finding.severity.value,
        "subject": finding.subject,
        "seen": finding.seen,
        "fix": finding.fix,
        "since": None,
        "found_by": "picker",
    }


def _degraded(recent: Sequence[DecisionRecord]) -> list[dict[str, Any]]:
    """Return what the last decisions lacked, the most frequent first."""
    lines: dict[str, dict[str, Any]] = {}
    for record in recent:  # newest first
        if isinstance(record.outcome, PickError):
            continue
        for reason, words in record.outcome.degraded.items():
            line = lines.setdefault(reason, {"reason": reason, "words": words, "last_at": record.at, "count": 0})
            line["count"] += 1
    return sorted(lines.values(), key=lambda line: -line["count"])


# --- what happens to requests ----------------------------------------------------------------------------------------


def record_id(record: DecisionRecord) -> str:
    """Return a name for a decision: request ids may come twice, clients choose them."""
    text = f"{record.at!r} {record.facts.request_id}".encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).hexdigest()


def live_decision_json(record: DecisionRecord, *, policy: PickPolicy, decided: Decided | None = None) -> dict[str, Any]:
    """Return one decision with its explanation; `decided`: what is known of it beside its record."""
    queued = decided.queued_seconds if decided is not None else None
    line: dict[str, Any] = {
        "id": record_id(record),
        "at": record.at,
        "request_id": record.facts.request_id[:LONGEST_TEXT],
        "path": shown_path(record.facts.path),
        "class": record.asked.request_class.class_name if record.asked is not None else None,
        "queued_ms": None if queued is None else round(queued * 1000, 1),
        "decided_ms": None if decided is None else round(decided.seconds * 1000, 2),
        "phases_ms": {}
        if decided is None
        else {name: round(seconds * 1000, 3) for name, seconds in decided.phases.items()},
    }
    if decided is not None and decided.outcome_kind is RequestOutcome.FAILED_OPEN:
        return line | {"endpoint": decided.endpoint, "status": 200, "reason": RequestOutcome.FAILED_OPEN.value}
    if isinstance(record.outcome, PickError):
        refusal = record.outcome
        return line | {
            "endpoint": None,
            "status": refusal.status,
            "reason": refusal.reason,
            "message": refusal.message,
        }
    assert record.asked is not None, "what was routed was asked for"
    explanation = explanation_json(record.asked, record.outcome, policy=policy, most=MOST_CANDIDATES)
    return line | explanation | {"reasons": record.outcome.reasons()}


def ended_json(ended: Ended, *, decision_id: str | None, at: float) -> dict[str, Any]:
    """Return the end of an exchange at `at` (unix seconds)."""
    usage = ended.usage
    return {
        "at": at,
        "decision_id": decision_id,
        "request_id": ended.request_id[:LONGEST_TEXT],
        "endpoint": ended.endpoint,
        "served_by": ended.served_by,
        "status": ended.status,
        "seconds_to_headers": ended.seconds_to_headers,
        "seconds": ended.seconds,
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
        },
    }
