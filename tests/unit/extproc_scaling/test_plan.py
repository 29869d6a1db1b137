"""Plans: for now as the signal has it, and for a while ahead; and what is not known is said."""

import msgspec
import pytest

from extproc.policy.autoscale import ScalePolicy
from extproc.scaling.plan import Plan, plan_of, ratio_words
from extproc.scaling.seen import State
from tests.unit.extproc_scaling.scaled_pool import TOKENS_PER_SECOND, FluidPool, planned_role
from tests.unit.extproc_scaling.test_variant_scaling import DECLARED, SMALL, SPEEDS


def test_now_is_what_the_signal_wants_with_its_costs() -> None:
    pool = FluidPool(pod_hour_price=2.0, rate=lambda _: 4 * TOKENS_PER_SECOND).add(5)
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


def test_a_forecast_goes_by_the_trend_and_says_so() -> None:
    pool = FluidPool(rate=lambda at: (2.0 + 0.005 * (at - 1000.0)) * TOKENS_PER_SECOND).add(6)
    pool.run(400)
    role = pool.scaling.planned(3600.0)["both"]
    assert role.reason.startswith("by the trend of the last five minutes; prompts keep")
    assert role.prefill_busy == pytest.approx(2.0 + 0.005 * (400 + 300), rel=0.1)  # no farther than it was looked at


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


def test_prefill_and_decode_pods_have_a_ratio() -> None:
    prefill, decode = (planned_role(role=name, wanted=wanted) for name, wanted in (("prefill", 3), ("decode", 5)))
    assert plan_of([prefill, decode], of="now").ratio == "3 prefill : 5 decode pods"


def test_pods_that_do_both_lean_to_what_is_more() -> None:
    role = planned_role()
    busy = msgspec.structs.replace(role, prefill_busy=3.0, decode_busy=1.0)
    assert ratio_words([busy]) == "pods of the role both lean to prefill: 75% of their work is prompts"
    assert ratio_words([msgspec.structs.replace(busy, prefill_busy=0.5)]).startswith(
        "pods of the role both lean to dec"
    )
    assert ratio_words([role]) == ""
    plan = plan_of([busy], of="now")
    assert (plan.prefill_pods, plan.decode_pods) == (3.0, 1.0)
    assert msgspec.json.decode(msgspec.json.encode(plan), type=Plan) == plan
