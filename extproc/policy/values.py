"""The operator's settings: scoring, caches, load, observability. Values that also declare their fields in documents.

Each struct is a section of an InferencePolicy: `policy.schema` reads the annotations, `policy.spec` assembles the
sections. `policy.priority` has the classes and quotas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, Any, Self

from msgspec import Meta

from extproc.models.models import ModelTable, ServedModel
from extproc.pods.endpoint import Role
from extproc.pods.pod_ranks import at_rank
from extproc.policy.autoscale import Autoscale
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.priority import OverloadPolicy
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.schema import (
    Amount,
    Million,
    Name,
    RealShare,
    Seconds,
    SecondsOrZero,
    Section,
    Share,
    about,
    matching,
)
from kvmesh.documents.pools import PoolEndpoint

FAIL_OPEN, FAIL_CLOSE = "FailOpen", "FailClose"


class Steering(StrEnum):
    """How Envoy gets the pick: a list of hosts for retries, or one address for an ORIGINAL_DST cluster."""

    OVERRIDE_HOST = "override-host"
    ORIGINAL_DST = "original-dst"


# the scorers that weights may name, in display order; `choosing.scorers` has a function for each
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
    """Presets: sets of weights (`PRESETS`) that the policy may change one by one."""

    ROUND_ROBIN = "round-robin"
    LEAST_REQUEST = "least-request"
    PREFIX_AWARE = "prefix-aware"
    KV_AWARE = "kv-aware"
    LATENCY_COST = "latency-cost"


def _weights(**weights: float) -> Mapping[str, float]:
    return MappingProxyType({name.replace("_", "-"): weight for name, weight in weights.items()})


# `prefill-work` compares tokens to compute, both queued ones and the request's own: a hit is worth exactly the work
# that it saves, so requests stay on the warm pod until waiting there takes longer than computing the prefix elsewhere.
# The other scorers rank pods that are close by this measure.
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
    """Return the worth of a hit in this tier (0..1), by the policy or TIER_WEIGHTS; unknown tiers count as storage."""
    worth = weights.get(tier)
    return TIER_WEIGHTS.get(tier, TIER_WEIGHTS["STORAGE"]) if worth is None else worth


class HealthPolicy(Section, frozen=True, kw_only=True):
    """When a responding endpoint is avoided."""

    failure_share: Annotated[RealShare, about("share of a pod's requests within 10 s that failed")] = 0.5
    avoid_seconds: Annotated[Seconds, about("time of avoidance; doubled on repetition, to twelve times this")] = 5.0
    answered: Annotated[bool, about("true: the picker answers `GET /health`: 200 while a pod may serve, else 503")] = (
        False
    )


class ObservabilityPolicy(Section, frozen=True, kw_only=True):
    """What is logged and shown of the traffic."""

    sample_share: Annotated[
        Share | None,
        about(
            "share of responses to read for actual hits and met targets",
            default="as --sample-share",
        ),
    ] = None  # by the picker's flag if None
    audit_share: Annotated[Share, about("share of decisions in access log and audit")] = 1.0
    show_prompt_text: Annotated[bool, about("true: the page may show the beginnings of hot prompts")] = False
    pod_hour_price: Annotated[
        Million, about("hourly price of a pod, for saved prefill and roles without variants; 0: none")
    ] = 0.0
    currency: Annotated[
        # used as a metric label and on pages
        Annotated[str, matching("^[A-Za-z]+$", "letters", most=8)], about("currency of prices")
    ] = "USD"


class Scoring(Section, frozen=True, kw_only=True):
    """How endpoints are compared."""

    strategy: Annotated[
        Strategy,
        about("preset of the weights; resets the weights of wider policies"),
    ] = Strategy.KV_AWARE
    weights: Annotated[
        Mapping[str, Annotated[Million, about("weight of this scorer; 0 removes it")]],
        about("single weights on top of the preset", names=dict.fromkeys(SCORER_NAMES, "preset")),
    ] = {}
    plugins: Annotated[
        Mapping[Annotated[Name, about("name of its entry point")], Annotated[Million, about("weight of this scorer")]],
        Meta(max_length=16),
        about("weights of installed plug-in scorers", entry=("name", "weight")),
    ] = {}
    fallbacks: Annotated[int, Meta(ge=0, le=16), about("further endpoints for Envoy's retries")] = 2
    session_seconds: Annotated[Seconds, about("lifetime of a session after its last request")] = 300.0


class PrefixCache(Section, frozen=True, kw_only=True):
    """The value of cached prefixes."""

    alert_hit_ratio: Annotated[Share, about("alert threshold: share of cached prompt tokens; 0: none")] = 0.0
    tier_weights: Annotated[
        Mapping[str, Annotated[Share, about("share of a GPU hit's value")]],
        about("value of hits in slower tiers", names={tier: f"{worth:g}" for tier, worth in TIER_WEIGHTS.items()}),
    ] = {}
    recent_seconds: Annotated[SecondsOrZero, about("lifetime of the expectation that a routed prompt is cached")] = 5.0
    copy_hot_prefixes: Annotated[bool, about("copy hot prefixes to a further pod while requests wait")] = True


class Load(Section, frozen=True, kw_only=True):
    """When pods are full, and when they are avoided."""

    stale_after_seconds: Annotated[Seconds, about("maximum age of a pod's report")] = 2.0
    prefill_tokens_per_second: Annotated[Amount, about("a pod's prefill speed until its reports show it")] = 8000.0
    overload: Annotated[OverloadPolicy, about("limits of pods, waiting and refusal")] = OverloadPolicy()
    health: Annotated[HealthPolicy, about("failure limits of a pod")] = HealthPolicy()


SCORING, PREFIX_CACHE, LOAD, DISAGGREGATION = Scoring(), PrefixCache(), Load(), Disaggregation()
AUTOSCALE = Autoscale()


@dataclass(frozen=True, slots=True, kw_only=True)
class PickPolicy:
    """The policy that a picker applies: how endpoints are compared, and whose requests go first.

    Built from the sections of a policy by `policy.merged_policy`; the sections document each field.
    """

    strategy: Strategy = SCORING.strategy
    weights: Mapping[str, float] = field(default_factory=lambda: PRESETS[SCORING.strategy])  # without zeros
    stale_after_seconds: float = LOAD.stale_after_seconds
    fallbacks: int = SCORING.fallbacks
    tier_weights: Mapping[str, float] = field(default_factory=dict)  # tier -> 0..1; defaults in TIER_WEIGHTS
    alert_hit_ratio: float = PREFIX_CACHE.alert_hit_ratio
    recent_prefix_seconds: float = PREFIX_CACHE.recent_seconds
    session_seconds: float = SCORING.session_seconds
    prefill_tokens_per_second: float = LOAD.prefill_tokens_per_second
    health: HealthPolicy = LOAD.health
    copy_hot_prefixes: bool = PREFIX_CACHE.copy_hot_prefixes
    cordoned: frozenset[str] = frozenset()  # endpoints that get no new requests
    roles: Mapping[str, Role] = field(default_factory=dict)  # endpoint -> role; the default is both
    pair_labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # endpoint -> labels for pairing pods
    disaggregation: Disaggregation = DISAGGREGATION
    autoscale: Autoscale = AUTOSCALE
    priorities: PriorityPolicy = field(default_factory=PriorityPolicy)
    observability: ObservabilityPolicy = field(default_factory=ObservabilityPolicy)

    @property
    def shadow(self) -> bool:
        """Whether refusals, degradation, offload and scaling are only counted and shown."""
        return self.priorities.shadow


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """The configuration of one pool. Equal values mean that nothing has changed."""

    name: str  # "namespace/name"; "" for the pool of flags
    from_flags: bool = False  # it serves every request, whatever its route, and flags define its models
    endpoints: tuple[PoolEndpoint, ...] = ()
    policy: PickPolicy = field(default_factory=PickPolicy)
    models: ModelTable = field(default_factory=ModelTable)
    hosts: frozenset[str] = frozenset()  # lowercase, without port; no other pool has them
    endpoint_picker: str = ""  # "namespace/name" of the Service that the InferencePool names for its picker
    sample_share: float | None = None  # of the responses to read; by the flag if None
    failure_mode: str = FAIL_CLOSE
    model: str | None = None  # None if learned from the pods' /v1/models
    learned: tuple[ServedModel, ...] = ()  # models listed there, if none is declared
    # field set by a policy, such as "spec.scoring.strategy" -> "namespace/name" of that policy
    origins: Mapping[str, str] = field(default_factory=dict)

    @property
    def learns_models(self) -> bool:
        """Whether its models are learned from its pods."""
        return self.model is None and not self.from_flags

    def with_ranks(self, ranks: Mapping[str, Sequence[int]]) -> Self:
        """Return the configuration with an endpoint for each rank of these pods (pod -> ranks) in place of the pod."""
        if not ranks:
            return self

        def names(address: str) -> Sequence[str]:
            return [at_rank(address, rank) for rank in ranks[address]] if address in ranks else (address,)

        def spread(values: Mapping[str, Any]) -> Mapping[str, Any]:
            return {name: value for address, value in values.items() for name in names(address)}

        policy = self.policy
        return replace(
            self,
            endpoints=tuple(replace(each, address=name) for each in self.endpoints for name in names(each.address)),
            policy=replace(
                policy,
                cordoned=frozenset(name for address in policy.cordoned for name in names(address)),
                roles=spread(policy.roles),
                pair_labels=spread(policy.pair_labels),
            ),
        )
