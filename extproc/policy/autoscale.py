"""The `autoscale` section of a policy: bounds, thresholds and times by role. `scaling` computes desired replicas."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from extproc.policy.scale_variants import ScaleVariant
from extproc.policy.schema import Million, RealShare, Rule, Seconds, SecondsOrZero, Section, about, at_most

ROLES = ("both", "prefill", "decode")  # as `pods.endpoint.Role` has them
SERVING_ROLES = ("both", "decode")  # their pods answer clients
STARTS_WAITED = 2.0  # default wait for a pool's first pod, in start times
# limit of the default: Envoy as set up by `kvmesh install` ends longer waits (--longest-queue-seconds)
MOST_WAITED_SECONDS = 300.0


class ScaleSignals(Section, frozen=True, kw_only=True):
    """Thresholds of one direction, for means over the ready pods of a role; a signal with None is not used."""

    queue_requests: Annotated[Million | None, about("waiting requests (pods and pickers) for each ready pod")] = None
    kv_usage: Annotated[RealShare | None, about("mean share of cache blocks in use")] = None


def _up_above_down(signal: str) -> Rule:
    def holds(given: Mapping[str, Any]) -> bool:
        up, down = ((given.get(name) or {}).get(signal) for name in ("scaleUp", "scaleDown"))
        return up is None or down is None or bool(up > down)

    both = f"!has(self.scaleUp) || !has(self.scaleDown) || !has(self.scaleUp.{signal}) || !has(self.scaleDown.{signal})"
    return Rule(
        cel=f"{both} || self.scaleUp.{signal} > self.scaleDown.{signal}",
        message=f"scaleUp.{signal} must be above scaleDown.{signal}, or pods would come and go for ever",
        holds=holds,
        at="scaleUp",
    )


class ScalePolicy(Section, frozen=True, kw_only=True):
    """The scaling of one role.

    Desired are the pods that keep the forecast load within the classes' targets: at least one more if any signal
    reaches its `scale_up` threshold, and fewer only if all given signals are at or below `scale_down`, too.
    """

    conditions = (
        at_most("minReplicas", "maxReplicas"),
        *(_up_above_down(signal) for signal in ("queueRequests", "kvUsage")),
    )

    min_replicas: Annotated[int, Meta(ge=0, le=10_000), about("minimum of pods")] = 1
    max_replicas: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, about("maximum of pods")] = None
    scale_up: Annotated[ScaleSignals, about("more pods if any is reached")] = ScaleSignals()
    scale_down: Annotated[ScaleSignals, about("fewer pods only if all are at or below")] = ScaleSignals()
    start_seconds: Annotated[
        Seconds, about("start time of a new pod, the horizon of the forecast; longer if observed")
    ] = 90.0
    stabilization_seconds: Annotated[SecondsOrZero, about("wait before scaling down")] = 300.0
    wait_from_zero_seconds: Annotated[
        SecondsOrZero | None,
        about(
            "with minReplicas 0: longest wait for the first pod; 0: refuse at once",
            default="twice startSeconds, at most 300",
        ),
    ] = None
    variants: Annotated[
        tuple[ScaleVariant, ...],
        Meta(max_length=8),
        about("kinds of pods of this role; the cheapest sufficient set is desired", keys=("name",)),
    ] = ()

    @property
    def first_pod_seconds(self) -> float:
        """Seconds that requests wait for the first pod; 0: they are refused at once."""
        if self.min_replicas:
            return 0.0
        if self.wait_from_zero_seconds is not None:
            return self.wait_from_zero_seconds
        return min(STARTS_WAITED * self.start_seconds, MOST_WAITED_SECONDS)


class Autoscale(Section, frozen=True, kw_only=True):
    """Scaling by role; a role that is not given gets no signal."""

    both: Annotated[ScalePolicy | None, about("pods that prefill and decode")] = None
    prefill: Annotated[ScalePolicy | None, about("prefill-only pods")] = None
    decode: Annotated[ScalePolicy | None, about("decode-only pods")] = None

    @property
    def by_role(self) -> Mapping[str, ScalePolicy]:
        """The given policies by role."""
        given = {"both": self.both, "prefill": self.prefill, "decode": self.decode}
        return {role: scaled for role, scaled in given.items() if scaled is not None}

    @property
    def from_zero(self) -> Mapping[str, ScalePolicy]:
        """The serving roles that may scale to zero, so that requests wait for the first pod."""
        return {
            role: scaled
            for role, scaled in self.by_role.items()
            if role in SERVING_ROLES and scaled.first_pod_seconds > 0.0
        }
