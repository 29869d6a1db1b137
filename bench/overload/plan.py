"""What an overload run measures: the pods, the classes and their load, and the targets that count as in time.

`run` and `virtual` use STANDARD or QUICK. Tokens and seconds are scaled down, so that two cores carry pods, router and
clients and it is the pods that are overloaded: docs/evidence/overload-benchmark.md.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.routing.plan import PodSettings

CRITICAL, STANDARD_CLASS, SHEDDABLE = "critical", "standard", "sheddable"
STEADY, FLOOD = "steady", "flood"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassLoad:
    """Requests of one class. Loads are shares of capacity, counted in uncached prompt tokens."""

    name: str
    ttft_limit: float  # seconds: the class's target, and what counts as in time
    shortest_tokens: int
    longest_tokens: int  # lengths are spread evenly over the logarithm between these two
    shared_tokens: int  # before them: a prefix that all requests of the tenant in this class have
    answer_tokens: int
    steady_load: float  # of the tenant that keeps to its share, at every load
    flood_load: float  # of the other tenant at the lowest load
    flood_share: float  # of all that comes on top of the lowest load
    inter_token_limit: float | None = None  # seconds: the promised mean inter-token time of an answer


# important traffic does not grow with the rest: its latency can be compared over the loads, request by request
CLASSES = (
    ClassLoad(
        name=CRITICAL,
        ttft_limit=0.5,
        shortest_tokens=100,
        longest_tokens=600,
        shared_tokens=0,
        answer_tokens=8,
        steady_load=0.1,
        flood_load=0.1,
        flood_share=0.0,
    ),
    ClassLoad(
        name=STANDARD_CLASS,
        ttft_limit=2.0,
        shortest_tokens=200,
        longest_tokens=2000,
        shared_tokens=256,
        answer_tokens=16,
        steady_load=0.03,
        flood_load=0.03,
        flood_share=0.2,
    ),
    ClassLoad(
        name=SHEDDABLE,
        ttft_limit=6.0,
        shortest_tokens=300,
        longest_tokens=4000,
        shared_tokens=0,
        answer_tokens=16,
        steady_load=0.12,
        flood_load=0.12,
        flood_share=0.8,
    ),
)
LOWEST_LOAD = 0.5  # sum of all steady and flood loads above


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the benchmark."""

    seed: int = 11
    pods: PodSettings = field(
        default_factory=lambda: PodSettings(
            pods=4,
            kv_blocks=1536,
            prefill_tokens_per_second=7_000,
            inter_token_ms=10,
            max_num_seqs=16,
            max_num_batched_tokens=512,
        )
    )
    capacity: float = 28_000.0  # prompt tokens/s that these pods compute when they always have enough to do
    classes: tuple[ClassLoad, ...] = CLASSES
    loads: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)
    few_loads: tuple[float, ...] = (1.0, 3.0)  # of arms that are there for comparison
    warm_seconds: float = 4.0  # of each load, not measured
    seconds: float = 14.0  # of each load, with the warm-up
    long_seconds: float = 24.0  # of the lowest and the highest load, whose p99 are compared
    fall_high: float = 3.0  # the load that falls
    fall_low: float = 0.5
    fall_after_seconds: float = 8.0
    fall_seconds: float = 20.0
    bad_pod_load: float = 0.6  # 0.8 of the other pods' capacity
    bad_pod_at_seconds: float = 5.0
    bad_pod_seconds: float = 18.0
    obeying_share: float = 0.5  # of the clients of the sheddable class; all others obey
    most_attempts: int = 3
    patience_seconds: float = 15.0
    limit_seconds: float = 1200.0  # start to end, with the part with a promised inter-token time

    def seconds_at(self, load: float) -> float:
        """How long a load is played."""
        return self.long_seconds if load in (self.loads[0], self.loads[-1]) else self.seconds


STANDARD = Plan()
QUICK = Plan(
    loads=(0.5, 3.0),
    few_loads=(3.0,),
    seconds=7.0,
    long_seconds=7.0,
    warm_seconds=2.0,
    fall_after_seconds=5.0,
    fall_seconds=12.0,
    bad_pod_at_seconds=2.0,
    bad_pod_seconds=9.0,
)


def policy(**changes: Any) -> Mapping[str, Any]:
    """The classes as they come, with targets that are scaled like the pods; `changes` are fields of `overload`.

    The limits in the queue are twice the targets.
    """
    classes = [
        {"name": each.name, "ttftSeconds": each.ttft_limit, "queueSeconds": 2 * each.ttft_limit}
        for each in CLASSES
        if each.name != CRITICAL  # has its default ones
    ]
    return {
        "priorities": {"trustObjective": True, "classes": classes},
        "load": {"overload": changes},
    }
