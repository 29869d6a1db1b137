"""One run in virtual time: a load, a fleet, an arm. What it comes to is in `summary`."""

from dataclasses import replace

from bench.disaggregation.loads import Load
from bench.disaggregation.picker import Picker, roles_of
from bench.disaggregation.plan import Plan
from bench.disaggregation.pods import Pod
from bench.disaggregation.world import Clock, World
from extproc.policy.disaggregation import Disaggregation
from extproc.policy.priority import PriorityClass
from extproc.policy.values import PickPolicy


def play(load: Load, rule: Disaggregation, *, plan: Plan, prefill_pods: int, seed: int) -> World:
    """Return the world after the run; without prefill pods each pod does both."""
    clock = Clock()
    pods = {
        address: Pod(address, engine=plan.engine, link=plan.link)
        for address in (f"10.0.0.{number + 1}:8000" for number in range(plan.pods))
    }
    policy = replace(
        PickPolicy(),
        disaggregation=rule,
        roles=roles_of(list(pods), prefill=prefill_pods) if prefill_pods else {},
    )
    picker = Picker(
        pods,
        policy,
        priority_class=PriorityClass(ttft_seconds=plan.ttft_limit_seconds),
        seed=seed,
        clock=clock,
    )
    world = World(load=load, plan=plan, pods=pods, picker=picker, clock=clock)
    world.run()
    return world
