"""What is to be done with the response of a request that was picked: mostly nothing. Pure."""

from extproc.admission.prepared_request import Picked
from extproc.responses.response_plan import PASS_PLAN, Prediction, ResponsePlan
from extproc.slo.promise import AnswerPromise


class Pace:
    """So many reads a second and no more, with a burst: for work that is welcome and not needed.

    A virtual clock that runs ahead by one interval for each one taken (the generic cell rate algorithm).
    """

    __slots__ = ("_ahead_until", "_burst_seconds", "_interval")

    def __init__(self, *, per_second: float, burst_seconds: float) -> None:
        """Allow `per_second` on average (0: none), and as many at once as `burst_seconds` bring."""
        self._interval = 1.0 / per_second if per_second > 0 else float("inf")
        self._burst_seconds = burst_seconds
        self._ahead_until = 0.0

    def take(self, *, now: float) -> bool:
        """Take one, if there is one to be had at `now` (monotonic seconds)."""
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
    read_below_bytes: int,
    reads: Pace,
    now: float,
    label: str = "",
    sent_at: float = 0.0,
    promise: AnswerPromise | None = None,
) -> ResponsePlan:
    """Return the plan: what is put back, compared, judged or counted.

    A sample is read for usage whatever its size; others that are no streams up to `read_below_bytes`, as far as `reads`
    lets them be at `now` (monotonic seconds). `label`: the model that was asked for, if its name is a configured one;
    `sent_at`: unix seconds; `promise`: what the response is judged by, None where it is not in the sample.
    """
    prepared, decision = picked.prepared, picked.decision
    asked = prepared.asked
    resolved = asked.resolved
    # a model that the load has put in the place of another one keeps its name
    is_rewritten = resolved.is_rewritten and not asked.has_smaller_model and prepared.sent.changed is not None
    read_below = 0 if asked.request.stream else read_below_bytes
    is_comparable = bool(is_sampled or read_below) and picked.is_comparable  # most streams are not even asked
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
    if rewritten is None and prediction is None and quota is None and promise is None:
        return PASS_PLAN
    return ResponsePlan(
        pool=pool,
        requested_model=rewritten,
        prediction=prediction,
        sampled=is_sampled,
        read_below_bytes=read_below,
        quota=quota,
        promise=promise,
    )
