"""What a policy says of replicas: bounds, thresholds and times of one role. `scaling` says how many are wanted."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from extproc.policy.scale_variants import DeploymentName, PodPrice, ScaleVariant
from extproc.policy.schema import Million, RealShare, Rule, Seconds, SecondsOrZero, Section, Share, about, at_most

ROLES = ("both", "prefill", "decode")  # as `pods.endpoint.Role` has them
SERVING_ROLES = ("both", "decode")  # whose pods answer clients
STARTS_WAITED = 2.0  # for a pool's first pod, where the policy does not say how long
# unless the policy says more: what `kvmesh install` sets in Envoy ends a longer wait (--longest-queue-seconds)
MOST_WAITED_SECONDS = 300.0


class ScaleSignals(Section, frozen=True, kw_only=True):
    """Thresholds of one direction; None: this signal says nothing. Means over the ready pods of a role."""

    queue_requests: Annotated[
        Million | None, about("requests that wait at pods, and for them in the pickers, for each ready pod")
    ] = None
    kv_usage: Annotated[RealShare | None, about("share of cache blocks in use, mean over the ready pods")] = None
    gpu_utilization: Annotated[
        Share | None, about("0..1; says nothing as long as pods do not report it, and vLLM does not")
    ] = None


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


def _variants_name_theirs(field: str) -> Rule:
    return Rule(
        cel=f"!has(self.variants) || size(self.variants) == 0 || !has(self.{field})",
        message=f"with variants, {field} stands in each of them",
        holds=lambda given: not given.get("variants") or given.get(field) is None,
        at=field,
    )


class ScalePolicy(Section, frozen=True, kw_only=True):
    """How many pods of one role there shall be.

    As many as the forecast load takes within the classes' promises. At least one more when any signal is at its
    `scale_up`; fewer only when all given are at their `scale_down`, too.
    """

    conditions = (
        at_most("minReplicas", "maxReplicas"),
        *(_up_above_down(signal) for signal in ("queueRequests", "kvUsage", "gpuUtilization")),
        _variants_name_theirs("deployment"),
        _variants_name_theirs("podHourPrice"),
    )

    min_replicas: Annotated[int, Meta(ge=0, le=10_000), about("never fewer pods")] = 1
    max_replicas: Annotated[Annotated[int, Meta(ge=1, le=10_000)] | None, about("never more")] = None
    scale_up: Annotated[ScaleSignals, about("more pods when any of these is reached")] = ScaleSignals()
    scale_down: Annotated[ScaleSignals, about("fewer only when all given are at or below")] = ScaleSignals()
    start_seconds: Annotated[
        Seconds, about("what a new pod takes until it serves: so far ahead the load is forecast; longer where seen")
    ] = 90.0
    stabilization_seconds: Annotated[
        SecondsOrZero, about("fewer pods only once so many were not wanted for this long")
    ] = 300.0
    wait_from_zero_seconds: Annotated[
        SecondsOrZero | None,
        about(
            "with minReplicas 0: how long requests wait for the first pod when none is ready; 0: refused at once",
            default="twice startSeconds, at most 300",
        ),
    ] = None
    pod_hour_price: Annotated[PodPrice | None, about("what a pod costs an hour; the currency of `observability`")] = (
        None
    )
    deployment: Annotated[
        DeploymentName | None, about("of the pool's namespace; with `act`, the number is written into its scale")
    ] = None
    variants: Annotated[
        tuple[ScaleVariant, ...],
        Meta(max_length=8),
        about("kinds of pods of this role, of which the cheapest set is wanted that suffices", keys=("name",)),
    ] = ()

    @property
    def first_pod_seconds(self) -> float:
        """How long requests wait for the first pod; 0: not at all."""
        if self.min_replicas:
            return 0.0
        if self.wait_from_zero_seconds is not None:
            return self.wait_from_zero_seconds
        return min(STARTS_WAITED * self.start_seconds, MOST_WAITED_SECONDS)


class Autoscale(Section, frozen=True, kw_only=True):
    """Replicas by role; a role that is not given gets no signal."""

    both: Annotated[ScalePolicy | None, about("pods that prefill and decode")] = None
    prefill: Annotated[ScalePolicy | None, about("pods that only prefill")] = None
    decode: Annotated[ScalePolicy | None, about("pods that only decode")] = None
    shadow: Annotated[bool, about("true: what is wanted is only shown, and scalers are told the present number")] = (
        False
    )
    act: Annotated[
        bool, about("true: one picker writes what is wanted into the scale of the Deployments that are named")
    ] = False

    @property
    def by_role(self) -> Mapping[str, ScalePolicy]:
        """Return what is given, by role."""
        given = {"both": self.both, "prefill": self.prefill, "decode": self.decode}
        return {role: scaled for role, scaled in given.items() if scaled is not None}

    @property
    def from_zero(self) -> Mapping[str, ScalePolicy]:
        """Return the roles that answer clients and may have no pod at all, so that requests wait for the first one.

        None in shadow: scalers are told of no pod, and waiting would be in vain.
        """
        return {} if self.shadow else self._from_zero

    @property
    def from_zero_in_shadow(self) -> Mapping[str, ScalePolicy]:
        """Return the roles for whose first pod requests would wait, were this not in shadow."""
        return self._from_zero if self.shadow else {}

    @property
    def _from_zero(self) -> Mapping[str, ScalePolicy]:
        return {
            role: scaled
            for role, scaled in self.by_role.items()
            if role in SERVING_ROLES and scaled.first_pod_seconds > 0.0
        }
