"""Latency targets of priority classes, by the tolerance of their users and by name. Units are seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Tolerance(StrEnum):
    """How long users of a class tolerate waiting: sets the targets that the class leaves out."""

    MILLISECONDS = "milliseconds"  # in the loop: code completion, search answers
    SECONDS = "seconds"  # chat, drafting
    MINUTES = "minutes"  # summaries, research agents
    HOURS = "hours"  # nightly batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of a class, in seconds."""

    ttft_seconds: float  # from the request's arrival here to the first token
    inter_token_seconds: float
    queue_seconds: float  # longest wait in the queue


# by tolerance; queue limits are below the timeouts of HTTP clients (the openai SDK: 600 s)
TARGETS: Mapping[Tolerance, Targets] = MappingProxyType(
    {
        Tolerance.MILLISECONDS: Targets(ttft_seconds=0.5, inter_token_seconds=0.05, queue_seconds=2.0),
        Tolerance.SECONDS: Targets(ttft_seconds=5.0, inter_token_seconds=0.1, queue_seconds=30.0),
        Tolerance.MINUTES: Targets(ttft_seconds=60.0, inter_token_seconds=0.5, queue_seconds=120.0),
        Tolerance.HOURS: Targets(ttft_seconds=1800.0, inter_token_seconds=5.0, queue_seconds=300.0),
    }
)


class NamedTargets(StrEnum):
    """Benchmarks of MLPerf Inference."""

    LLAMA2_70B = "mlperf-llama2-70b"
    LLAMA2_70B_INTERACTIVE = "mlperf-llama2-70b-interactive"
    LLAMA3_8B = "mlperf-llama3.1-8b"
    LLAMA3_8B_INTERACTIVE = "mlperf-llama3.1-8b-interactive"
    LLAMA3_405B = "mlperf-llama3.1-405b"
    LLAMA3_405B_INTERACTIVE = "mlperf-llama3.1-405b-interactive"


MLPERF_TARGETS: Mapping[NamedTargets, tuple[float, float]] = MappingProxyType(
    {
        NamedTargets.LLAMA2_70B: (2.0, 0.2),
        NamedTargets.LLAMA2_70B_INTERACTIVE: (0.45, 0.04),
        NamedTargets.LLAMA3_8B: (2.0, 0.1),
        NamedTargets.LLAMA3_8B_INTERACTIVE: (0.5, 0.03),
        NamedTargets.LLAMA3_405B: (6.0, 0.175),
        NamedTargets.LLAMA3_405B_INTERACTIVE: (4.5, 0.08),
    }
)
"""TTFT and mean inter-token time that 99 % of a benchmark's requests must keep in the server scenario.

Source: https://github.com/mlcommons/inference/blob/001712e9daf80386e0dda43f97b8f36981d792c4/loadgen/mlperf.conf
"""
