"""Looks at a pool for `scaling`: the pods as they are known, what waits and was refused, what its classes are promised.

Every two seconds, and only where the policy asks for a signal.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from extproc.admission.flow_queue import FlowQueue
from extproc.pods.endpoint import EndpointStatus, Reachability, Role
from extproc.pods.latency_estimate import LatencyEstimates
from extproc.policy.autoscale import Autoscale
from extproc.policy.pool_config import PoolConfig
from extproc.policy.priority import PriorityClass
from extproc.policy.scale_variants import OTHERS, variant_of
from extproc.scaling.acting import SURE, ActOutcome, ScaleWish
from extproc.scaling.plan import Plan, plan_of
from extproc.scaling.pool_scaling import PoolScaling
from extproc.scaling.seen import PodSeen, PoolSeen, Signal
from extproc.telemetry.overload_telemetry import OverloadTelemetry

IN_USE_SECONDS = 600.0  # after its last request a class's promise counts so long
SERVING = frozenset({Reachability.READY, Reachability.UNKNOWN})


class Endpoints(Protocol):
    """See `pods.metrics_scraper`."""

    def known(self, *, now: float) -> Sequence[EndpointStatus]:
        """Return every endpoint as it is known."""


class Books(Protocol):
    """See `picker_books`."""

    estimates: LatencyEstimates


class SeenPool(Protocol):
    """See `pool.Pool`."""

    config: PoolConfig
    order: FlowQueue
    overload: OverloadTelemetry

    @property
    def endpoints(self) -> Endpoints: ...  # noqa: D102

    @property
    def books(self) -> Books: ...  # noqa: D102


class ScaleLooks:
    """Of one pool."""

    def __init__(
        self,
        autoscale: Autoscale,
        *,
        see: Callable[[], SeenPool],
        pickers: Callable[[], int],
        clock: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`pickers`: how many there are, with this one. `changed`: told what is wanted between two looks.

        `wall`: the time of day, in seconds since the epoch.
        """
        self._scaling = PoolScaling(autoscale)
        self._see, self._pickers, self._clock, self._changed, self._wall = see, pickers, clock, changed, wall
        self.acts: tuple[ActOutcome, ...] = ()  # what has come of the wishes
        self._admitted: dict[str, tuple[float, float]] = {}  # class -> its requests, and when there were more last

    @property
    def signals(self) -> Mapping[str, Signal]:
        """How many pods each role wants, as of the last look; of roles that the policy names."""
        return self._scaling.signals

    def wishes(self) -> list[ScaleWish]:
        """Return what the policy wants written into the scale of Deployments: nothing without `act`, or in shadow."""
        pool, autoscale = self._see(), self._see().config.policy.autoscale
        namespace, slash, _ = pool.config.name.partition("/")
        if not autoscale.act or autoscale.shadow or not slash:
            return []
        found = []
        for role, policy in autoscale.by_role.items():
            signal = self.signals.get(role)
            named = {each.name: each.deployment for each in policy.variants} or {OTHERS: policy.deployment}
            for variant in () if signal is None else signal.variants:
                if signal is not None and (deployment := named.get(variant.name)) is not None:
                    found.append(
                        ScaleWish(
                            pool=pool.config.name,
                            role=role,
                            variant=variant.name,
                            namespace=namespace,
                            deployment=deployment,
                            replicas=variant.told,
                            may_lower=signal.state in SURE,
                            window_seconds=policy.stabilization_seconds,
                        )
                    )
        return found

    def plan(self, *, seconds: float) -> Plan:
        """Return what is wanted now, or would be in so many seconds."""
        pool = self._see()
        promises = self._scaling.promises
        return plan_of(
            list(self._scaling.planned(seconds).values()),
            of=f"in {seconds:g} s" if seconds else "now",
            pool=pool.config.name,
            currency=pool.config.policy.observability.currency,
            ttft_seconds=promises[0],
            inter_token_seconds=promises[1],
        )

    def reconfigure(self, autoscale: Autoscale) -> None:
        """Go by another policy from the next look on."""
        self._scaling.reconfigure(autoscale)

    @property
    def starts(self) -> PoolScaling:
        """What is known of how long pods take to start."""
        return self._scaling

    def ask_for_one(self) -> None:
        """Have a pod wanted at once: requests wait for the first one."""
        if not self.signals:
            self.look()
        if self._scaling.ask_for_one():
            self._changed()

    def end(self) -> None:
        """Want nothing any more: the pool is gone. If it comes back, what was learned counts again."""
        self._scaling.signals = {}
        self.acts = ()

    def look(self) -> None:
        """Look once."""
        if not self._scaling.is_used:
            return
        now, pool = self._clock(), self._see()
        used = self._classes_in_use(pool, now=now)
        self._scaling.look(
            PoolSeen(
                pods=_pods(pool, now=now),
                pickers=self._pickers(),
                queued_requests=len(pool.order),
                queued_tokens=float(sum(ticket.uncached_tokens for ticket in pool.order)),
                refused_requests=pool.overload.refused_requests,
                refused_tokens=pool.overload.refused_tokens,
                ttft_seconds=min((each.targets.ttft_seconds for each in used), default=None),
                inter_token_seconds=min((each.targets.inter_token_seconds for each in used), default=None),
                wall=self._wall(),
            ),
            now=now,
        )

    def _classes_in_use(self, pool: SeenPool, *, now: float) -> Sequence[PriorityClass]:
        """Return the classes that have had requests lately, as far as the policy still has them."""
        for name, count in pool.overload.admitted_by_class.items():
            before, _ = self._admitted.get(name, (0.0, 0.0))
            if count > before:
                self._admitted[name] = count, now
        classes = pool.config.policy.priorities.classes
        return [
            classes[name] for name, (_, at) in self._admitted.items() if name in classes and now - at <= IN_USE_SECONDS
        ]


def _pods(pool: SeenPool, *, now: float) -> Sequence[PodSeen]:
    policy, estimates = pool.config.policy, pool.books.estimates
    variants = _variants(pool.config)
    pods = []
    for status in pool.endpoints.known(now=now):
        if status.reachability is Reachability.TERMINATING:
            continue
        pace = estimates.pace(status.address)
        learned = estimates.tokens_per_second(status.address)
        pods.append(
            PodSeen(
                address=status.address,
                role=policy.roles.get(status.address, Role.BOTH).value,
                serves=status.reachability in SERVING and status.address not in policy.cordoned,
                load=status.load,
                tokens_per_second=learned or 1.0 / pace.backlog_seconds_a_token,
                is_learned=learned is not None,
                variant=variants.get(status.address, OTHERS),
                request_seconds=pace.request_seconds,
                running_limit=pace.running_limit,
            )
        )
    return pods


def _variants(config: PoolConfig) -> Mapping[str, str]:
    """Return endpoint -> the variant of its role that its labels say; without those of none."""
    policy = config.policy
    by_role = policy.autoscale.by_role
    if not any(scaled.variants for scaled in by_role.values()):
        return {}
    found = {}
    for endpoint in config.endpoints:
        scaled = by_role.get(policy.roles.get(endpoint.address, Role.BOTH).value)
        if scaled is not None and scaled.variants:
            found[endpoint.address] = variant_of(endpoint.labels, scaled.variants)
    return found
