"""What the operator decides: weights, thresholds, and in `priority` who goes first. Values only.

Read from a file by `policy.document`; `docs/policy.md` explains each field. Presets are named here.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from extproc.pods.endpoint import Role
from extproc.policy.observability import ObservabilityPolicy
from extproc.policy.priority import PriorityPolicy


class Steering(StrEnum):
    """How Envoy is told the pick: a list that retries walk, or one address for an ORIGINAL_DST cluster."""

    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"


# what weights may name, in the order in which it is listed; `choosing.scorers` has a function for each
SCORER_NAMES = (
    "prefill-work",
    "decode-work",
    "prefix",
    "recent-prefix",
    "queue-depth",
    "active-requests",
    "kv-usage",
    "cache-room",
    "lora",
    "session",
    "memory-bandwidth",
    "turn",
)


class Strategy(StrEnum):
    """Presets: each is a set of weights (`PRESETS`), which the policy may change one by one."""

    ROUND_ROBIN = "round-robin"
    LEAST_REQUEST = "least-request"
    PREFIX_AWARE = "prefix-aware"
    KV_AWARE = "kv-aware"
    LATENCY_COST = "latency-cost"


def _weights(**weights: float) -> Mapping[str, float]:
    return MappingProxyType({name.replace("_", "-"): weight for name, weight in weights.items()})


# `prefill-work` compares tokens to be computed, queued ones and own ones alike: a hit is worth exactly the work that it
# saves, so that a warm pod keeps its prefix until waiting there takes longer than computing it elsewhere. The others
# order pods that this leaves close together.
PRESETS: Mapping[Strategy, Mapping[str, float]] = MappingProxyType(
    {
        Strategy.ROUND_ROBIN: _weights(turn=1.0),
        Strategy.LEAST_REQUEST: _weights(active_requests=1.0),
        Strategy.PREFIX_AWARE: _weights(prefix=3.0, queue_depth=2.0, kv_usage=1.0),
        Strategy.KV_AWARE: _weights(
            prefill_work=16.0,
            decode_work=2.0,
            cache_room=2.0,
            queue_depth=1.0,
            kv_usage=0.5,
            lora=4.0,
            session=0.5,
        ),
        # 3 x KV use + 1 x active requests - 10 x match + 0.5 x memory bandwidth - 1 x recent, every term 0..1
        Strategy.LATENCY_COST: _weights(
            kv_usage=3.0, active_requests=1.0, prefix=10.0, memory_bandwidth=0.5, recent_prefix=1.0
        ),
    }
)
DEFAULT_STRATEGY = Strategy.KV_AWARE


# share of a GPU hit's worth; the rest is the cost of fetching the block
TIER_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"GPU": 1.0, "CPU": 0.8, "CPU_TIER1": 0.8, "CPU_TIER2": 0.6, "STORAGE": 0.5, "FS": 0.5, "OBJ": 0.4}
)


def tier_worth(tier: str, weights: Mapping[str, float]) -> float:
    """Return what a hit in this tier is worth, 0..1: as the policy has it, or as usual; unknown tiers as storage."""
    worth = weights.get(tier)
    return TIER_WEIGHTS.get(tier, TIER_WEIGHTS["STORAGE"]) if worth is None else worth


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """The difference that a scorer counts as a whole point; larger differences spread over the point."""

    prefill_tokens: float = 16384.0  # prefill-work
    decode_tokens: float = 65536.0  # decode-work
    queue_requests: float = 4.0  # queue-depth
    active_requests: float = 8.0  # active-requests
    request_tokens: float = 512.0  # decode-work: what one decoding sequence costs beside its context
    recompute_factor: float = 2.0  # prefill-work: a token computed again also delays whoever comes after
    waiting_tokens: float = 512.0  # prefill-work: what a waiting request that a pod reports counts at least
    cache_tokens: float = 100_000.0  # cache-room: the size of a pod's cache where the pod does not tell
    memory_bytes_per_second: float = 2e12  # memory-bandwidth: what an endpoint's memory can move


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthPolicy:
    """When an endpoint is avoided though it answers."""

    failure_share: float = 0.5  # of the requests in the window
    least_requests: int = 5  # in the window; fewer prove nothing
    window_seconds: float = 10.0
    avoid_seconds: float = 5.0  # the first time; doubled each time in a row
    longest_avoid_seconds: float = 60.0
    slow_factor: float = 3.0  # an inter-token time so many times the pods' median is an outlier
    slow_floor_seconds: float = 0.05  # an inter-token time below it is never one
    most_avoided_share: float = 0.5  # of the endpoints; when more are bad, it is not the endpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class HotspotPolicy:
    """When a prefix is copied to a further endpoint on purpose."""

    enabled: bool = True
    pressure: float = 1.0  # the longer wait at the warm endpoint, as a share of what the hit saves
    least_requests: int = 8  # under pressure, within the window
    window_seconds: float = 5.0
    copies: int = 1  # beside the first holder, for each hot prefix
    remember_seconds: float = 60.0
    most_prefixes: int = 1024  # remembered at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleSignals:
    """Thresholds of one direction; None: this signal says nothing. Means over the ready pods of a role."""

    queue_requests: float | None = None  # waiting at a pod
    kv_usage: float | None = None  # 0..1 of its cache blocks
    gpu_utilization: float | None = None  # 0..1


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalePolicy:
    """How many pods of one role there shall be. Read and shown; nothing scales by it yet.

    More when any signal is at its `scale_up`, fewer when all are at their `scale_down`; in between all stays.
    """

    min_replicas: int = 1
    max_replicas: int | None = None
    scale_up: ScaleSignals = field(default_factory=ScaleSignals)
    scale_down: ScaleSignals = field(default_factory=ScaleSignals)


@dataclass(frozen=True, slots=True, kw_only=True)
class DisaggregationPolicy:
    """When another pod computes a prompt than the one that decodes. Read and shown; nothing is split by it yet."""

    enabled: bool = False
    prompt_tokens: int = 256  # uncached ones from which on a prompt is worth sending
    busy_prompt_tokens: int = 64  # the same where the decoding pod is busy
    busy_decodes: int = 8  # requests that it decodes, from which on it is
    prefill_queue_requests: int = 10  # waiting for prefill, from which on nothing more is sent there


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """How endpoints are compared, and whose requests go first."""

    strategy: Strategy = DEFAULT_STRATEGY
    weights: Mapping[str, float] = field(default_factory=lambda: PRESETS[DEFAULT_STRATEGY])
    scales: Scales = field(default_factory=Scales)
    stale_after_seconds: float = 2.0  # a report older than this says nothing
    fallbacks: int = 2  # endpoints named after the winner, for Envoy's retries
    tier_weights: Mapping[str, float] = field(default_factory=dict)  # tier -> 0..1; others as the index has them
    minimum_hit_ratio: float = 0.0  # 0..1 of the prompt: a shorter match makes an endpoint no better than none
    alert_hit_ratio: float = 0.0  # 0..1 of all prompt tokens that should be found in caches; 0: no target
    recent_prefix_seconds: float = 5.0  # what was just routed somewhere is expected to be cached so long
    unfollowed_prefix_seconds: float = 180.0  # the same where no events tell what became of it
    session_seconds: float = 300.0  # a session is remembered so long after its last request
    prefill_tokens_per_second: float = 8000.0  # of an endpoint, until it has shown its own rate
    health: HealthPolicy = field(default_factory=HealthPolicy)
    hotspot: HotspotPolicy = field(default_factory=HotspotPolicy)
    cordoned: frozenset[str] = frozenset()  # endpoints that get nothing new
    roles: Mapping[str, Role] = field(default_factory=dict)  # endpoint -> role; others do both
    priorities: PriorityPolicy = field(default_factory=PriorityPolicy)
    autoscale: Mapping[str, ScalePolicy] = field(default_factory=dict)  # role -> thresholds
    disaggregation: DisaggregationPolicy = field(default_factory=DisaggregationPolicy)
    observability: ObservabilityPolicy = field(default_factory=ObservabilityPolicy)
