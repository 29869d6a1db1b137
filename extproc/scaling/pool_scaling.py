"""Desired replicas of each role of one pool: looks at the pool in, signals out. Pure; time is an argument.

scaling = PoolScaling(policy.autoscale)
signals = scaling.look(seen, now=now)       # every few seconds; by role
"""

from collections.abc import Mapping, Sequence
from math import ceil
from statistics import median

import msgspec

from extproc.policy.autoscale import SERVING_ROLES, Autoscale, ScalePolicy
from extproc.policy.scale_variants import OTHERS
from extproc.scaling.demand import Waiting, Work
from extproc.scaling.need import Need, Outlooks, larger
from extproc.scaling.plan import PlannedRole, planned_roles
from extproc.scaling.role_memory import RoleMemory
from extproc.scaling.running_costs import costs_of
from extproc.scaling.seen import PodSeen, PoolSeen, Signal, State
from extproc.scaling.thresholds import SILENT, Verdict, Way, threshold_verdict, threshold_words
from extproc.scaling.variant_scaling import (
    DOWN_MARGIN,
    UP_MARGIN,
    RoleReady,
    VariantPods,
    declared_of,
    need_of,
    offers_of,
    ready_of,
    reference_of,
    variant_pods,
    variant_signals,
)

MOST_GAP_SECONDS = 60.0  # between two looks; a longer or negative gap means that the clock has jumped
STARTS_KEPT, STARTS_OF_ALL = 5, 40  # start times: per variant, in total
ASKED = "no pod is ready, and there are requests"


class PoolScaling:
    """The scaling of one pool. Measurements survive a change of the policy."""

    def __init__(self, autoscale: Autoscale) -> None:
        self.signals: Mapping[str, Signal] = {}  # by role, of the last look
        self._autoscale, self._shadow = autoscale, False
        self._price: float | None = None  # of a pod of a role without variants, per hour
        self._roles: dict[str, RoleMemory] = {}
        self._starting: dict[str, float] = {}  # pod that does not serve yet -> second of its first sight
        self._known: set[str] | None = None  # pods of the last look
        self._starts: list[tuple[str, float]] = []  # variant and duration in seconds of the last starts
        self.first_start: float | None = None  # first sight of the oldest starting pod of a serving role
        self._looked_at: float | None = None
        self._seen: PoolSeen | None = None
        self._refused = (0.0, 0.0)

    @property
    def is_used(self) -> bool:
        """Whether the policy configures autoscaling for any role."""
        return bool(self._autoscale.by_role)

    def reconfigure(self, autoscale: Autoscale, *, shadow: bool = False, pod_hour_price: float | None = None) -> None:
        """Use another policy from the next look on."""
        self._autoscale, self._shadow, self._price = autoscale, shadow, pod_hour_price
        if not self.is_used:
            self.signals = {}

    def look(self, seen: PoolSeen, *, now: float) -> Mapping[str, Signal]:
        """Take the pool's state at `now` (monotonic seconds) and return the signals by role."""
        seconds = 0.0 if self._looked_at is None else now - self._looked_at
        has_jumped = self._looked_at is not None and not 0.0 < seconds <= MOST_GAP_SECONDS
        self._looked_at, self._seen = now, seen
        self._note_starts(seen.pods, now=now, has_jumped=has_jumped)
        refused = seen.refused_requests - self._refused[0], seen.refused_tokens - self._refused[1]
        self._refused = seen.refused_requests, seen.refused_tokens
        by_role = self._autoscale.by_role
        self._roles = {role: self._roles.get(role) or RoleMemory() for role in by_role}
        if has_jumped:
            for kept in self._roles.values():
                kept.forget_samples()
        self.signals = {
            role: self._signal(
                role,
                policy,
                seen,
                _waiting(role, seen, requests=max(refused[0], 0.0), tokens=max(refused[1], 0.0)),
                seconds=seconds,
                now=now,
                has_jumped=has_jumped,
            )
            for role, policy in by_role.items()
        }
        return self.signals

    @property
    def promises(self) -> tuple[float | None, float | None]:
        """The TTFT and inter-token targets of the last look."""
        return (None, None) if self._seen is None else (self._seen.ttft_seconds, self._seen.inter_token_seconds)

    def planned(self, seconds: float) -> Mapping[str, PlannedRole]:
        """Return the plan by role for a time in `seconds`, by the last look; 0 is now."""
        if self._seen is None:
            return {}
        return planned_roles(self._autoscale.by_role, self._roles, self.signals, self._seen, seconds=seconds)

    @property
    def start_seconds(self) -> float | None:
        """Median time of the last starts, from first sight to serving; None if no start was seen."""
        return median(seconds for _, seconds in self._starts[-STARTS_KEPT:]) if self._starts else None

    def _start_of(self, variant: str) -> float | None:
        seen = [seconds for name, seconds in self._starts if name == variant]
        return median(seen[-STARTS_KEPT:]) if seen else None

    def ask_for_one(self) -> bool:
        """Ask for one pod in each serving role with none desired, as a request waits. Tell whether anything changed.

        Called between two looks, so that the autoscaler sees the request at once.
        """
        if self._seen is None:
            return False
        asked = {
            role: self._with_one(role, signal, self._seen)
            for role, signal in self.signals.items()
            if role in SERVING_ROLES and not signal.wanted
        }
        self.signals = {**self.signals, **asked}
        return bool(asked)

    def _with_one(self, role: str, signal: Signal, seen: PoolSeen) -> Signal:
        policy, kept = self._autoscale.by_role[role], self._roles[role]
        pods = [pod for pod in seen.pods if pod.role == role]
        variants = variant_pods(policy, pods, kept.demand, promise=seen.inter_token_seconds)
        numbers = _held(policy, kept, variants, 1)
        by_variant = variant_signals(variants, numbers, shadow=signal.shadow, price=self._price)
        return msgspec.structs.replace(
            signal,
            wanted=sum(each.wanted for each in by_variant),
            told=sum(each.told for each in by_variant),
            variants=by_variant,
            reason=ASKED,
        )

    def _oldest_start(self, role: str, pods: Sequence[PodSeen], *, now: float) -> float:
        """Return the seconds since the first sight of the role's oldest starting pod; 0 without one."""
        began = [self._starting[pod.address] for pod in pods if pod.role == role and pod.address in self._starting]
        return now - min(began) if began else 0.0

    def _note_starts(self, pods: Sequence[PodSeen], *, now: float, has_jumped: bool) -> None:
        if has_jumped:
            self._starting.clear()
        for pod in pods:
            began = self._starting.get(pod.address)
            if pod.serves and began is not None:
                self._starts = [*self._starts, (pod.variant, now - began)][-STARTS_OF_ALL:]
                del self._starting[pod.address]
            elif not pod.serves and began is None and self._known is not None and pod.address not in self._known:
                self._starting[pod.address] = now
        self._known = {pod.address for pod in pods}
        serving = [
            self._starting[pod.address] for pod in pods if pod.address in self._starting and pod.role in SERVING_ROLES
        ]
        self.first_start = min(serving, default=None)
        self._starting = {address: began for address, began in self._starting.items() if address in self._known}

    def _signal(
        self,
        role: str,
        policy: ScalePolicy,
        seen: PoolSeen,
        waiting: Waiting,
        *,
        seconds: float,
        now: float,
        has_jumped: bool,
    ) -> Signal:
        pods, kept = [pod for pod in seen.pods if pod.role == role], self._roles[role]
        ready, promise = sum(pod.serves for pod in pods), seen.inter_token_seconds
        work = self._work(policy, kept, pods, waiting, seen, seconds=seconds, now=now)
        variants = variant_pods(policy, pods, kept.demand, promise=promise)
        serving = ready_of(variants) if policy.variants else RoleReady(prompts=ready, decoding=ready)
        state, words, least = _why_to_hold(pods, waiting, work, has_jumped=has_jumped)
        ahead = {
            each.name: self._outlooks(role, policy, each, kept, seen, serving, now=now)
            for each in variants
            if state is State.OK
        }
        need, unit = (None, "") if work is None else _need(policy, kept, variants, ahead, work)
        if state is State.OK and need is None:
            state, words = State.TOO_FEW_SAMPLES, "too few reports were seen to say what the load is"
        if need is None or work is None:
            # thresholds compare current values and need no history, but they do need reports
            told = threshold_verdict(policy, pods, waiting, ready) if state is State.TOO_FEW_SAMPLES else SILENT
            numbers = _held(policy, kept, variants, max(least, told.pods(ready)))
            reason = f"{words}: the number stays{threshold_words(told)}"
        else:
            told = threshold_verdict(policy, pods, waiting, ready)
            numbers, held = _settled(policy, kept, variants, ahead, work, need, told, now=now)
            reason = _joined(unit + need.words + threshold_words(told), held)
            if need.is_out_of_reach:
                state = State.PROMISE_OUT_OF_REACH
            elif work.nonsense:
                state = State.NONSENSE_REPORTS
                reason = _joined(reason, f"without {len(work.nonsense)} pods that report nonsense ({work.nonsense[0]})")
        by_variant = variant_signals(variants, numbers, shadow=self._shadow, price=self._price)
        return Signal(
            role=role,
            wanted=sum(each.wanted for each in by_variant),
            told=sum(each.told for each in by_variant),
            ready=ready,
            present=len(pods),
            state=state,
            reason=reason,
            shadow=self._shadow,
            saturation=serving.saturation(kept.prefill.level, kept.decode.level),
            prefill_busy=kept.prefill.level if role != "decode" else None,
            decode_busy=kept.decode.level if role != "prefill" else None,
            queued_tokens=waiting.tokens if work is None else work.backlog_tokens,
            input_tokens_per_second=0.0 if work is None else work.uncached_rate,
            cached_tokens_per_second=0.0 if work is None else work.cached_rate,
            output_tokens_per_second=0.0 if work is None else work.output_rate,
            variants=by_variant,
            costs=costs_of(by_variant, work),
        )

    @staticmethod
    def _work(
        policy: ScalePolicy,
        kept: RoleMemory,
        pods: Sequence[PodSeen],
        waiting: Waiting,
        seen: PoolSeen,
        *,
        seconds: float,
        now: float,
    ) -> Work | None:
        kept.count_in(reference_of(policy, pods, kept.demand))
        kept.demand.capacities.keep([OTHERS, *(each.name for each in policy.variants)])
        work = kept.demand.look(
            pods,
            waiting,
            seconds=seconds,
            inter_token_seconds=seen.inter_token_seconds,
            declared=declared_of(policy, kept.demand.reference),
        )
        if work is not None and work.reporting:
            if work.prefill is not None:
                kept.prefill.add(work.prefill, now=now)
            if work.decode is not None:
                kept.decode.add(work.decode, now=now)
        kept.work = work or kept.work
        return work

    def _outlooks(
        self,
        role: str,
        policy: ScalePolicy,
        variant: VariantPods,
        kept: RoleMemory,
        seen: PoolSeen,
        ready: RoleReady,
        *,
        now: float,
    ) -> Outlooks:
        """Return the forecasts for the time when a pod of the variant that is requested now is ready."""
        horizon = max(variant.start_seconds or policy.start_seconds, self._start_of(variant.name) or 0.0)
        alone_seconds = max(horizon - self._oldest_start(role, seen.pods, now=now), 0.0)
        return kept.ahead(role, seen, ready, seconds=horizon, alone_seconds=alone_seconds)


def _waiting(role: str, seen: PoolSeen, *, requests: float, tokens: float) -> Waiting:
    """Return a role's queue in all pickers, assuming that they have equal queues.

    Prompts wait for prefill pods if there are any, requests always for decoding pods. Roles with the same kind of work
    share a queue in proportion to their pods.
    """
    serving = [pod.role for pod in seen.pods if pod.serves]
    there = serving or [pod.role for pod in seen.pods] or [role]
    present = [pod.role for pod in seen.pods if pod.role != "prefill"]
    # if only prefill pods are left, requests wait for the first decoding pod
    decoding = [each for each in serving if each != "prefill"] or present or [role]
    prefilling = [each for each in there if each == "prefill"] or decoding
    of_requests = decoding.count(role) / len(decoding)
    of_tokens = prefilling.count(role) / len(prefilling)
    return Waiting(
        requests=seen.queued_requests * seen.pickers * of_requests,
        tokens=seen.queued_tokens * seen.pickers * of_tokens,
        foreseen_requests=seen.foreseen_requests * seen.pickers * of_requests,
        answer_tokens=seen.answer_tokens * seen.pickers * of_requests,
        refused_requests=requests * seen.pickers * of_requests,
        refused_tokens=tokens * seen.pickers * of_tokens,
    )


def _why_to_hold(
    pods: Sequence[PodSeen], waiting: Waiting, work: Work | None, *, has_jumped: bool
) -> tuple[State, str, int]:
    """Return the state, and if it allows no recommendation the reason and the least number of pods nevertheless."""
    if not any(pod.serves for pod in pods):
        least = 1 if waiting.requests or waiting.refused_requests else 0
        return State.NO_READY_PODS, "no pod is ready" + (", and there are requests" if least else ""), least
    if has_jumped:
        return State.CLOCK_JUMPED, "the clock has jumped", 0
    if work is not None and work.nonsense and not work.reporting:
        return State.NONSENSE_REPORTS, f"all that pods report is nonsense ({work.nonsense[0]})", 0
    if not any(pod.load is not None for pod in pods):
        return State.NO_REPORTS, "no pod reports its load", 0
    return State.OK, "", 0


def _need(
    policy: ScalePolicy, kept: RoleMemory, variants: Sequence[VariantPods], ahead: Mapping[str, Outlooks], work: Work
) -> tuple[Need | None, str]:
    """Return the need of the load, and with variants the unit of that number in words."""
    if not policy.variants:
        return larger(ahead.get(OTHERS, Outlooks()).needs(work)), ""
    need, name = need_of(variants, ahead, work, reference=kept.demand.reference)
    return need, f"in {name} pods: "


def _held(policy: ScalePolicy, kept: RoleMemory, variants: Sequence[VariantPods], least: int) -> Mapping[str, int]:
    """Return the replicas by variant while there is no recommendation: unchanged, but at least `least` in total."""
    if policy.variants:
        kept.variants.bound(policy, variants)
        return kept.variants.hold(variants, _bounded(least, policy))
    kept.holding.bound(policy.min_replicas, policy.max_replicas)
    present = sum(each.present for each in variants)
    return {OTHERS: _bounded(kept.holding.hold(least, present=present), policy)}


def _settled(
    policy: ScalePolicy,
    kept: RoleMemory,
    variants: Sequence[VariantPods],
    ahead: Mapping[str, Outlooks],
    work: Work,
    need: Need,
    told: Verdict,
    *,
    now: float,
) -> tuple[Mapping[str, int], str]:
    if policy.variants:
        held = kept.variants.bound(policy, variants)
        offers = offers_of(variants, ahead, work, held)
        return kept.variants.settle(policy, variants, offers, told, now=now)
    holding, ready = kept.holding, sum(each.ready for each in variants)
    holding.bound(policy.min_replicas, policy.max_replicas)
    recommended = _recommended(need.pods, told, ready=ready, wanted=holding.wanted)
    bounded = _bounded(recommended, policy)
    present = sum(each.present for each in variants)
    number, held_words = holding.settle(bounded, present=present, now=now, window_seconds=policy.stabilization_seconds)
    return {OTHERS: _bounded(number, policy)}, _joined(held_words, _limited(recommended, policy))


def _recommended(need: float, told: Verdict, *, ready: int, wanted: int | None) -> int:
    number = max(ceil(need - UP_MARGIN), 1 if need > 0.0 else 0, told.pods(ready))
    if wanted is None or number >= wanted:
        return number
    if told.way is Way.HOLD:
        return wanted
    return min(max(ceil(need + DOWN_MARGIN), number), wanted) if need > 0.0 else number


def _bounded(number: int, policy: ScalePolicy) -> int:
    if policy.max_replicas is not None:
        number = min(number, policy.max_replicas)
    return max(number, policy.min_replicas)


def _limited(number: int, policy: ScalePolicy) -> str:
    if policy.max_replicas is not None and number > policy.max_replicas:
        return f"limited: {number} would be needed, maxReplicas is {policy.max_replicas}"
    if number < policy.min_replicas:
        return f"limited: {number} would do, minReplicas is {policy.min_replicas}"
    return ""


def _joined(*words: str) -> str:
    return "; ".join(part for part in words if part)
