"""The load: its classes and tenants have the shares of capacity that the plan gives them, at every load."""

from collections import Counter

import pytest

from bench.overload.measure import bad_pod_scenarios
from bench.overload.plan import CLASSES, CRITICAL, FLOOD, LOWEST_LOAD, SHEDDABLE, STEADY, Plan
from bench.overload.script import Request
from bench.overload.workloads import falling_load, steady_load
from bench.routing.script import POD_MISSING, TURN_SECONDS, Way

WORDS = ("one", "two", "three")
PLAN = Plan(seconds=60.0, long_seconds=60.0, fall_after_seconds=20.0, fall_seconds=40.0)


def load_of(requests: tuple[Request, ...], *, begins: float, ends: float) -> float:
    work = sum(request.work_tokens for request in requests if begins <= request.due < ends)
    return work / (ends - begins) / PLAN.capacity


def test_the_classes_together_are_the_lowest_load_and_all_that_comes_above() -> None:
    assert sum(each.steady_load + each.flood_load for each in CLASSES) == pytest.approx(LOWEST_LOAD)
    assert sum(each.flood_share for each in CLASSES) == pytest.approx(1.0)


@pytest.mark.parametrize("load", [0.25, 0.5, 1.0, 3.0])
def test_a_load_is_its_share_of_the_capacity(load: float) -> None:
    requests = steady_load(PLAN, load, words=WORDS)

    assert load_of(requests, begins=0, ends=60) == pytest.approx(load, rel=0.1)


def test_the_steady_tenant_and_the_critical_class_do_not_grow_with_the_load() -> None:
    def unchanged(load: float) -> list[tuple[str, str, float, str]]:
        return [
            (each.tenant, each.class_name, each.due, each.prompt)
            for each in steady_load(PLAN, load, words=WORDS)
            if each.tenant == STEADY or each.class_name == CRITICAL
        ]

    assert unchanged(0.5) == unchanged(3.0)


def test_the_load_falls() -> None:
    requests = falling_load(PLAN, words=WORDS)

    assert load_of(requests, begins=0, ends=20) == pytest.approx(PLAN.fall_high, rel=0.15)
    assert load_of(requests, begins=20, ends=40) == pytest.approx(PLAN.fall_low, rel=0.25)


def test_a_pod_turns_bad_under_the_very_load_that_the_other_pods_get_alone() -> None:
    plan = Plan(bad_pod_seconds=60.0)
    alone, *beside = bad_pod_scenarios(plan, words=WORDS)

    assert [alone.name, *(each.name for each in beside)] == [POD_MISSING, *Way]
    assert all(each.requests == alone.requests for each in beside)
    assert (alone.missing_pods, alone.bad_pod) == (1, None)
    assert [(each.missing_pods, each.bad_pod and each.bad_pod.way) for each in beside] == [(0, way) for way in Way]
    others = (plan.pods.pods - 1) / plan.pods.pods
    assert load_of(alone.requests, begins=0, ends=60) == pytest.approx(0.8 * others, rel=0.1)
    assert {each.measured_from for each in (alone, *beside)} == {plan.bad_pod_at_seconds + TURN_SECONDS}


def test_requests_are_in_order_and_their_prompts_have_the_work_that_they_tell() -> None:
    requests = steady_load(Plan(seconds=5.0), 2.0, words=WORDS)
    shared = {each.name: each.shared_tokens for each in CLASSES}

    assert [request.number for request in requests] == list(range(len(requests)))
    assert [request.due for request in requests] == sorted(request.due for request in requests)
    assert all(len(request.prompt.split()) == shared[request.class_name] + request.work_tokens for request in requests)


def test_some_clients_of_the_sheddable_class_do_not_come_back_and_all_others_do() -> None:
    counts = Counter((each.class_name == SHEDDABLE, each.obeys) for each in steady_load(PLAN, 2.0, words=WORDS))

    assert counts[False, False] == 0
    assert counts[True, True] / (counts[True, True] + counts[True, False]) == pytest.approx(
        PLAN.obeying_share, abs=0.05
    )


def test_the_flooding_tenant_makes_what_is_above_the_lowest_load() -> None:
    work = Counter[str]()
    for request in steady_load(PLAN, 3.0, words=WORDS):
        work[request.tenant] += request.work_tokens

    assert work[FLOOD] / work[STEADY] == pytest.approx((3.0 - 0.25) / 0.25, rel=0.15)
