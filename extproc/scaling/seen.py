"""What a look at a pool finds, and the signal that comes of it: values."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from extproc.scaling.day_profile import DayState
from kvmesh.pods.pod_report import EndpointLoad


class PodSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pod at one look."""

    address: str
    role: str
    serves: bool  # it may get requests; False: it is there and starts, or has failed
    load: EndpointLoad | None  # None: no fresh report
    tokens_per_second: float  # of prompts, when it has enough of them; as learned, or as the policy has it
    request_seconds: float  # of prefill that its average request takes
    running_limit: float | None = None  # requests that it runs when others wait; None: none was seen to wait
    variant: str = ""  # of its role, as the policy names them; "": of none
    is_learned: bool = True  # `tokens_per_second` was seen; False: it is what the policy assumes


class PoolSeen(msgspec.Struct, frozen=True, kw_only=True):
    """One pool at one look. What the pickers count is of this one; `pickers` of them are there."""

    pods: Sequence[PodSeen]
    pickers: int = 1
    queued_requests: int = 0  # that wait in this picker
    queued_tokens: float = 0.0  # of their prompts, not cached
    refused_requests: float = 0.0  # for load, or because no pod was there, since the picker started
    refused_tokens: float = 0.0
    ttft_seconds: float | None = None  # the tightest promise of the classes that have requests; None: of none
    inter_token_seconds: float | None = None
    wall: float | None = None  # the time of day, in seconds since the epoch; None: it is not asked for


class State(StrEnum):
    """What a signal rests on."""

    OK = "ok"
    TOO_FEW_SAMPLES = "too-few-samples"
    CLOCK_JUMPED = "clock-jumped"
    NONSENSE_REPORTS = "nonsense-reports"
    NO_READY_PODS = "no-ready-pods"
    NO_REPORTS = "no-reports"
    PROMISE_OUT_OF_REACH = "promise-out-of-reach"


class Source(StrEnum):
    """Where a capacity is known from."""

    LEARNED = "learned"
    DECLARED = "declared"  # by the policy, or on the command line
    ASSUMED = "assumed"  # pods are there and have had too little to do: the policy's prefillTokensPerSecond
    UNKNOWN = "unknown"  # no pod was seen, and nothing is declared


class VariantSignal(msgspec.Struct, frozen=True, kw_only=True):
    """How many pods of one variant of a role are wanted, and what one of them does."""

    name: str  # "": the pods of a role without variants, or those that are of none
    wanted: int
    told: int
    ready: int
    present: int
    pod_hour_price: float | None  # None: the policy has none
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None  # at the promised inter-token time
    source: Source
    streams: float | None = None  # that a pod runs within the promise
    request_seconds: float = 0.0  # that it takes for the average prompt


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pods that are there, in the policy's currency; None: a price is missing, or nothing is served."""

    per_hour: float | None = None
    per_million_tokens: float | None = None  # of prompts, cached too, and answers, as served in the last minutes
    per_million_output_tokens: float | None = None


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    """How many pods of one role a pool wants, and why."""

    role: str
    wanted: int
    told: int  # to scalers: `wanted`, or in shadow the present number
    ready: int  # pods that serve
    present: int  # these, and those that start
    state: State = State.OK
    reason: str = ""  # in words
    shadow: bool = False
    saturation: float | None = None  # work in busy pods, for each ready one; None: not known
    prefill_busy: float | None = None  # pods that the prompts keep busy now
    decode_busy: float | None = None  # the same of decoding
    queued_tokens: float = 0.0  # of prompts that wait in pickers and pods
    input_tokens_per_second: float = 0.0  # not cached: computed, or waiting, or refused
    cached_tokens_per_second: float = 0.0
    output_tokens_per_second: float = 0.0
    variants: tuple[VariantSignal, ...] = ()
    costs: Costs = Costs()
    time_of_day: DayState = DayState.LEARNING  # whether the days before say what is ahead

    @property
    def prefill_lean(self) -> float | None:
        """What share of the work is prompts; None: one of both kinds is not known."""
        if self.prefill_busy is None or self.decode_busy is None or not self.prefill_busy + self.decode_busy:
            return None
        return self.prefill_busy / (self.prefill_busy + self.decode_busy)
