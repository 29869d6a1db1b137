"""The pods that a recorded trace needs: on average, in its busiest slot, and if pods followed each slot. Pure."""

from collections.abc import Mapping, Sequence

import msgspec

from extproc.policy.autoscale import ScalePolicy
from extproc.policy.scale_variants import ScaleVariant
from extproc.scaling.capacity import Capacity
from extproc.scaling.demand import Work
from extproc.scaling.need import Outlook, Outlooks
from extproc.scaling.plan import (
    NO_PRICE,
    SOURCE_WORDS,
    Demand,
    Plan,
    PlannedRole,
    PlannedVariant,
    chosen,
    cost_per_hour,
    plan_of,
)
from extproc.scaling.running_costs import HOUR, MILLION, per_million
from extproc.scaling.seen import Source, State
from extproc.scaling.trace import Trace
from extproc.scaling.variant_scaling import VariantPods


class TracePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One trace."""

    requests: int
    seconds: float
    slot_seconds: float
    average: Plan
    busiest: Plan
    pod_hours: float  # if there were in each slot as many pods as it needs
    cost: float | None  # of these; None: there is no price
    cost_per_million_tokens: float | None


class Promises(msgspec.Struct, frozen=True, kw_only=True):
    """What requests are promised; None: nothing."""

    ttft_seconds: float | None = None
    inter_token_seconds: float | None = None


def plan_trace(
    trace: Trace, roles: Sequence[PlannedRole], *, promises: Promises, pool: str, currency: str, slot_seconds: float
) -> TracePlan:
    """Plan for a trace with pods like those of these roles."""

    def planned(demand: Demand, of: str) -> Plan:
        lines = [_role(each, _share(each, roles, demand), trace, promises) for each in roles]
        return plan_of(
            lines,
            of=of,
            pool=pool,
            currency=currency,
            ttft_seconds=promises.ttft_seconds,
            inter_token_seconds=promises.inter_token_seconds,
        )

    busiest = trace.busiest
    following = [planned(slot.demand, "") for slot in trace.slots]
    share = trace.seconds / len(following) / HOUR
    costs = [[role.cost_per_hour for role in plan.roles] for plan in following]
    known = all(cost is not None for slot in costs for cost in slot)
    cost = share * sum(cost or 0.0 for slot in costs for cost in slot) if known else None
    tokens = trace.average.total * trace.seconds
    return TracePlan(
        requests=trace.requests,
        seconds=trace.seconds,
        slot_seconds=slot_seconds,
        average=planned(trace.average, "the trace on average"),
        busiest=planned(busiest.demand, f"the trace's busiest {slot_seconds:g} s, from {busiest.at:g} s on"),
        pod_hours=share * sum(role.wanted for plan in following for role in plan.roles),
        cost=cost,
        cost_per_million_tokens=cost / tokens * MILLION if cost is not None and tokens else None,
    )


def _share(role: PlannedRole, roles: Sequence[PlannedRole], demand: Demand) -> Demand:
    """Return what of the load is this role's: prompts go to prefill pods and answers to decode pods where there are."""
    names = {each.role for each in roles}
    prompts = "prefill" if "prefill" in names else "both"
    decoding = "decode" if "decode" in names else "both"
    return Demand(
        input=demand.input if role.role == prompts else 0.0,
        cached=demand.cached if role.role == prompts else 0.0,
        output=demand.output if role.role == decoding else 0.0,
    )


def _role(role: PlannedRole, demand: Demand, trace: Trace, promises: Promises) -> PlannedRole:
    policy = ScalePolicy(
        min_replicas=role.min_replicas,
        max_replicas=role.max_replicas,
        variants=tuple(_declared(each) for each in role.variants),
    )
    unit = next((each for each in role.variants if each.prefill_tokens_per_second), None)
    variants = [_pods(each, unit, trace) for each in role.variants]
    outlooks = _outlooks(role, unit, demand, promises)
    work = Work(
        request_seconds=trace.prompt_tokens / unit.prefill_tokens_per_second
        if unit is not None and unit.prefill_tokens_per_second
        else 0.0,
        streams=None if unit is None else unit.streams,
        limit="promise",
    )
    choice, reason = chosen(policy, variants, {each.name: outlooks for each in variants}, work)
    lacks = _lacking(role, unit, demand)
    lines = [
        msgspec.structs.replace(each, wanted=choice.counts.get(each.name, 0), reason=SOURCE_WORDS[each.source])
        for each in role.variants
    ]
    hour = None if lacks else cost_per_hour(lines)
    return msgspec.structs.replace(
        role,
        state=State.TOO_FEW_SAMPLES if lacks else State.OK,
        reason="; ".join(each for each in (lacks, reason) if each),
        wanted=sum(each.wanted for each in lines),
        demand=demand,
        prefill_busy=None if outlooks.prompts is None else outlooks.prompts.busy,
        decode_busy=None if outlooks.decoding is None else outlooks.decoding.busy,
        cost_per_hour=hour,
        cost_per_million_tokens=None if hour is None else per_million(hour, demand.total),
        cost_per_million_output_tokens=None if hour is None else per_million(hour, demand.output),
        variants=tuple(lines),
    )


def _declared(each: PlannedVariant) -> ScaleVariant:
    return ScaleVariant(  # made, not read: its labels say nothing here
        name=each.name,
        selector={},
        pod_hour_price=each.pod_hour_price or NO_PRICE,
        min_replicas=each.min_replicas,
        max_replicas=each.max_replicas,
    )


def _pods(each: PlannedVariant, unit: PlannedVariant | None, trace: Trace) -> VariantPods:
    prefill, decode = each.prefill_tokens_per_second or 0.0, each.decode_tokens_per_second or 0.0
    of_prefill = (unit.prefill_tokens_per_second if unit else None) or 0.0
    of_decode = (unit.decode_tokens_per_second if unit else None) or 0.0
    pace = prefill / of_prefill if of_prefill else 0.0
    return VariantPods(
        name=each.name,
        capacity=Capacity(
            source=each.source,
            prefill=each.prefill_tokens_per_second,
            request_seconds=trace.prompt_tokens / prefill if prefill else 0.0,
            decode=each.decode_tokens_per_second,
            streams=each.streams,
            limit="promise",
        ),
        declared=_declared(each),
        ready=0,
        present=0,
        prefill_pace=pace,
        decode_pace=decode / of_decode if of_decode and decode else pace,
    )


def _outlooks(role: PlannedRole, unit: PlannedVariant | None, demand: Demand, promises: Promises) -> Outlooks:
    if unit is None:
        return Outlooks()

    def outlook(tokens: float, rate: float | None) -> Outlook | None:
        if not rate:
            return None
        return Outlook(
            level=tokens / rate,
            busy=tokens / rate,
            horizon=0.0,
            alone_seconds=0.0,
            ready=0.0,
            ttft_seconds=promises.ttft_seconds,
            inter_token_seconds=promises.inter_token_seconds,
        )

    return Outlooks(
        prompts=outlook(demand.input, unit.prefill_tokens_per_second) if role.role != "decode" else None,
        decoding=outlook(demand.output, unit.decode_tokens_per_second) if role.role != "prefill" else None,
    )


def _lacking(role: PlannedRole, unit: PlannedVariant | None, demand: Demand) -> str:
    """Return in words what is not known of the pods; "" where all is."""
    if unit is None:
        return "it is not known what a pod computes in a second: give --pod, or ask a picker that has seen requests"
    if demand.output and not unit.decode_tokens_per_second and role.role != "prefill":
        words = "it is not known what a pod generates at the promised inter-token time"
        return f"without decoding: {words} (--pod, decode=)"
    return ""


def declared_role(name: str, variants: Sequence[Mapping[str, float | str]]) -> PlannedRole:
    """Return a role of pods that are declared, not seen: name, prefill, decode, streams, price, min, max of each."""

    def number(given: Mapping[str, float | str], key: str) -> float | None:
        value = given.get(key)
        return float(value) if value is not None else None

    lines = [
        PlannedVariant(
            name=str(given["name"]),
            source=Source.DECLARED,
            prefill_tokens_per_second=number(given, "prefill"),
            decode_tokens_per_second=number(given, "decode"),
            streams=number(given, "streams"),
            pod_hour_price=number(given, "price"),
            min_replicas=int(number(given, "min") or 0),
            max_replicas=None if given.get("max") is None else int(float(given["max"])),
        )
        for given in variants
    ]
    return PlannedRole(
        role=name,
        state=State.OK,
        reason="",
        present=0,
        wanted=0,
        min_replicas=0,
        max_replicas=None,
        demand=Demand(),
        variants=tuple(lines),
    )
