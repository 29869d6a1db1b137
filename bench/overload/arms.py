"""The arms: kvmesh with its priorities, without, and Envoy without kvmesh; which loads each of them gets."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.overload.plan import Plan, policy
from bench.routing.arms import ARMS as ROUTING_ARMS
from bench.routing.arms import Arm, picker_arm

KVMESH, OFF, FIRST_COME, LEAST_REQUEST, USUAL = (
    "kvmesh",
    "kvmesh:off",
    "kvmesh:first-come",
    "least-request",
    "kvmesh:defaults",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadArm:
    """An arm, and what is measured of it."""

    arm: Arm
    loads: tuple[float, ...]
    falls: bool = False  # whether it also gets the load that falls


def first_come() -> Mapping[str, Any]:
    """The policy of the benchmark with the queue in order of arrival."""
    document = policy()
    classes = [{"name": "critical"}, *document["priorities"]["classes"]]
    ordered = [{**each, "order": "first-come"} for each in classes]
    return {**document, "priorities": {**document["priorities"], "classes": ordered}}


def arms(plan: Plan) -> dict[str, OverloadArm]:
    """All arms by name."""
    return {
        KVMESH: OverloadArm(
            arm=picker_arm(KVMESH, policy=policy(), says="priorities, targets scaled like the pods"),
            loads=plan.loads,
            falls=True,
        ),
        FIRST_COME: OverloadArm(
            arm=picker_arm(FIRST_COME, policy=first_come(), says="the same, first come first served in the queue"),
            loads=(plan.order_load,),
        ),
        OFF: OverloadArm(
            arm=picker_arm(OFF, policy=policy(enabled=False), says="everything is sent on at once"),
            loads=plan.few_loads,
        ),
        LEAST_REQUEST: OverloadArm(arm=ROUTING_ARMS[LEAST_REQUEST], loads=plan.few_loads),
        USUAL: OverloadArm(
            arm=picker_arm(
                USUAL, policy={"priorities": {"trustObjective": True}}, says="priorities as they come, unscaled"
            ),
            loads=plan.loads,
        ),
    }


USUALLY = (KVMESH, FIRST_COME, OFF, LEAST_REQUEST)
