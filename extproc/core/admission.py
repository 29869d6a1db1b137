"""Whether a request may be refused for load, first form: sheddable classes while every endpoint is saturated."""

from collections.abc import Sequence

from extproc.core.endpoint import Candidate
from extproc.core.policy import PickPolicy
from extproc.errors import RequestShedError


def admit(candidates: Sequence[Candidate], *, objective: str | None, policy: PickPolicy) -> None:
    """Raise RequestShedError if the objective names a sheddable class and every endpoint is saturated.

    Endpoints whose load is unknown do not count: one stale report must neither halt nor open the gate. With no known
    load at all everything is admitted, because refusing work needs evidence.
    """
    if objective not in policy.sheddable_classes:
        return
    known = [candidate for candidate in candidates if candidate.load is not None]
    if known and all(is_saturated(candidate, policy=policy) for candidate in known):
        raise RequestShedError(
            f"every endpoint is saturated and requests of class {objective!r} may be refused; "
            f"try again in {policy.retry_after_seconds} s",
            retry_after_seconds=policy.retry_after_seconds,
        )


def is_saturated(candidate: Candidate, *, policy: PickPolicy) -> bool:
    """Tell whether more work there would only wait."""
    depth = candidate.queue_depth
    return (
        depth is not None
        and candidate.load is not None
        and (depth >= policy.saturated_waiting_requests or candidate.load.kv_usage >= policy.saturated_kv_usage)
    )
