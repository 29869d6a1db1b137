"""What a look at a pool finds, and the signal that comes of it: values."""

from collections.abc import Sequence
from enum import StrEnum

import msgspec

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


class State(StrEnum):
    """What a signal rests on."""

    OK = "ok"
    TOO_FEW_SAMPLES = "too-few-samples"
    CLOCK_JUMPED = "clock-jumped"
    NONSENSE_REPORTS = "nonsense-reports"
    NO_READY_PODS = "no-ready-pods"
    NO_REPORTS = "no-reports"
    PROMISE_OUT_OF_REACH = "promise-out-of-reach"


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
