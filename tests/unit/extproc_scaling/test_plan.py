"""Plans: for now as the signal has it, for a while ahead, for a trace; and what is not known is said."""

import msgspec
import pytest

from extproc.policy.autoscale import ScalePolicy
from extproc.scaling.plan import Demand, Plan, PlannedRole, plan_of, ratio_words
from extproc.scaling.seen import State
from extproc.scaling.trace import Slot, Trace
from extproc.scaling.trace_plan import Promises, TracePlan, declared_role, plan_trace
from tests.unit.extproc_scaling.scaled_pool import TOKENS_PER_SECOND, FluidPool
from tests.unit.extproc_scaling.test_variant_scaling import DECLARED, SMALL, SPEEDS

DAY = 86_400.0


def plan_for(*roles: PlannedRole, slots: tuple[float, ...] = (8000.0,), output: float = 0.0) -> TracePlan:
    demands = [Demand(input=tokens, output=output) for tokens in slots]
    trace = Trace(
        requests=100,
        seconds=300.0 * len(slots),
        slots=[Slot(at=300.0 * i, demand=each) for i, each in enumerate(demands)],
        average=Demand(input=sum(slots) / len(slots), output=output),
        prompt_tokens=800.0,
    )
    return plan_trace(trace, roles, promises=Promises(ttft_seconds=2.0), pool="p", currency="EUR", slot_seconds=300.0)


def test_now_is_what_the_signal_wants_with_its_costs() -> None:
    pool = FluidPool(policy=ScalePolicy(pod_hour_price=2.0), rate=lambda _: 4 * TOKENS_PER_SECOND).add(5)
    signal = pool.run(600)
    role = pool.scaling.planned(0.0)["both"]
    assert (role.wanted, role.reason, role.state) == (signal.wanted, signal.reason, State.OK)
    assert role.cost_per_hour == 2.0 * signal.wanted
    assert role.cost_per_million_tokens == pytest.approx(10.0 / 3600 / (4 * TOKENS_PER_SECOND) * 1e6, rel=0.01)
    assert role.variants[0].reason == "as its pods have shown"


def test_before_anything_is_known_the_plan_says_so() -> None:
    pool = FluidPool(rate=lambda _: TOKENS_PER_SECOND).add(3)
    pool.run(4)
    role = pool.scaling.planned(3600.0)["both"]
    assert (role.wanted, role.state) == (3, State.TOO_FEW_SAMPLES)
    assert FluidPool().scaling.planned(0.0) == {}


def test_a_forecast_without_history_goes_by_the_trend_and_says_so() -> None:
    pool = FluidPool(rate=lambda at: (2.0 + 0.005 * (at - 1000.0)) * TOKENS_PER_SECOND).add(6)
    pool.run(400)
    role = pool.scaling.planned(3600.0)["both"]
    assert role.reason.startswith("by the trend alone: fewer than two days were seen at that time of day; prompts keep")
    assert role.prefill_busy == pytest.approx(2.0 + 0.005 * (400 + 300), rel=0.1)  # no farther than it was looked at


def test_a_forecast_with_history_goes_by_the_time_of_day_also_down() -> None:
    def level(at: float) -> float:
        return 6.0 if 0.25 <= at % DAY / DAY < 0.75 else 2.0

    pool = FluidPool(rate=lambda at: level(at) * TOKENS_PER_SECOND, now=0.0).add(8)
    pool.by_the_clock = True
    while pool.now < 2.2 * DAY:
        pool.look_seconds = 30.0
        pool.run(3600.0)
    role = pool.scaling.planned(0.2 * DAY)["both"]
    assert "by the time of day; prompts keep 2 pods busy, 6 by forecast" in role.reason
    assert role.wanted == 7
    while pool.now < 2.7 * DAY:
        pool.run(3600.0)
    assert pool.scaling.planned(0.2 * DAY)["both"].wanted < pool.signal.wanted


def test_a_forecast_chooses_among_variants_as_if_nothing_were_there() -> None:
    pool = FluidPool(
        policy=ScalePolicy(variants=(SMALL, DECLARED), max_replicas=20),
        rate=lambda _: 5.0 * TOKENS_PER_SECOND,
        speeds=SPEEDS,
    ).add(6, "small")
    pool.run(300)
    role = pool.scaling.planned(600.0)["both"]
    assert {each.name: each.wanted for each in role.variants} == {"small": 0, "large": 2}
    assert role.variants[1].reason == "as declared: none of its pods has shown it yet"
    assert role.cost_per_hour == 4.0


def test_a_trace_is_planned_on_average_in_its_busiest_slot_and_slot_by_slot() -> None:
    role = declared_role("both", [{"name": "", "prefill": 8000.0, "price": 3.0}])
    found = plan_for(role, slots=(16_000.0, 48_000.0))
    assert (found.average.roles[0].wanted, found.busiest.roles[0].wanted) == (5, 7)
    assert found.busiest.of == "the trace's busiest 300 s, from 300 s on"
    assert found.pod_hours == pytest.approx((3 + 7) * 300 / 3600)
    assert found.cost == pytest.approx(3.0 * found.pod_hours)
    assert found.cost is not None
    assert found.cost_per_million_tokens == pytest.approx(found.cost / (64_000 * 300) * 1e6)


def test_prefill_and_decode_pods_have_their_own_work_and_a_ratio() -> None:
    prefill = declared_role("prefill", [{"name": "", "prefill": 8000.0, "price": 3.0}])
    decode = declared_role("decode", [{"name": "", "prefill": 8000.0, "decode": 1000.0, "price": 3.0}])
    plan = plan_for(prefill, decode, slots=(32_000.0,), output=1900.0).average
    by_role = {each.role: each for each in plan.roles}
    assert (by_role["prefill"].decode_busy, by_role["decode"].prefill_busy) == (None, None)
    assert (by_role["prefill"].demand.output, by_role["decode"].demand.input) == (0.0, 0.0)
    assert plan.ratio == f"{by_role['prefill'].wanted} prefill : {by_role['decode'].wanted} decode pods"
    assert by_role["prefill"].wanted > by_role["decode"].wanted


def test_what_is_not_known_of_a_pod_is_said_and_has_no_cost() -> None:
    role = declared_role("both", [{"name": "", "prefill": 8000.0, "price": 3.0}])
    plan = plan_for(role, output=500.0).average.roles[0]
    assert plan.reason.startswith("without decoding: it is not known what a pod generates")
    assert (plan.state, plan.cost_per_hour) == (State.TOO_FEW_SAMPLES, None)
    unknown = msgspec.structs.replace(
        role, variants=(msgspec.structs.replace(role.variants[0], prefill_tokens_per_second=None),)
    )
    assert "give --pod" in plan_for(unknown).average.roles[0].reason


def test_bounds_of_a_trace_are_named() -> None:
    role = declared_role("both", [{"name": "", "prefill": 8000.0, "price": 3.0, "max": 2.0}])
    plan = plan_for(role, slots=(64_000.0,)).average.roles[0]
    assert plan.wanted == 2
    assert plan.reason.endswith("limited: the bounds leave no set of pods that suffices")


def test_pods_that_do_both_lean_to_what_is_more() -> None:
    role = declared_role("both", [{"name": "", "prefill": 8000.0, "decode": 1000.0}])
    busy = msgspec.structs.replace(role, prefill_busy=3.0, decode_busy=1.0)
    assert ratio_words([busy]) == "pods of the role both lean to prefill: 75% of their work is prompts"
    assert ratio_words([msgspec.structs.replace(busy, prefill_busy=0.5)]).startswith(
        "pods of the role both lean to dec"
    )
    assert ratio_words([role]) == ""
    plan = plan_of([busy], of="now")
    assert (plan.prefill_pods, plan.decode_pods) == (3.0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
