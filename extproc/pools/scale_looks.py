"""Observes a pool for `scaling`: its pods, waiting and refused requests, and its classes' targets.

Every two seconds, and only if the policy configures autoscaling.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from msgspec import structs

from extproc.pods.endpoint import Reachability, Role
from extproc.pods.pod_ranks import pod_of
from extproc.policy.priority import PriorityClass
from extproc.policy.scale_variants import OTHERS, variant_of
from extproc.policy.values import PickPolicy, PoolConfig
from extproc.scaling.demand import believed
from extproc.scaling.plan import Plan, plan_of
from extproc.scaling.pool_scaling import PoolScaling
from extproc.scaling.seen import PodSeen, PoolSeen, Signal
from kvmesh.pods.pod_report import sum_loads

if TYPE_CHECKING:
    from extproc.pools.pool import Pool

IN_USE_SECONDS = 600.0  # how long after its last request a class's targets count
SERVING = frozenset({Reachability.READY, Reachability.UNKNOWN})


class ScaleLooks:
    """The scaling observations of one pool."""

    def __init__(
        self,
        policy: PickPolicy,
        *,
        see: Callable[[], "Pool"],
        pickers: Callable[[], int],
        clock: Callable[[], float],
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`pickers` returns the number of replicas, including this one.

        `changed` is called when the desired pods change between two looks.
        """
        self._scaling = PoolScaling(policy.autoscale)
        self.reconfigure(policy)
        self._see, self._pickers, self._clock, self._changed = see, pickers, clock, changed
        self._admitted: dict[str, tuple[float, float]] = {}  # class -> request count and time of its last increase

    @property
    def signals(self) -> Mapping[str, Signal]:
        """The scaling signals by role as of the last look, for the roles in the policy."""
        return self._scaling.signals

    def plan(self, *, seconds: float) -> Plan:
        """Return the desired pods now, or as expected `seconds` from now."""
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

    def reconfigure(self, policy: PickPolicy) -> None:
        """Use another policy from the next look on."""
        price = policy.observability.pod_hour_price or None
        self._scaling.reconfigure(policy.autoscale, shadow=policy.shadow, pod_hour_price=price)

    @property
    def starts(self) -> PoolScaling:
        """The statistics of pod start times."""
        return self._scaling

    def ask_for_one(self) -> None:
        """Request a pod immediately: requests are waiting for the first one."""
        if not self.signals:
            self.look()
        if self._scaling.ask_for_one():
            self._changed()

    def end(self) -> None:
        """Drop the signals: the pool is gone. If it returns, learned values apply again."""
        self._scaling.signals = {}

    def look(self) -> None:
        """Observe the pool once, and update the signals."""
        if not self._scaling.is_used:
            return
        now, pool = self._clock(), self._see()
        foreseen = [ticket.answer_tokens for ticket in pool.order if ticket.answer_tokens]
        used = self._classes_in_use(pool, now=now)
        self._scaling.look(
            PoolSeen(
                pods=_pods(pool, now=now),
                pickers=self._pickers(),
                queued_requests=len(pool.order),
                queued_tokens=float(sum(ticket.uncached_tokens for ticket in pool.order)),
                foreseen_requests=len(foreseen),
                answer_tokens=sum(foreseen),
                refused_requests=pool.overload.refused_requests,
                refused_tokens=pool.overload.refused_tokens,
                ttft_seconds=min((each.targets.ttft_seconds for each in used), default=None),
                inter_token_seconds=min((each.targets.inter_token_seconds for each in used), default=None),
            ),
            now=now,
        )

    def _classes_in_use(self, pool: "Pool", *, now: float) -> Sequence[PriorityClass]:
        for name, count in pool.overload.admitted_by_class.items():
            before, _ = self._admitted.get(name, (0.0, 0.0))
            if count > before:
                self._admitted[name] = count, now
        classes = pool.config.policy.priorities.classes
        return [
            classes[name] for name, (_, at) in self._admitted.items() if name in classes and now - at <= IN_USE_SECONDS
        ]


def _pods(pool: "Pool", *, now: float) -> Sequence[PodSeen]:
    policy, estimates = pool.config.policy, pool.books.estimates
    variants = _variants(pool.config)
    views = pool.books.own_bookings(), pool.runtime.others() or {}
    pods, booked = [], Counter[str]()
    for status in pool.endpoints.known(now=now):
        if status.reachability is Reachability.TERMINATING:
            continue
        pace = estimates.pace(status.address)
        booked[pod_of(status.address)] += sum(view[status.address].requests for view in views if status.address in view)
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
    return believed([_whole(list(ranks)) for _, ranks in groupby(pods, key=lambda pod: pod_of(pod.address))], booked)


def _whole(ranks: Sequence[PodSeen]) -> PodSeen:
    """Return a pod as the sum of its ranks."""
    first, loads = ranks[0], [rank.load for rank in ranks if rank.load is not None]
    if len(ranks) == 1:
        return first
    limits = [rank.running_limit for rank in ranks if rank.running_limit is not None]
    return structs.replace(
        first,
        address=pod_of(first.address),
        serves=any(rank.serves for rank in ranks),
        load=sum_loads(loads) if loads else None,
        tokens_per_second=sum(rank.tokens_per_second for rank in ranks),
        running_limit=sum(limits) if len(limits) == len(ranks) else None,
    )


def _variants(config: PoolConfig) -> Mapping[str, str]:
    """Return endpoint -> the variant by its labels, for endpoints whose role has variants."""
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
