"""What is to be done with the response of a request that was picked: mostly nothing. Asked by `pool_picker`."""

from extproc.pick import Picked
from extproc.pools.pace import Pace
from extproc.responses.response_plan import PASS_PLAN, Prediction, ResponsePlan


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
) -> ResponsePlan:
    """Return the plan: what is put back, compared or counted.

    A sample is read for usage whatever its size; others that are no streams up to `read_below_bytes`, as far as `reads`
    lets them be at `now` (monotonic seconds). `label`: the model that was asked for, if its name is a configured one;
    `sent_at`: unix seconds.
    """
    prepared, decision = picked.prepared, picked.decision
    resolved = prepared.resolved
    # a model that the load has put in the place of another one keeps its name
    is_rewritten = resolved.is_rewritten and not prepared.has_smaller_model and prepared.sent.changed is not None
    read_below = 0 if prepared.request.stream else read_below_bytes
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
    if rewritten is None and prediction is None and quota is None:
        return PASS_PLAN
    return ResponsePlan(
        pool=pool,
        requested_model=rewritten,
        prediction=prediction,
        sampled=is_sampled,
        read_below_bytes=read_below,
        quota=quota,
    )
