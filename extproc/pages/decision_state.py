"""One request as the pages show it: its decision with the full basis, and its end. Pure.

Text from clients is shortened, paths lose their query, and a tenant's name is shown only if the policy names it.
"""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from extproc.admission.asked_request import AskedFor, AskedRequest
from extproc.admission.prepared_request import Preview
from extproc.answers.attainment import Attainment
from extproc.answers.promise import targets_of
from extproc.choosing.decision import Decision, apply_filters
from extproc.choosing.room import Room
from extproc.disaggregation.prefill_plan import PrefillPlan
from extproc.ledger.facts import Decided, DecisionRecord, Ended, NoDecision, RequestOutcome
from extproc.pages.decision_words import TELLING
from extproc.pages.picker_state import (
    AdmissionState,
    CandidateState,
    DecisionState,
    EndedEvent,
    PrefillState,
    RejectedState,
    RequestState,
    ShadowState,
)
from extproc.pods.endpoint import Candidate
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.values import PickPolicy

LONGEST_TEXT = 200  # characters of a client's text
LONGEST_PATH = 500


def decision_state(
    record: DecisionRecord,
    *,
    policy: PickPolicy,
    most: int | None = None,
    decided: Decided | None = None,
    blocks: Mapping[str, int] | None = None,
    rooms: Mapping[str, Room] | None = None,
) -> DecisionState:
    """Return one answered request with the full basis of its decision.

    `most` limits the rejected endpoints and the candidates (to the winner and the best others); None shows all.
    `decided` adds facts to the request's record. By endpoint: `blocks` is the block size in tokens where it differs
    from the request's own; `rooms` is the fill level for the request's class.
    """
    asked, outcome = record.asked, record.outcome
    shown = DecisionState(
        id=record.id,
        at=record.at,
        request_id=record.facts.request_id[:LONGEST_TEXT],
        path=record.facts.path.partition("?")[0][:LONGEST_PATH],  # a query may contain a secret
        model=record.model,
        class_name=asked.request_class.class_name if asked is not None else None,
        endpoint=None,
    )
    if decided is not None:
        waited = decided.queued_seconds
        shown = replace(
            shown,
            queued_ms=None if waited is None else round(waited * 1000, 1),
            decided_ms=round(decided.seconds * 1000, 2),
            phases_ms={name: round(seconds * 1000, 3) for name, seconds in decided.phases.items()},
        )
        if decided.outcome_kind is RequestOutcome.FAILED_OPEN:
            return replace(shown, endpoint=decided.endpoint, reason=RequestOutcome.FAILED_OPEN.value)
    if isinstance(outcome, NoDecision):
        reason, message = outcome.reason, outcome.message
        return replace(shown, status=outcome.status, reason=reason, message=message, reasons=[f"{reason}: {message}"])
    assert asked is not None, "what was routed was asked for"
    candidates = _shown(outcome, most=most)
    won = outcome.totals[_winner(outcome)]
    rejected = list(outcome.rejected.items())[:most]
    return replace(
        shown,
        request=_request(asked, policy.priorities),
        prefill=_prefill(record.prefill) if record.prefill is not None else None,
        endpoint=outcome.endpoints[0],
        reasons=outcome.reasons(),
        fallbacks=outcome.fallbacks,
        prompt_tokens=outcome.prompt_tokens,
        matched_tokens=outcome.matched_tokens,
        best_matched_tokens=outcome.best_matched_tokens,
        degraded=list(outcome.degraded),
        notes=[*(f"{reason}: {text}" for reason, text in outcome.degraded.items()), *outcome.notes],
        shadow=[
            ShadowState(rule=each.rule.value, action=each.action.value, reason=each.reason, words=each.words)
            for each in record.shadow
        ],
        strategy=policy.strategy.value,
        weights=dict(outcome.weights),
        candidates=[
            replace(
                _candidate(
                    outcome.kept[i],
                    block_tokens=(blocks or {}).get(outcome.kept[i].address, asked.block_tokens),
                    room=(rooms or {}).get(outcome.kept[i].address),
                ),
                scores={name: scores[i] for name, scores in outcome.scores.items()},
                total=outcome.totals[i],
            )
            for i in candidates
        ],
        candidates_left_out=len(outcome.kept) - len(candidates),
        as_good=sum(abs(won - total) <= TELLING for total in outcome.totals),
        rejected=[RejectedState(endpoint=address, filter=words) for address, words in rejected],
        rejected_left_out=len(outcome.rejected) - len(rejected),
    )


def with_candidates(refused: DecisionState, candidates: Sequence[Candidate]) -> DecisionState:
    """Add the current endpoints to a request that would be refused."""
    kept, rejected, _ = apply_filters(candidates)
    return replace(
        refused,
        candidates=[_candidate(candidate) for candidate in kept],
        rejected=[RejectedState(endpoint=address, filter=words) for address, words in rejected.items()],
    )


def admission_state(asked: AskedRequest, preview: Preview, attained: Attainment | None) -> AdmissionState:
    """Return a request's admission verdict, its targets, and its class's recent SLO attainment."""
    targets = asked.asked_targets or targets_of(asked.request_class.priority_class)
    return AdmissionState(
        verdict=preview.verdict,
        expected_ttft_ms=round(preview.expected_ttft_seconds * 1000),
        target_ttft_ms=round(targets.ttft_seconds * 1000),
        target_inter_token_ms=targets.inter_token_seconds * 1000,
        attainment=attained.share if attained is not None else None,
        judged=attained.judged if attained is not None else 0,
        waiting_requests=preview.waiting_requests,
    )


def ended_state(ended: Ended, *, decision_id: str | None, at: float) -> EndedEvent:
    """Return the end of an exchange at `at` (unix seconds)."""
    return EndedEvent(
        at=at,
        decision_id=decision_id,
        request_id=ended.arrival.request_id[:LONGEST_TEXT],
        endpoint=ended.endpoint,
        served_by=ended.served_by,
        status=ended.status,
        seconds_to_headers=ended.seconds_to_headers,
        seconds=ended.seconds,
        usage=ended.usage,
    )


def rounded(value: float | None, *, times: float = 1.0) -> float | None:
    """Return `value * times`, rounded to one decimal for display."""
    return None if value is None else round(value * times, 1)


def _request(asked: AskedFor, policy: PriorityPolicy) -> RequestState:
    request_class = asked.request_class
    return RequestState(
        api=asked.api,
        model=asked.model,
        served_model=asked.served_model,
        adapter=asked.adapter,
        arm=asked.arm,
        prompts=asked.prompts,
        stream=asked.stream,
        max_tokens=asked.max_tokens,
        answer_tokens=rounded(asked.answer_tokens or None),
        answer_spread=rounded(asked.answer_spread or None),
        class_name=request_class.class_name,
        class_by=request_class.why,
        objective_ignored=request_class.ignored_objective.value,
        priority=request_class.priority_class.priority,
        tenant=_tenant(request_class.tenant, policy),
        steps=list(asked.steps),
    )


def _tenant(tenant: str, policy: PriorityPolicy) -> str:
    """A tenant comes from a header in which clients may put anything, even secrets."""
    return tenant if not tenant or any(quota.tenant == tenant for quota in policy.quotas) else "other"


def _prefill(plan: PrefillPlan) -> PrefillState:
    sides, best = plan.sides, plan.places[0]
    return PrefillState(
        where="remote" if plan.is_remote else "local",
        why=plan.verdict.why,
        rule=plan.policy.rule.value,
        endpoint=best.endpoint,
        uncached_tokens=sides.uncached_tokens,
        remote_uncached_tokens=best.uncached_tokens,
        prefill_queue=sides.prefill_queue,
        decode_requests=sides.decode_requests,
        local_ms=round(1000 * sides.local_seconds, 1),
        remote_ms=round(1000 * sides.remote_seconds, 1),
        transfer_ms=round(1000 * sides.transfer_seconds, 1),
        races=plan.races,
        race=plan.race.why if plan.race is not None else None,
    )


def _shown(decision: Decision, *, most: int | None) -> Sequence[int]:
    numbers = range(len(decision.kept))
    if not most:
        return numbers if most is None else ()
    winner = _winner(decision)
    return sorted(numbers, key=lambda i: (i != winner, -decision.totals[i]))[:most]


def _winner(decision: Decision) -> int:
    return next(i for i, candidate in enumerate(decision.kept) if candidate.address == decision.endpoints[0])


def _candidate(candidate: Candidate, *, block_tokens: int = 0, room: Room | None = None) -> CandidateState:
    load = candidate.load
    return CandidateState(
        endpoint=candidate.address,
        state=candidate.reachability.value,
        fill=round(room.fill, 3) if room else None,
        full=room.why if room and room.fill >= 1.0 else None,
        matched_tokens=candidate.matched_tokens,
        matched_blocks=candidate.matched_tokens // block_tokens if block_tokens else 0,
        indexed_tokens=candidate.indexed_tokens,
        recent_tokens=candidate.recent_tokens,
        worth_tokens=round(candidate.saved_tokens, 1),
        waiting=load.waiting_requests if load else None,
        running=load.running_requests if load else None,
        kv_usage=load.kv_usage if load else None,
        booked_since_report=candidate.booked_requests,
        open_requests=candidate.open_requests,
        backlog_tokens=round(candidate.backlog_tokens),
        context_tokens=candidate.context_tokens,
        filled_tokens=round(candidate.filled_tokens),
        prefill_tokens_per_second=rounded(candidate.trend.prefill_tokens_per_second),
        inter_token_ms=rounded(candidate.trend.inter_token_seconds, times=1000.0),
        session=candidate.session,
        unhealthy=candidate.unhealthy,
        index_state=candidate.source_state or None,
        held_back=candidate.held_back or None,
    )
