"""Values: the observations of one look at a pool, and the resulting signal."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from kvmesh.pods.pod_report import EndpointLoad


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pod at one look."""

    address: str
    role: str
    serves: bool  # may get requests; False while it starts or after it has failed
    load: EndpointLoad | None  # None without a fresh report
    tokens_per_second: float  # prefill rate under full load: learned, or the policy's
    request_seconds: float  # prefill time of its average request
    running_limit: float | None = None  # running requests while others wait; None if none has waited yet
    variant: str = ""  # name in the policy; "" outside all variants
    is_learned: bool = True  # `tokens_per_second` was measured; False: the policy's assumption


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pool at one look. Queues and refusals are this picker's; `pickers` counts all pickers."""

    pods: Sequence[PodSeen]
    pickers: int = 1
    queued_requests: int = 0  # in this picker
    queued_tokens: float = 0.0  # uncached tokens of their prompts
    foreseen_requests: int = 0  # of them, those with an expected length of their answers
    answer_tokens: float = 0.0  # of these answers
    refused_requests: float = 0.0  # for load or for lack of a pod, since the picker started
    refused_tokens: float = 0.0
    ttft_seconds: float | None = None  # tightest target of the classes with requests, or None
    inter_token_seconds: float | None = None


class State(StrEnum):
    """How reliable a signal is."""

    OK = "ok"
    TOO_FEW_SAMPLES = "too-few-samples"
    CLOCK_JUMPED = "clock-jumped"
    NONSENSE_REPORTS = "nonsense-reports"
    NO_READY_PODS = "no-ready-pods"
    NO_REPORTS = "no-reports"
    PROMISE_OUT_OF_REACH = "promise-out-of-reach"


class Source(StrEnum):
    """Where a capacity comes from."""

    LEARNED = "learned"
    DECLARED = "declared"  # by the policy
    ASSUMED = "assumed"  # its pods have had too little load to measure: the policy's prefillTokensPerSecond
    UNKNOWN = "unknown"  # no pod was seen, and the policy declares nothing


class VariantSignal(msgspec.Struct, frozen=True, kw_only=True):
    """Desired replicas of one variant of a role, and the capacity of one pod."""

    name: str  # "" without variants, or for pods outside all variants
    wanted: int
    told: int
    ready: int
    present: int
    pod_hour_price: float | None  # None without a price in the policy
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None  # at the inter-token target
    source: Source
    streams: float | None = None  # of one pod within the SLO
    request_seconds: float = 0.0  # prefill time of the average prompt


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of the present pods, in the policy's currency; None if a price is missing or nothing is served."""

    per_hour: float | None = None
    per_million_tokens: float | None = None  # prompts (including cached) and answers, as served in the last minutes
    per_million_output_tokens: float | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """Desired replicas of one role of a pool, and the reason."""

    role: str
    wanted: int
    told: int  # reported replicas: `wanted`, or in shadow mode `present`
    ready: int  # serving pods
    present: int  # serving and starting pods
    state: State = State.OK
    reason: str = ""  # in words
    shadow: bool = False
    saturation: float | None = None  # busy pods per ready pod; None if unknown
    prefill_busy: float | None = None  # pods kept busy by prompts now
    decode_busy: float | None = None  # pods kept busy by decoding now
    queued_tokens: float = 0.0  # of prompts queued in pickers and pods
    input_tokens_per_second: float = 0.0  # uncached: computed, queued or refused
    cached_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    variants: tuple[VariantSignal, ...] = ()
    costs: Costs = Costs()

    @property
    def prefill_lean(self) -> float | None:
        """The share of prefill in the work, or None if prefill or decoding is unknown."""
        if self.prefill_busy is None or self.decode_busy is None or not self.prefill_busy + self.decode_busy:
            return None
        return self.prefill_busy / (self.prefill_busy + self.decode_busy)
