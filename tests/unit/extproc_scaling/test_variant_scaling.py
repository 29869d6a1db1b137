"""Pods of several variants: the cheapest set that suffices, learned or declared, switched without a gap or a swing."""

import math
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from extproc.policy.autoscale import ScalePolicy
from extproc.policy.scale_variants import ScaleVariant
from extproc.scaling.seen import Signal, Source, State
from tests.unit.extproc_scaling.scaled_pool import TOKENS_PER_SECOND, FluidPool

# three times as quick for twice the price
SMALL = ScaleVariant(name="small", selector={"gpu": "l4"}, pod_hour_price=1.0)
LARGE = ScaleVariant(name="large", selector={"gpu": "h100"}, pod_hour_price=2.0)
DECLARED = msgspec.structs.replace(LARGE, prefill_tokens_per_second=3.0 * TOKENS_PER_SECOND)
SPEEDS = {"small": 1.0, "large": 3.0}


def pool_of(*variants: ScaleVariant, busy: float = 5.0, **policy: Any) -> FluidPool:
    return FluidPool(
        policy=ScalePolicy(variants=variants, **policy),
        rate=lambda _: busy * TOKENS_PER_SECOND,
        speeds=SPEEDS,
        start_seconds=90.0,
    )


def wanted(signal: Signal) -> dict[str, int]:
    return {each.name: each.wanted for each in signal.variants}


def test_the_cheapest_set_replaces_what_is_there_and_nothing_goes_before_it_serves() -> None:
    pool = pool_of(SMALL, DECLARED, min_replicas=1).add(6, "small")
    counts = []
    for _ in range(60):
        pool.run(30)
        serving = sum(pod.speed for pod in pool.pods if pod.serves)
        counts.append((pool.count("small"), pool.count("large")))
        assert serving >= 5.0, counts
    assert counts[-1] == (0, 2)  # 2 for 6 busy small ones at 4 an hour, not 6 at 6
    assert pool.signal.wanted == 2
    assert pool.signal.costs.per_hour == 4.0
    assert [pair[0] for pair in counts] == sorted((pair[0] for pair in counts), reverse=True)  # without coming back


def test_a_request_that_waits_has_a_pod_of_the_cheapest_variant_wanted_at_once() -> None:
    pool = pool_of(SMALL, DECLARED, min_replicas=0)
    pool.start_seconds = None
    pool.run(2)
    assert pool.scaling.ask_for_one()
    signal = pool.scaling.signals["both"]
    assert (signal.wanted, signal.told) == (1, 1)
    assert sum(wanted(signal).values()) == 1


def test_a_variant_that_nobody_has_seen_and_nobody_declares_is_not_asked_for() -> None:
    signal = pool_of(SMALL, LARGE).add(6, "small").run(900)
    assert wanted(signal) == {"small": 6, "large": 0}
    assert [each.source for each in signal.variants] == [Source.LEARNED, Source.UNKNOWN]


def test_work_is_counted_in_pods_that_are_there_once_some_are() -> None:
    pool = pool_of(SMALL, LARGE, busy=4.5, min_replicas=0)
    pool.start_seconds = None
    pool.run(60)  # without any pod, and nothing is declared
    signal = pool.add(2, "large").run(300)
    assert (signal.state, wanted(signal)) == (State.OK, {"small": 0, "large": 2})
    assert "in large pods: prompts keep 1.5 pods busy" in signal.reason


def test_one_pod_of_a_variant_is_enough_to_learn_what_it_does() -> None:
    pool = pool_of(SMALL, msgspec.structs.replace(LARGE, min_replicas=1)).add(6, "small")
    signal = pool.run(1800)
    assert wanted(signal) == {"small": 0, "large": 2}
    assert signal.variants[1].source is Source.LEARNED
    assert signal.variants[1].prefill_tokens_per_second == pytest.approx(3.0 * TOKENS_PER_SECOND)


def test_bounds_of_variants_and_of_the_role_hold_at_every_look() -> None:
    few = msgspec.structs.replace(DECLARED, max_replicas=1)
    pool = pool_of(SMALL, few, busy=9.0, min_replicas=1, max_replicas=5).add(2, "small")
    for _ in range(600):
        pool.run(2)
        assert pool.signal.wanted <= 5
        assert wanted(pool.signal)["large"] <= 1
    assert wanted(pool.signal) == {"small": 4, "large": 1}
    assert "limited: the bounds leave no set of pods that suffices" in pool.signal.reason


def test_a_bound_that_is_lowered_holds_at_once_and_the_dearest_go() -> None:
    pool = pool_of(SMALL, DECLARED, busy=9.0).add(4, "small").add(2, "large")
    pool.run(120)
    lower = ScalePolicy(variants=(SMALL, DECLARED), max_replicas=3)
    pool.scaling.reconfigure(msgspec.structs.replace(pool.scaling._autoscale, both=lower))
    assert pool.run(2).wanted == 3
    assert wanted(pool.signal)["large"] >= 2


def test_pods_of_no_variant_are_within_the_roles_bound_and_saturation_counts_what_pods_do() -> None:
    pool = pool_of(SMALL, DECLARED, busy=5.0, max_replicas=4).add(2, "").add(2, "small")
    pool.run(600)
    assert max(pool.wanted) <= 4
    full = pool_of(DECLARED, SMALL, busy=4.5).add(2, "large")
    full.start_seconds = None
    assert full.run(300).saturation == pytest.approx(0.75, rel=0.02)  # two large ones do what six small ones do


def test_a_slow_variant_that_cannot_keep_the_first_tokens_promise_is_not_chosen() -> None:
    # a prompt takes 0.1 s on a small one and a third of it on a large one
    pool = pool_of(SMALL, DECLARED, busy=1.0).add(2, "small")
    pool.ttft_seconds = 0.05
    signal = pool.run(1800)
    assert wanted(signal) == {"small": 0, "large": 1}
    assert signal.state is State.OK


def test_pods_that_are_of_no_variant_count_and_nobody_is_told_to_change_them() -> None:
    pool = pool_of(SMALL, busy=5.0).add(3, "").add(3, "small")
    signal = pool.run(900)
    assert wanted(signal) == {"small": 3, "": 3}
    pool = pool_of(SMALL, busy=2.0).add(3, "").add(3, "small")
    assert wanted(pool.run(1800)) == {"small": 0, "": 3}


@pytest.mark.parametrize("period", [60, 120, 240, 480])
def test_a_saw_tooth_does_not_make_the_set_swing(period: int) -> None:
    pool = pool_of(SMALL, DECLARED)
    pool.rate = lambda at: (1.0 + 8.0 * (at % period) / period) * TOKENS_PER_SECOND
    pool.add(6, "small")
    sets = []
    for _ in range(3600):
        pool.run(2)
        sets.append(tuple(wanted(pool.signal).values()))
    late = sets[len(sets) // 4 :]
    assert sum(before != after for before, after in pairwise(late)) <= 10, late


def test_prices_that_are_close_leave_what_is_there() -> None:
    near = msgspec.structs.replace(DECLARED, pod_hour_price=2.9)
    assert wanted(pool_of(SMALL, near, busy=5.5).add(6, "small").run(900)) == {"small": 6, "large": 0}


def test_without_pods_the_first_request_brings_one_of_what_does_most_for_its_price() -> None:
    pool = pool_of(SMALL, DECLARED, min_replicas=0)
    pool.start_seconds = None
    assert pool.run(2).wanted == 0
    pool.refused_requests = 1
    signal = pool.run(2)
    assert wanted(signal) == {"small": 0, "large": 1}
    assert signal.state is State.NO_READY_PODS


def test_shadow_tells_each_variants_present_number() -> None:
    pool = FluidPool(
        policy=ScalePolicy(variants=(SMALL, DECLARED)),
        rate=lambda _: 9.0 * TOKENS_PER_SECOND,
        speeds=SPEEDS,
        shadow=True,
    ).add(3, "small")
    signal = pool.run(120)
    assert (signal.told, [each.told for each in signal.variants]) == (3, [3, 0])
    assert signal.wanted > 3


def test_a_pod_that_reports_nonsense_does_not_change_the_set() -> None:
    pool = pool_of(SMALL, busy=4.0).add(5, "small")
    pool.run(120)
    pool.pods[0].changes = {"kv_usage": math.nan}
    signal = pool.run(300)
    assert (wanted(signal), signal.state) == ({"small": 5}, State.NONSENSE_REPORTS)


def test_tokens_cost_what_the_pods_cost_by_what_they_serve() -> None:
    pool = FluidPool(pod_hour_price=3.6, rate=lambda _: 8000.0, output_each=100.0).add(2)
    costs = pool.run(600).costs
    assert costs.per_hour == 7.2
    assert costs.per_million_tokens == pytest.approx(7.2 / 3600 / (8000 + 1000) * 1e6, rel=0.02)
    assert costs.per_million_output_tokens == pytest.approx(2.0, rel=0.02)
    assert FluidPool(rate=lambda _: 8000.0).add(2).run(60).costs.per_hour is None
