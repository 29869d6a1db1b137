"""Why a pod serves nothing, since when, and when it is tried again, as the pages show it. Pure."""

from typing import Any

from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.endpoint_trouble import EndpointTrouble


def stopped(
    status: EndpointStatus, trouble: EndpointTrouble | None, avoided: tuple[float, float] | None, *, ahead: float
) -> dict[str, Any]:
    """Return since when a pod gets nothing, why, and when it is tried again; `ahead`: of unix seconds."""
    if trouble is not None and status.reachability is not Reachability.READY:
        every = round(trouble.asked_every_seconds, 3)
        return {"since": trouble.since + ahead, "problem": trouble.problem, "asked_every_seconds": every}
    if avoided is not None:
        return {"since": avoided[0] + ahead, "trial_at": avoided[1] + ahead}
    return {}
