"""What the operator decides: weights, thresholds, what is shown. Values, and at once the declaration of their fields.

Each struct says what the section of that shape takes in an InferencePolicy: `policy.schema` reads the annotations,
`policy.spec` puts the sections together. `policy.priority` has the classes and quotas.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated

from msgspec import Meta

from extproc.pods.endpoint import Role
from extproc.policy.autoscale import Autoscale
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.priority import OverloadPolicy, PriorityPolicy
from extproc.policy.schema import (
    Amount,
    AmountOrZero,
    Count,
    CountOrZero,
    Factor,
    Million,
    RealShare,
    Seconds,
    SecondsOrZero,
    Section,
    Share,
    about,
    at_most,
    matching,
)


class Steering(StrEnum):
    """How Envoy gets the pick: as a list that retries walk, or one address for an ORIGINAL_DST cluster."""

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
            prefill_work=16.0, decode_work=2.0, cache_room=2.0, queue_depth=1.0, kv_usage=0.5, lora=4.0, session=0.5
        ),
        # 3 x KV use + 1 x active requests - 10 x match + 0.5 x memory bandwidth - 1 x recent, every term 0..1
        Strategy.LATENCY_COST: _weights(
            kv_usage=3.0, active_requests=1.0, prefix=10.0, memory_bandwidth=0.5, recent_prefix=1.0
        ),
    }
)

# share of a GPU hit's worth; the rest is the cost of fetching the block
TIER_WEIGHTS: Mapping[str, float] = MappingProxyType(
    {"GPU": 1.0, "CPU": 0.8, "CPU_TIER1": 0.8, "CPU_TIER2": 0.6, "STORAGE": 0.5, "FS": 0.5, "OBJ": 0.4}
)


def tier_worth(tier: str, weights: Mapping[str, float]) -> float:
    """Return what a hit in this tier is worth, 0..1: as the policy or TIER_WEIGHTS says; unknown tiers as storage."""
    worth = weights.get(tier)
    return TIER_WEIGHTS.get(tier, TIER_WEIGHTS["STORAGE"]) if worth is None else worth


class Scales(Section, frozen=True, kw_only=True):
    """The difference that a scorer counts as a whole point; larger differences spread over the point."""

    prefill_tokens: Annotated[Amount, about("prefill-work: the difference that is one whole point")] = 16384.0
    decode_tokens: Annotated[Amount, about("decode-work: the same")] = 65536.0
    queue_requests: Annotated[Amount, about("queue-depth: the same")] = 4.0
    active_requests: Annotated[Amount, about("active-requests: the same")] = 8.0
    request_tokens: Annotated[AmountOrZero, about("decode-work: what a sequence costs besides its context")] = 512.0
    # a token that is computed also delays the requests behind it
    recompute_factor: Annotated[Amount, about("prefill-work: waiting tokens that one computed token counts as")] = 2.0
    waiting_tokens: Annotated[
        AmountOrZero, about("prefill-work: least tokens that a reported waiting request counts as")
    ] = 512.0
    cache_tokens: Annotated[Amount, about("cache-room: size of a pod's cache where the pod does not report it")] = (
        100_000.0
    )
    memory_bytes_per_second: Annotated[
        Amount, about("memory-bandwidth: bytes per second that a pod's memory can move")
    ] = 2e12


class HealthPolicy(Section, frozen=True, kw_only=True):
    """When an endpoint is avoided although it answers."""

    conditions = (at_most("avoidSeconds", "longestAvoidSeconds"),)

    failure_share: Annotated[RealShare, about("share of a pod's requests in the window that failed")] = 0.5
    least_requests: Annotated[CountOrZero, about("requests in the window; fewer prove nothing")] = 5
    window_seconds: Annotated[Seconds, about("length of the window")] = 10.0
    avoid_seconds: Annotated[Seconds, about("the pod is avoided for this long; doubled each time in a row")] = 5.0
    longest_avoid_seconds: Annotated[Seconds, about("and for at most this long")] = 60.0
    slow_factor: Annotated[Factor, about("an inter-token time this many times the pods' median is an outlier")] = 3.0
    slow_floor_seconds: Annotated[SecondsOrZero, about("an inter-token time below this is never one")] = 0.05
    most_avoided_share: Annotated[
        RealShare, about("share of the pods that may be avoided; if more are bad, none is")
    ] = 0.5


class HotspotPolicy(Section, frozen=True, kw_only=True):
    """When a prefix is copied to a further endpoint on purpose."""

    enabled: Annotated[bool, about("hot prefixes are copied to a further pod")] = True
    pressure: Annotated[Million, about("the longer wait at the prefix's pod, as a share of what the hit saves")] = 1.0
    least_requests: Annotated[CountOrZero, about("requests under pressure that make a prefix hot")] = 8
    window_seconds: Annotated[Seconds, about("the time within which they come")] = 5.0
    copies: Annotated[int, Meta(ge=0, le=1000), about("copies of each prefix beside the first holder's")] = 1
    remember_seconds: Annotated[Seconds, about("a copy is remembered for this long")] = 60.0
    most_prefixes: Annotated[Count, about("prefixes that are remembered at a time")] = 1024


class ObservabilityPolicy(Section, frozen=True, kw_only=True):
    """What is written down and shown of the traffic."""

    sample_share: Annotated[
        Share | None,
        about(
            "share of the responses that are read: realised hits, and targets that were met",
            default="as --sample-share",
        ),
    ] = None  # None: as the picker's flag says
    audit_share: Annotated[Share, about("share of the decisions that go to the access log and to the audit")] = 1.0
    show_prompt_text: Annotated[bool, about("true: the page may show how hot prompts begin; nothing else does")] = False
    gpu_hour_price: Annotated[
        Million,
        about(
            "price of one pod's accelerators for an hour, to count what saved prefill is worth; 0: no money is shown"
        ),
    ] = 0.0
    currency: Annotated[
        # it becomes a label of metrics and a word on pages
        Annotated[str, matching("^[A-Za-z]+$", "letters", most=8)], about("what the price is in")
    ] = "USD"


class Scoring(Section, frozen=True, kw_only=True):
    """How endpoints are compared."""

    strategy: Annotated[
        Strategy,
        about("preset of the weights; where a more specific policy names one, wider policies' weights do not count"),
    ] = Strategy.KV_AWARE
    weights: Annotated[
        Mapping[str, Annotated[Million, about("weight of this scorer; 0 takes it out")]],
        about("single weights on top of the preset", names=dict.fromkeys(SCORER_NAMES, "preset")),
    ] = {}
    scales: Annotated[Scales, about("the difference that scorers count as one whole point")] = Scales()
    fallbacks: Annotated[int, Meta(ge=0, le=16), about("endpoints named after the winner, for Envoy's retries")] = 2
    session_seconds: Annotated[Seconds, about("a session is remembered for this long after its last request")] = 300.0


class PrefixCache(Section, frozen=True, kw_only=True):
    """What cached prefixes count for."""

    minimum_hit_ratio: Annotated[
        Share, about("gate: a match shorter than this share of the prompt makes an endpoint no better than one without")
    ] = 0.0
    alert_hit_ratio: Annotated[
        Share, about("target for alerts: share of all prompt tokens that should be found in caches; 0: none")
    ] = 0.0
    tier_weights: Annotated[
        Mapping[str, Annotated[Share, about("share of a GPU hit's worth")]],
        about(
            "what hits in slower tiers are worth", names={tier: f"{worth:g}" for tier, worth in TIER_WEIGHTS.items()}
        ),
    ] = {}
    recent_seconds: Annotated[
        SecondsOrZero, about("what was just routed to a pod is expected in its cache for this long")
    ] = 5.0
    unfollowed_seconds: Annotated[SecondsOrZero, about("the same for pods whose events are not followed")] = 180.0
    hotspot: Annotated[HotspotPolicy, about("when a prefix is copied to a further pod on purpose")] = HotspotPolicy()


class Load(Section, frozen=True, kw_only=True):
    """When pods are full, and when they are avoided."""

    stale_after_seconds: Annotated[Seconds, about("a pod's report that is older than this says nothing")] = 2.0
    prefill_tokens_per_second: Annotated[Amount, about("how fast a pod computes prompts until its reports show it")] = (
        8000.0
    )
    overload: Annotated[OverloadPolicy, about("when pods count as full, what waits, and what is refused")] = (
        OverloadPolicy()
    )
    health: Annotated[HealthPolicy, about("when a pod is avoided although it reports")] = HealthPolicy()


SCORING, PREFIX_CACHE, LOAD, DISAGGREGATION = Scoring(), PrefixCache(), Load(), Disaggregation()
AUTOSCALE = Autoscale()


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """How endpoints are compared, and whose requests go first: what a picker goes by.

    Made from the sections of a policy by `policy.merged_policy`; the sections say what each field means.
    """

    strategy: Strategy = SCORING.strategy
    weights: Mapping[str, float] = field(default_factory=lambda: PRESETS[SCORING.strategy])  # none of them is 0
    scales: Scales = SCORING.scales
    stale_after_seconds: float = LOAD.stale_after_seconds
    fallbacks: int = SCORING.fallbacks
    tier_weights: Mapping[str, float] = field(default_factory=dict)  # tier -> 0..1; others as TIER_WEIGHTS has them
    minimum_hit_ratio: float = PREFIX_CACHE.minimum_hit_ratio
    alert_hit_ratio: float = PREFIX_CACHE.alert_hit_ratio
    recent_prefix_seconds: float = PREFIX_CACHE.recent_seconds
    unfollowed_prefix_seconds: float = PREFIX_CACHE.unfollowed_seconds
    session_seconds: float = SCORING.session_seconds
    prefill_tokens_per_second: float = LOAD.prefill_tokens_per_second
    health: HealthPolicy = LOAD.health
    hotspot: HotspotPolicy = PREFIX_CACHE.hotspot
    cordoned: frozenset[str] = frozenset()  # endpoints that get nothing new
    roles: Mapping[str, Role] = field(default_factory=dict)  # endpoint -> role; others do both
    pair_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # endpoint -> labels: `disaggregation`
    disaggregation: Disaggregation = DISAGGREGATION
    autoscale: Autoscale = AUTOSCALE
    priorities: PriorityPolicy = field(default_factory=PriorityPolicy)
    observability: ObservabilityPolicy = field(default_factory=ObservabilityPolicy)

    @property
    def shadow(self) -> bool:
        """Whether what would be refused, degraded, offloaded or scaled is only counted and shown."""
        return self.priorities.shadow
