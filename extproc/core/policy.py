"""What the operator decides: weights, thresholds, classes. Values only; `decision` and `admission` apply them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType


class Steering(StrEnum):
    """How Envoy is told the pick: a list that retries walk, or one address for an ORIGINAL_DST cluster."""

    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"


# A whole prefix hit (3) outweighs the longest queue (2), and a part hit of two thirds equals it: recomputing a long
# prompt costs more than waiting behind a few requests. KV use (1) only orders pods that are otherwise equal.
DEFAULT_WEIGHTS: Mapping[str, float] = MappingProxyType({"prefix": 3.0, "queue-depth": 2.0, "kv-usage": 1.0})


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """How endpoints are compared and when a request may be refused."""

    weights: Mapping[str, float] = field(default_factory=lambda: DEFAULT_WEIGHTS)
    saturated_waiting_requests: int = 5  # an endpoint with so many waiting requests is saturated
    saturated_kv_usage: float = 0.8  # 0..1, share of cache blocks in use from which an endpoint is saturated
    stale_after_seconds: float = 2.0  # a report older than this says nothing
    sheddable_classes: frozenset[str] = frozenset()
    retry_after_seconds: int = 2  # what a shed client is told to wait
    fallbacks: int = 2  # endpoints named after the winner, for Envoy's retries
