"""What is measured: pods, mixes of requests, shapes of load, promises, arms.

One pod is about an 8B model on a large GPU. It computes prompts one after the other, 8,000 tokens a second; a token of
its streams takes 12 ms, 0.4 ms more for each stream, and 20 ms more while a prompt is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One pod."""

    tokens_per_second: float = 8000.0  # of prompts
    alone_seconds: float = 0.012  # of a token where one stream runs
    stream_seconds: float = 0.0004  # that each further one adds
    prompt_seconds: float = 0.020  # that a prompt adds while it is computed
    cache_tokens: float = 196_608.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """What requests are; means of lognormal lengths, tokens."""

    uncached_tokens: float
    cached_tokens: float
    answer_tokens: float
    busy_pods: float  # that a load of 1 keeps busy, by prompts alone
    is_recorded: bool = False  # lengths, order and gaps are those of the trace
    ttft_seconds: float | None = None  # promised; None: the plan's
    spread: float = 0.8  # sigma of the lengths' logarithms


MIXES: Mapping[str, Mix] = MappingProxyType(
    {
        "long-prompts": Mix(uncached_tokens=4000.0, cached_tokens=3000.0, answer_tokens=180.0, busy_pods=1.0),
        "long-answers": Mix(uncached_tokens=500.0, cached_tokens=500.0, answer_tokens=600.0, busy_pods=0.2),
        # means of bench/data/mooncake_conversation_cut.jsonl; its longest prompt takes 8 s alone
        "mooncake": Mix(
            uncached_tokens=7469.0,
            cached_tokens=4344.0,
            answer_tokens=347.0,
            busy_pods=1.0,
            is_recorded=True,
            ttft_seconds=10.0,
        ),
    }
)
SHAPES: Mapping[str, float] = MappingProxyType({"step": 10_800.0, "day": 43_200.0})  # seconds
MOST_TOKENS = 30_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run."""

    engine: Engine = field(default_factory=Engine)
    start_seconds: float = 90.0
    sync_seconds: float = 15.0  # between two looks of an autoscaler, as Kubernetes' and KEDA's
    report_seconds: float = 1.0  # between two scrapes
    warm_seconds: float = 600.0  # not counted
    peak: float = 8.0  # of the load
    ttft_seconds: float = 2.0
    inter_token_seconds: float = 0.05  # mean of a request
    most_pods: int = 40
    first_pods: int = 3
    end_seconds: float = 120.0  # that a request has at least: what comes later is not counted
    window_seconds: float = 300.0  # `stabilizationSeconds` of kvmesh's policy
    slot_seconds: float = 60.0  # in which who knows all counts
    seconds: Mapping[str, float] = field(default_factory=lambda: dict(SHAPES))


STANDARD = Plan()
QUICK = Plan(seconds={"step": 10_800.0, "day": 14_400.0})  # the day is as steep as six, then
