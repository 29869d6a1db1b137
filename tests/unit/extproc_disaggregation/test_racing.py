"""Races: which prompts two prefill pods compute at once, and how many of them."""

from typing import Any

import pytest
from msgspec.structs import replace

from extproc.disaggregation.offload import Verdict
from extproc.disaggregation.prefill_plan import PrefillPlan, Race, plan_prefill
from extproc.disaggregation.racing import MOST_SAVED, RaceBudget, race_of
from extproc.disaggregation.transfer_protocols import PROTOCOLS
from extproc.pods.endpoint import Candidate
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.pods.link_estimate import LinkEstimates
from extproc.policy.disaggregation import UNRACED, Disaggregation, OffloadRule, Protocol
from tests.unit.extproc_choosing.pick_candidates import candidate, load

POLICY = Disaggregation(
    enabled=True, rule=OffloadRule.ALWAYS, race_share=1.0, race_ttft_seconds=1.0, hand_over_seconds=0.0
)


def plan(*prefillers: Candidate, policy: Disaggregation = POLICY, target: float | None = 1.0) -> PrefillPlan:
    found = plan_prefill(
        candidate("d"),
        prefillers,
        policy=policy,
        labels={},
        estimates=LatencyEstimates(tokens_per_second=10_000.0),
        links=LinkEstimates(),
        target_seconds=target,
        yields=False,
        tie_break=lambda: 0.0,
        now=0.0,
    )
    assert found is not None
    return found


def race(*prefillers: Candidate, **more: Any) -> Race:
    found = race_of(plan(*prefillers, **more), RaceBudget())
    assert found is not None
    return found


def test_the_two_best_pods_race_where_the_second_one_keeps_the_promise_too() -> None:
    found = race(candidate("warm", matched=500), candidate("cold"), candidate("busy", backlog_tokens=9000.0))
    assert found == Race(runs=True, why="cold, the second best, would take 0.225 s")


@pytest.mark.parametrize(
    ("prefillers", "target", "why"),
    [
        ((candidate("a"),), 1.0, "no second prefill pod may compute it"),
        ((candidate("a"), candidate("b")), None, "its class promises nothing; races are for 1 s and less"),
        ((candidate("a"), candidate("b")), 5.0, "its class promises 5 s; races are for 1 s and less"),
        (
            (candidate("a"), candidate("b", backlog_tokens=9000.0)),
            1.0,
            "b, the second best, would take 1.125 s, and 1 s are promised",
        ),
        (
            (candidate("a"), candidate("b", reported=load(waiting_requests=1, running_requests=1))),
            1.0,
            "1 requests wait at b, the second best",
        ),
        (
            (candidate("a"), candidate("b", booked_requests=2)),
            1.0,
            "2 requests wait at b, the second best",
        ),
        (
            (candidate("a"), candidate("b", reported=None, open_requests=3)),
            1.0,
            "3 requests wait at b, the second best",
        ),
    ],
    ids=["alone", "no promise", "no tight one", "too late", "others wait", "others come", "not known"],
)
def test_there_is_no_race_where_it_helps_nobody_or_costs_others(
    prefillers: tuple[Candidate, ...], target: float | None, why: str
) -> None:
    assert race(*prefillers, target=target) == Race(runs=False, why=why)


def test_nothing_is_said_of_races_where_the_policy_wants_none_or_no_prefill_pod_computes_the_prompt() -> None:
    pods = candidate("a"), candidate("b")
    assert race_of(plan(*pods, policy=replace(POLICY, race_share=0.0)), RaceBudget()) is None
    local = replace(plan(*pods), verdict=Verdict(remote=False, why=""))
    assert race_of(local, RaceBudget()) is None


def raced(share: float, prompts: int, budget: RaceBudget) -> int:
    """Return how many of so many prompts are raced that all might be."""
    count = 0
    for _ in range(prompts):
        found = plan(candidate("a"), candidate("b"), policy=replace(POLICY, race_share=share))
        found = replace(found, race=race_of(found, budget))
        budget.count(found)
        count += found.races
    return count


@pytest.mark.parametrize(("share", "prompts", "races"), [(1.0, 7, 7), (0.1, 100, 10), (0.05, 19, 0), (0.3, 10, 3)])
def test_of_the_prompts_that_prefill_pods_compute_the_policys_share_is_raced(
    share: float, prompts: int, races: int
) -> None:
    assert raced(share, prompts, RaceBudget()) == races


def test_a_time_without_races_saves_up_only_a_few() -> None:
    budget = RaceBudget()
    for _ in range(1000):
        budget.count(replace(plan(candidate("a"), policy=replace(POLICY, race_share=0.1)), race=None))
    assert raced(0.001, 100, budget) == int(MOST_SAVED)


def test_a_budget_that_is_used_up_is_named() -> None:
    found = race(candidate("a"), candidate("b"), policy=replace(POLICY, race_share=0.25))
    assert found == Race(runs=False, why="0.25 of the prompts may be raced, and as many were of late")


def test_the_protocols_without_races_are_those_whose_answer_cannot_come_first() -> None:
    at_once = {name for name, protocol in PROTOCOLS.items() if protocol.is_at_once}
    assert set(UNRACED) == at_once | {Protocol.SIDECAR}
