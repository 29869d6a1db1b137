"""What a policy in shadow would have done, in the pool's registry."""

from collections.abc import Sequence

from extproc.policy.shadow import ShadowAction, ShadowRule, Withheld
from extproc.telemetry import metrics
from kvmesh.metrics.registry import Registry


class ShadowTelemetry:
    """Counts decisions that were made and not carried out; nothing else counts them."""

    def __init__(self, registry: Registry) -> None:
        self._decisions = registry.values(metrics.SHADOW_DECISIONS)
        self._refused = registry.values(metrics.SHADOW_REFUSED)
        self._is_shadow = registry.values(metrics.SHADOW).of()

    def know(self, *, is_shadow: bool) -> None:
        """Show whether the policy is in shadow."""
        self._is_shadow.value = float(is_shadow)

    def withheld(self, class_name: str, decisions: Sequence[Withheld]) -> None:
        """Count what would have been done to one request, and once that it would have been refused."""
        for each in decisions:
            self._decisions.of(class_name, each.rule.value, each.action.value, each.reason).value += 1
        refusal = next((each for each in decisions if each.action is ShadowAction.REFUSE), None)
        if refusal is not None:
            self._refused.of(class_name, refusal.reason).value += 1

    def left_to_wait(self, class_name: str, reason: str) -> None:
        """Count a request that was refused for want of a pod, and would have waited for the first one."""
        self._decisions.of(class_name, ShadowRule.AUTOSCALE.value, ShadowAction.WAIT.value, reason).value += 1
