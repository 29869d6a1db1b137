"""Plans the handling of a routed request's response, mostly nothing, and makes the headers that identify its decision.

A client's report can be traced to the decision by its id: the same in the access log (`decision_id`), in traces
(`kvmesh.decision_id`) and on the page. Clients may reuse a request id; the picker generates the decision id itself.
"""

import random
from collections.abc import Mapping

from extproc.admission.prepared_request import Picked
from extproc.answers.promise import AnswerPromise
from extproc.answers.response_plan import PASS_PLAN, Prediction, ResponsePlan

DECISION_HEADER = "x-kvmesh-decision-id"
PREDICTED_HEADER = "x-kvmesh-predicted-cached-tokens"


class Pace:
    """A rate limit with a burst, for optional work.

    The generic cell rate algorithm: a virtual clock advances by one interval per item.
    """

    __slots__ = ("_ahead_until", "_burst_seconds", "_interval")

    def __init__(self, *, per_second: float, burst_seconds: float) -> None:
        """Allow `per_second` items on average (0: none), with bursts of up to `burst_seconds` worth of items."""
        self._interval = 1.0 / per_second if per_second > 0 else float("inf")
        self._burst_seconds = burst_seconds
        self._ahead_until = 0.0

    def take(self, *, now: float) -> bool:
        """Take an item if the limit allows it at `now` (monotonic seconds); return whether it did."""
        ahead_until = max(self._ahead_until, now) + self._interval
        if ahead_until - now > self._burst_seconds:
            return False
        self._ahead_until = ahead_until
        return True


def plan_response(
    picked: Picked,
    *,
    pool: str,
    is_sampled: bool,
    is_watched: bool = False,
    read_below_bytes: int,
    reads: Pace,
    now: float,
    label: str = "",
    sent_at: float = 0.0,
    promise: AnswerPromise | None = None,
) -> ResponsePlan:
    """Return the plan: whether to rewrite the model, compare, judge or count.

    A sampled response is read for usage whatever its size. Other responses are read only if they are not streams, up to
    `read_below_bytes`, and as far as `reads` allows at `now` (monotonic seconds). `label`: the requested model, if its
    name is a configured one. `sent_at`: unix seconds. `promise`: the targets to judge by, None outside the sample.
    `is_watched`: its pod is suspected to fail after good headers.
    """
    prepared, decision = picked.prepared, picked.choice.decision
    asked = prepared.asked
    resolved = asked.resolved
    # after degradation to a smaller model, the response keeps that model's name
    is_rewritten = resolved.is_rewritten and not asked.has_smaller_model and prepared.sent.changed is not None
    read_below = 0 if asked.request.stream else read_below_bytes
    is_comparable = bool(is_sampled or read_below) and picked.is_comparable  # short-circuits for most streams
    if read_below and not is_sampled and not (is_comparable and reads.take(now=now)):
        read_below = 0
    prediction = None
    if is_comparable and (is_sampled or read_below):
        prediction = Prediction(
            model=resolved.base.name if resolved.base is not None else "",
            requested=label,
            arm=resolved.arm,
            sent_at=sent_at,
            endpoint=decision.endpoints[0],
            prompt_tokens=decision.prompt_tokens,
            matched_tokens=decision.matched_tokens,
            best_matched_tokens=decision.best_matched_tokens,
        )
    rewritten = resolved.requested if is_rewritten else None
    quota = prepared.quota.note if prepared.quota is not None else None
    if rewritten is None and prediction is None and quota is None and promise is None and not is_watched:
        return PASS_PLAN
    return ResponsePlan(
        pool=pool,
        requested_model=rewritten,
        prediction=prediction,
        sampled=is_sampled,
        watched=is_watched,
        read_below_bytes=read_below,
        quota=quota,
        promise=promise,
    )


def new_decision_id() -> str:
    """Return a decision id: 16 hex digits, which need not be unguessable."""
    return f"{random.getrandbits(64):016x}"


def decision_headers(decision_id: str, *, predicted_tokens: int | None = None) -> dict[str, str]:
    """Return the headers; `predicted_tokens` are the prompt's expected cached tokens, None if unknown."""
    if predicted_tokens is None:
        return {DECISION_HEADER: decision_id}
    return {DECISION_HEADER: decision_id, PREDICTED_HEADER: str(predicted_tokens)}


def predicted_anew(headers: Mapping[str, str], predicted_tokens: int | None) -> Mapping[str, str]:
    """Return the headers with their prediction replaced, or removed for None; do nothing without a prediction."""
    if PREDICTED_HEADER not in headers:
        return headers
    changed = dict(headers)
    if predicted_tokens is None:
        del changed[PREDICTED_HEADER]
    else:
        changed[PREDICTED_HEADER] = str(predicted_tokens)
    return changed
