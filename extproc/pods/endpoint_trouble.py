"""Why an endpoint serves nothing, or its load is not known. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTrouble:
    """Of one endpoint, as its scrapes or its platform say; times are monotonic seconds."""

    since: float
    problem: str | None  # what went wrong last; None: only its platform keeps requests away from it
    asked_every_seconds: float
