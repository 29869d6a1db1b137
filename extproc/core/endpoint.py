"""Endpoints as the picker knows them: what each pod reported, what was booked since, what of the prompt it holds."""

from dataclasses import dataclass
from enum import StrEnum


class Reachability(StrEnum):
    """What the last scrapes say of an endpoint."""

    READY = "ready"  # it reported its load recently
    UNKNOWN = "unknown"  # it is there as far as we know, but its load is not known: never taken for idle
    UNREACHABLE = "unreachable"  # nobody listens


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointLoad:
    """What one vLLM pod reported of itself, summed over its engines."""

    waiting_requests: int
    running_requests: int
    kv_usage: float  # 0..1, share of cache blocks in use
    prefix_hit_tokens: int  # since the pod started
    prefix_query_tokens: int  # since the pod started
    reported_at: float  # monotonic seconds at which the report was asked for

    def is_stale(self, *, now: float, limit_seconds: float) -> bool:
        """Tell whether the report is too old to say anything."""
        return now - self.reported_at > limit_seconds

    @property
    def prefix_hit_rate(self) -> float | None:
        """Share of prompt tokens found in the pod's cache since it started, or None before the first prompt."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatus:
    """One endpoint between two scrapes."""

    address: str  # host:port, IPv6 bracketed
    reachability: Reachability
    load: EndpointLoad | None  # None: never reported, or too old to be used


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One endpoint as one request sees it: the input of filters and scorers."""

    address: str
    reachability: Reachability
    load: EndpointLoad | None
    booked_requests: int  # sent by this picker since the report
    matched_tokens: int  # leading prompt tokens that the endpoint is known to hold, at most prompt_tokens - 1
    prompt_tokens: int  # 0 when the prompt's tokens are not known

    @property
    def queue_depth(self) -> int | None:
        """Requests waiting there plus those that were sent since, or None when the load is unknown."""
        return None if self.load is None else self.load.waiting_requests + self.booked_requests
