"""The policy's minimum hit ratio: a short match makes an endpoint no better than none, and the books stay true."""

import random
from typing import Any

import pytest

from extproc.choosing.candidates import candidates_of
from extproc.choosing.decision import decide
from extproc.choosing.health import EndpointHealth
from extproc.pods.endpoint import Candidate, EndpointStatus, Reachability
from extproc.pods.inflight import Bookings
from extproc.policy.merged_policy import pick_policy
from extproc.policy.values import PickPolicy
from extproc.prefixes.prompt_match import NO_HITS, PromptMatch
from extproc.prefixes.routing_memory import RoutingMemory
from tests.unit.extproc_choosing.pick_candidates import load

PROMPT = 1000


def match(**tokens: int) -> PromptMatch:
    worth = {name: float(count) for name, count in tokens.items()}
    return PromptMatch(
        prompt_tokens=PROMPT, matched_tokens=tokens, worth_tokens=worth, indexed_tokens=tokens, recent_tokens=tokens
    )


def candidates(policy: PickPolicy, found: PromptMatch, **waiting: int) -> list[Candidate]:
    statuses = [
        EndpointStatus(
            address=name,
            reachability=Reachability.READY,
            load=load(reported_at=10.0, waiting_requests=count),
        )
        for name, count in waiting.items()
    ]
    return candidates_of(
        statuses,
        found,
        NO_HITS,
        bookings=Bookings(),
        memory=RoutingMemory(policy),
        health=EndpointHealth(),
        policy=policy,
        session=None,
        adapter=None,
        now=11.0,
    )


def with_ratio(ratio: float, **more: Any) -> PickPolicy:
    return pick_policy({"prefixCache": {"minimumHitRatio": ratio}, "scoring": more})[0]


@pytest.mark.parametrize(
    ("ratio", "matched", "saved"),
    [(0.0, 1, 1.0), (0.3, 299, 0.0), (0.3, 300, 300.0), (1.0, 998, 0.0), (1.0, 1000, 999.0), (1.0, 999, 999.0)],
)
def test_a_match_counts_from_the_ratio_on(ratio: float, matched: int, saved: float) -> None:
    (pod,) = candidates(with_ratio(ratio), match(a=matched), a=0)
    assert (pod.saved_tokens, pod.recent_tokens) == (saved, int(matched) if saved else 0)


def test_what_the_pod_is_expected_to_find_stays_in_the_books() -> None:
    (pod,) = candidates(with_ratio(0.5), match(a=400), a=0)
    assert (pod.matched_tokens, pod.indexed_tokens, pod.saved_tokens) == (400, 400, 0.0)


@pytest.mark.parametrize(("ratio", "picked"), [(0.0, "warm"), (0.5, "idle")])
def test_a_short_match_no_longer_outweighs_a_queue(ratio: float, picked: str) -> None:
    policy = with_ratio(ratio, weights={"prefix": 3, "queue-depth": 1}, strategy="prefix-aware")
    kept = candidates(policy, match(warm=400), warm=3, idle=0)
    decision = decide(
        kept, rejected={}, policy=policy, prompt_tokens=PROMPT, degraded={}, tie_break=random.Random(1).random
    )
    assert decision.endpoints[0] == picked


def test_without_a_known_prompt_nothing_changes() -> None:
    (pod,) = candidates(with_ratio(0.5), PromptMatch(prompt_tokens=0), a=0)
    assert (pod.matched_tokens, pod.saved_tokens) == (0, 0.0)
