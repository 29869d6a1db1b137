"""The arms: kvmesh with its priorities, without, and Envoy without kvmesh; which loads each of them gets."""

from dataclasses import dataclass

from bench.overload.plan import Plan, policy
from bench.routing.arms import ARMS as ROUTING_ARMS
from bench.routing.arms import Arm, picker_arm

KVMESH, OFF, LEAST_REQUEST, USUAL = (
    "kvmesh",
    "kvmesh:off",
    "least-request",
    "kvmesh:defaults",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OverloadArm:
    """An arm and its measured loads."""

    arm: Arm
    loads: tuple[float, ...]
    falls: bool = False  # whether it also gets the load that falls
    meets_bad_pod: bool = False  # whether it also is measured with a pod that turns bad


def arms(plan: Plan) -> dict[str, OverloadArm]:
    """All arms by name."""
    return {
        KVMESH: OverloadArm(
            arm=picker_arm(KVMESH, policy=policy(), says="priorities, targets scaled like the pods"),
            loads=plan.loads,
            falls=True,
            meets_bad_pod=True,
        ),
        OFF: OverloadArm(
            arm=picker_arm(OFF, policy=policy(enabled=False), says="everything is sent on at once"),
            loads=plan.few_loads,
        ),
        LEAST_REQUEST: OverloadArm(arm=ROUTING_ARMS[LEAST_REQUEST], loads=plan.few_loads, meets_bad_pod=True),
        USUAL: OverloadArm(
            arm=picker_arm(
                USUAL, policy={"priorities": {"trustObjective": True}}, says="priorities as they come, unscaled"
            ),
            loads=plan.loads,
        ),
    }


USUALLY = (KVMESH, OFF, LEAST_REQUEST)
