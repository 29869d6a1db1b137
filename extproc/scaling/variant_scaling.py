"""A role with pods of several variants: the capacity of each, and its desired replicas. Pure.

Work is counted in busy pods of one variant, the reference. The pace of another variant is its capacity over the
reference's, for prompts and for decoding. A need is computed for each variant as if it served alone, and `choice` finds
the cheapest set. Each variant has its own `Holding`. No pod is removed before its replacements serve.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from extproc.policy.autoscale import ScalePolicy
from extproc.policy.scale_variants import OTHERS, ScaleVariant
from extproc.scaling.capacity import Capacity, Declared
from extproc.scaling.choice import Choice, Offer, cheapest, price_of, suffices
from extproc.scaling.demand import RoleDemand, Work
from extproc.scaling.holding import Holding
from extproc.scaling.need import Need, Outlooks, larger
from extproc.scaling.seen import PodSeen, Source, VariantSignal
from extproc.scaling.thresholds import Verdict, Way

UP_MARGIN, DOWN_MARGIN = 0.25, 0.25  # of a pod: hysteresis, so that no pod comes and goes at the edge
NEARLY = 1e-9


class VariantPods(msgspec.Struct, frozen=True, kw_only=True):
    """The pods of one variant, and the capacity of one of them."""

    name: str
    capacity: Capacity
    declared: ScaleVariant | None  # None for pods outside all variants
    ready: int
    present: int  # ready and starting pods
    prefill_pace: float  # capacity over the reference's; 0 if unknown
    decode_pace: float

    @property
    def price(self) -> float:
        """Cost of a pod per hour; 0 outside all variants, where the number of pods is given."""
        return 0.0 if self.declared is None else self.declared.pod_hour_price

    @property
    def start_seconds(self) -> float | None:
        """Declared start time of a pod, or None to use the role's."""
        return None if self.declared is None else self.declared.start_seconds

    @property
    def is_known(self) -> bool:
        """Whether the capacity of its pods is known."""
        return self.capacity.source is not Source.UNKNOWN and self.prefill_pace > 0.0


class RoleReady(msgspec.Struct, frozen=True, kw_only=True):
    """The ready pods, in pods of the reference variant."""

    prompts: float
    decoding: float

    def saturation(self, prefill_busy: float | None, decode_busy: float | None) -> float | None:
        """Return the busy pods per ready pod, for the more loaded kind of work; None if unknown or without a pod."""
        pairs = ((prefill_busy, self.prompts), (decode_busy, self.decoding))
        return max((busy / pods for busy, pods in pairs if busy is not None and pods), default=None)


def declared_of(policy: ScalePolicy, variant: str) -> Declared:
    """Return the capacity that the policy declares for a pod of a variant."""
    found = next((each for each in policy.variants if each.name == variant), None)
    if found is None:
        return Declared()
    return Declared(prefill=found.prefill_tokens_per_second, decode=found.decode_tokens_per_second)


def reference_of(policy: ScalePolicy, pods: Sequence[PodSeen], demand: RoleDemand) -> str:
    """Return the reference variant: the last one while its capacity is known, otherwise the first with a ready pod."""
    names = [each.name for each in policy.variants]
    if not names:
        return OTHERS
    known = demand.capacities.of(demand.reference, declared=declared_of(policy, demand.reference), promise=None)
    if demand.reference in names and known.prefill is not None:
        return demand.reference
    serving = {pod.variant for pod in pods if pod.serves}
    declared = [name for name in names if declared_of(policy, name).prefill is not None]
    return next((name for name in names if name in serving), (declared or names)[0])


def variant_pods(
    policy: ScalePolicy, pods: Sequence[PodSeen], demand: RoleDemand, *, promise: float | None
) -> Sequence[VariantPods]:
    """Return the policy's variants in order, then the pods outside all of them, if any."""
    unit = demand.capacities.of(demand.reference, declared=declared_of(policy, demand.reference), promise=promise)
    names = [each.name for each in policy.variants]
    others = [pod for pod in pods if pod.variant not in names]
    found = []
    for name in [*names, *([OTHERS] if others or not names else [])]:
        mine = others if name == OTHERS else [pod for pod in pods if pod.variant == name]
        capacity = demand.capacities.of(name, declared=declared_of(policy, name), promise=promise)
        prefill = capacity.prefill / unit.prefill if capacity.prefill and unit.prefill else 0.0
        decode = capacity.decode / unit.decode if capacity.decode and unit.decode else prefill
        found.append(
            VariantPods(
                name=name,
                capacity=capacity,
                declared=next((each for each in policy.variants if each.name == name), None),
                ready=sum(pod.serves for pod in mine),
                present=len(mine),
                prefill_pace=prefill,
                decode_pace=decode,
            )
        )
    return found


def ready_of(variants: Sequence[VariantPods]) -> RoleReady:
    """Return the ready pods."""
    return RoleReady(
        prompts=sum(each.ready * each.prefill_pace for each in variants),
        decoding=sum(each.ready * each.decode_pace for each in variants),
    )


def offers_of(
    variants: Sequence[VariantPods], ahead: Mapping[str, Outlooks], work: Work, held: Mapping[str, int]
) -> list[Offer]:
    """Return the variants as offers for `choice`; `ahead` has their forecasts, in pods of the reference.

    A variant that cannot meet a target takes no load, unless no variant can meet it.
    """
    needs = {each.name: _needs(each, ahead[each.name], work) for each in variants if each.is_known}
    reaching = [
        {name for name, pair in needs.items() if (need := pair[kind]) is not None and not need.is_out_of_reach}
        for kind in range(2)
    ]

    def pods(name: str, kind: int) -> float:
        pair = needs.get(name)
        need = None if pair is None else pair[kind]
        if need is None:
            is_asked = any(other[kind] is not None for other in needs.values())
            return inf if pair is None and is_asked else 0.0
        return inf if need.is_out_of_reach and reaching[kind] else need.pods

    offers = []
    for each in variants:
        declared, present = each.declared, each.present
        least = present if declared is None else declared.min_replicas
        most = max(present, least) if declared is None or not each.is_known else declared.max_replicas
        offers.append(
            Offer(
                name=each.name,
                price=each.price,
                prompts=pods(each.name, 0),
                decoding=pods(each.name, 1),
                least=least,
                most=most,  # fixed for pods outside all variants, and for variants of unknown capacity
                held=present if declared is None else held.get(each.name, present),
            )
        )
    return offers


def need_of(
    variants: Sequence[VariantPods], ahead: Mapping[str, Outlooks], work: Work, *, reference: str
) -> tuple[Need | None, str]:
    """Return the need and the variant that it is counted in: the first one that meets the targets."""
    found: Need | None = None
    name = reference
    for each in sorted(variants, key=lambda each: each.name != reference):
        if each.name not in ahead or not each.is_known:
            continue
        need = larger(_needs(each, ahead[each.name], work))
        if need is not None and (found is None or (found.is_out_of_reach and not need.is_out_of_reach)):
            found, name = need, each.name
    return found, name


def _needs(each: VariantPods, outlooks: Outlooks, work: Work) -> tuple[Need | None, Need | None]:
    prefill, decode = each.prefill_pace, each.decode_pace or each.prefill_pace
    prompts, decoding = outlooks.prompts, outlooks.decoding
    capacity = each.capacity
    own = msgspec.structs.replace(
        work,
        request_seconds=work.request_seconds / prefill,
        waiting_seconds=work.waiting_seconds / prefill,
        waiting_decode_seconds=work.waiting_decode_seconds / decode,
        streams=capacity.streams or work.streams,
        limit=capacity.limit or work.limit,
        is_out_of_reach=capacity.is_out_of_reach,
    )
    return Outlooks(
        prompts=None if prompts is None else prompts.in_pods_of(prefill),
        decoding=None if decoding is None else decoding.in_pods_of(decode),
    ).needs(own)


@dataclass(slots=True, eq=False)
class VariantSet:
    """The desired replicas of each variant."""

    _holdings: dict[str, Holding] = field(default_factory=dict)

    def bound(self, policy: ScalePolicy, variants: Sequence[VariantPods]) -> dict[str, int]:
        """Apply the policy's variants and bounds, and return the bounded replicas."""
        named = [each for each in variants if each.declared is not None]
        self._holdings = {each.name: self._holdings.get(each.name) or Holding() for each in named}
        held = {}
        for each in named:
            holding, declared = self._holdings[each.name], each.declared
            assert declared is not None, "named"
            if holding.wanted is None:
                holding.wanted = each.present
            holding.bound(declared.min_replicas, declared.max_replicas)
            held[each.name] = holding.wanted
        most, others = policy.max_replicas, sum(each.present for each in variants if each.declared is None)
        for each in sorted(named, key=lambda each: (each.prefill_pace / each.price, each.name)):  # highest price
            over = 0 if most is None else sum(held.values()) + others - most
            if over > 0:
                held[each.name] -= min(over, held[each.name])
                self._holdings[each.name].bound(0, held[each.name])
        return held

    def settle(
        self,
        policy: ScalePolicy,
        variants: Sequence[VariantPods],
        offers: Sequence[Offer],
        told: Verdict,
        *,
        now: float,
    ) -> tuple[dict[str, int], str]:
        """Return the desired replicas, and the reason in words."""
        held = {offer.name: offer.held for offer in offers}
        ready = {each.name: each.ready for each in variants}
        present = {each.name: each.present for each in variants}
        least = max(policy.min_replicas, told.pods(sum(ready.values())))
        choice, wished = self._choice(policy, offers, held, told, least=least)
        after = {name: min(ready[name], wished[name]) for name in wished}
        waits = any(wished[name] < held[name] for name in wished) and not suffices(offers, after, margin=-UP_MARGIN)
        if waits:
            wished = {name: max(wished[name], held[name]) for name in wished}
        wished = _within(wished, held, offers, most=policy.max_replicas)
        pods = ", ".join(f"{count} {name or 'others'}" for name, count in choice.counts.items() if count)
        words = [f"cheapest: {pods or 'none'} at {price_of(offers, choice.counts):.4g} an hour"]
        words += [f"{each.name}: nothing is known of what a pod does" for each in variants if not each.is_known]
        words += [] if choice.suffices else ["limited: the bounds leave no set of pods that suffices"]
        words += [] if choice.is_proven else ["there may be a cheaper set: too many were to be looked at"]
        words += ["pods go once those in their place serve"] if waits else []
        numbers = {}
        for name, holding in self._holdings.items():
            number, why = holding.settle(
                wished[name], present=present[name], now=now, window_seconds=policy.stabilization_seconds
            )
            numbers[name] = number
            words += [f"{name}: {why}"] if why else []
        return numbers, "; ".join(words)

    def _choice(
        self, policy: ScalePolicy, offers: Sequence[Offer], held: Mapping[str, int], told: Verdict, *, least: int
    ) -> tuple[Choice, dict[str, int]]:
        most = policy.max_replicas
        if not suffices(offers, held, margin=-UP_MARGIN) or sum(held.values()) < least:
            choice = cheapest(offers, least=least, most=most, margin=-UP_MARGIN)
            counts = dict(choice.counts)
        else:
            choice = cheapest(offers, least=least, most=most, margin=DOWN_MARGIN)
            saves = choice.suffices and price_of(offers, choice.counts) < price_of(offers, held) - NEARLY
            useful = {offer.name: offer.least if offer.is_useless else held[offer.name] for offer in offers}
            counts = dict(choice.counts) if saves else useful
            if not choice.suffices:
                choice = msgspec.structs.replace(choice, suffices=True)  # the present set suffices
        if told.way is Way.HOLD:
            counts = {name: max(count, held[name]) for name, count in counts.items()}
        return choice, counts

    def hold(self, variants: Sequence[VariantPods], least: int) -> dict[str, int]:
        """Return the replicas without a recommendation: unchanged, or the cheapest added up to `least` in total."""
        numbers = {name: holding.hold(0, present=0) for name, holding in self._holdings.items()}
        others = sum(each.present for each in variants if each.declared is None)
        named = [each for each in variants if each.declared is not None]
        for each in sorted(named, key=lambda each: (each.price / (each.prefill_pace or NEARLY), each.price, each.name)):
            most = each.declared.max_replicas if each.declared is not None else None
            lacks = least - others - sum(numbers.values())
            room = lacks if most is None else min(lacks, most - numbers[each.name])
            if room > 0:
                numbers[each.name] = self._holdings[each.name].hold(numbers[each.name] + room, present=0)
        return numbers


def _within(
    wished: Mapping[str, int], held: Mapping[str, int], offers: Sequence[Offer], *, most: int | None
) -> dict[str, int]:
    """Cut the increases so that the held pods plus the increases stay within `most`."""
    counts = dict(wished)
    if most is None:
        return counts
    room = max(most - sum(held.values()), 0)
    for offer in sorted(offers, key=lambda each: (each.price * max(each.prompts, each.decoding, NEARLY), each.name)):
        more = max(counts[offer.name] - held[offer.name], 0)
        counts[offer.name] -= max(more - room, 0)
        room -= min(more, room)
    return counts


def variant_signals(
    variants: Sequence[VariantPods], numbers: Mapping[str, int], *, shadow: bool, price: float | None
) -> tuple[VariantSignal, ...]:
    """Return the signal of each variant. The number of pods outside all variants stays as it is.

    `price` is that of a pod of a role without variants.
    """
    whole = price if len(variants) == 1 else None
    return tuple(
        VariantSignal(
            name=each.name,
            wanted=numbers.get(each.name, each.present),
            told=each.present if shadow else numbers.get(each.name, each.present),
            ready=each.ready,
            present=each.present,
            pod_hour_price=whole if each.declared is None else each.price,
            prefill_tokens_per_second=each.capacity.prefill,
            decode_tokens_per_second=each.capacity.decode,
            source=each.capacity.source,
            streams=each.capacity.streams,
            request_seconds=each.capacity.request_seconds,
        )
        for each in variants
    )
