"""What is recorded and then simulated: the pods, the load, and two policies that do different things to it.

Small pods and few requests a second, so that two cores carry gateway, picker, pods and clients and it is the pods that
are overloaded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bench.overload.plan import CRITICAL, SHEDDABLE, STANDARD_CLASS, ClassLoad, Plan
from bench.routing.plan import PodSettings

PODS = PodSettings(
    pods=3,
    kv_blocks=4096,
    prefill_tokens_per_second=3_000,
    inter_token_ms=20,
    max_num_seqs=16,
    max_num_batched_tokens=512,
)
CLASSES = (
    ClassLoad(
        name=CRITICAL,
        ttft_limit=1.0,
        shortest_tokens=100,
        longest_tokens=600,
        shared_tokens=0,
        answer_tokens=16,
        steady_load=0.1,
        flood_load=0.1,
        flood_share=0.0,
    ),
    ClassLoad(
        name=STANDARD_CLASS,
        ttft_limit=4.0,
        shortest_tokens=200,
        longest_tokens=1500,
        shared_tokens=256,
        answer_tokens=32,
        steady_load=0.05,
        flood_load=0.05,
        flood_share=0.3,
    ),
    ClassLoad(
        name=SHEDDABLE,
        ttft_limit=6.0,
        shortest_tokens=300,
        longest_tokens=3000,
        shared_tokens=0,
        answer_tokens=48,
        steady_load=0.1,
        flood_load=0.1,
        flood_share=0.7,
    ),
)


def sheds() -> Mapping[str, Any]:
    """Policy A: the classes with their targets; what cannot be served in time is refused."""
    return {
        "priorities": {
            "trustObjective": True,
            "classes": [{"name": each.name, "ttftSeconds": each.ttft_limit} for each in CLASSES],
        },
        "observability": {"sampleShare": 1},
    }


def limits() -> Mapping[str, Any]:
    """Policy B: quotas for the sheddable class's flood, shorter answers under load, and a shorter target."""
    classes = [
        {"name": CRITICAL, "ttftSeconds": 1.0},
        {"name": STANDARD_CLASS, "ttftSeconds": 4.0, "sheddable": True},
        {
            "name": SHEDDABLE,
            "ttftSeconds": 2.0,
            "degrade": [{"step": "cap-output", "tokens": 8, "enter": 0.4, "leave": 0.2}],
        },
    ]
    return {
        "priorities": {"trustObjective": True, "classes": classes},
        "quotas": [{"tenant": "*", "promptTokensPerMinute": 330_000, "burstSeconds": 5}],
        "observability": {"sampleShare": 1},
    }


POLICIES: Mapping[str, Mapping[str, Any]] = {"sheds": sheds(), "limits": limits()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayPlan:
    """One recording of each policy."""

    load: float = 1.5
    seconds: float = 60.0
    overload: Plan = field(
        default_factory=lambda: Plan(
            seed=23, pods=PODS, capacity=PODS.pods * PODS.prefill_tokens_per_second, classes=CLASSES, most_attempts=1
        )
    )
