"""The plan: pods that the load needs now or by forecast, with the reasons in words. Pure values."""

from collections.abc import Mapping, Sequence

import msgspec

from extproc.policy.autoscale import ScalePolicy
from extproc.policy.scale_variants import OTHERS, ScaleVariant
from extproc.scaling.choice import Choice, cheapest
from extproc.scaling.demand import Work
from extproc.scaling.need import Outlooks
from extproc.scaling.role_memory import RoleMemory
from extproc.scaling.running_costs import per_million
from extproc.scaling.seen import PoolSeen, Signal, Source, State, VariantSignal
from extproc.scaling.variant_scaling import RoleReady, VariantPods, need_of, offers_of, variant_pods

NO_PRICE = 1.0  # of every pod without a price in the policy: the cheapest set is then the one with the fewest pods
PLANNABLE = (State.OK, State.NONSENSE_REPORTS, State.PROMISE_OUT_OF_REACH)
SOURCE_WORDS: Mapping[Source, str] = {
    Source.LEARNED: "as its pods have shown",
    Source.DECLARED: "as declared: none of its pods has shown it yet",
    Source.ASSUMED: "as the policy assumes: its pods have had too little to do",
    Source.UNKNOWN: "nothing is known: start one of its pods, or declare what it does",
}


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """Offered tokens a second."""

    input: float = 0.0  # uncached
    cached: float = 0.0
    output: float = 0.0


class PlannedVariant(msgspec.Struct, frozen=True, kw_only=True):
    """One variant of a role; the capacity of its pods is within the SLO."""

    name: str  # "" without variants, or for pods outside all variants
    source: Source
    prefill_tokens_per_second: float | None = None
    decode_tokens_per_second: float | None = None
    streams: float | None = None
    request_seconds: float = 0.0
    pod_hour_price: float | None = None
    min_replicas: int = 0
    max_replicas: int | None = None
    present: int = 0
    wanted: int = 0
    reason: str = ""


class PlannedRole(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one role."""

    role: str
    state: State
    reason: str
    present: int
    wanted: int
    min_replicas: int
    max_replicas: int | None
    demand: Demand
    prefill_busy: float | None = None  # pods of the reference variant that the prompts keep busy
    decode_busy: float | None = None
    cost_per_hour: float | None = None  # of the desired pods; None without a price
    cost_per_million_tokens: float | None = None  # offered tokens
    cost_per_million_output_tokens: float | None = None
    variants: tuple[PlannedVariant, ...] = ()

    @property
    def prefill_lean(self) -> float | None:
        """The share of prefill in the work, or None if prefill or decoding is unknown."""
        if self.prefill_busy is None or self.decode_busy is None or not self.prefill_busy + self.decode_busy:
            return None
        return self.prefill_busy / (self.prefill_busy + self.decode_busy)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of one pool, at one time."""

    pool: str = ""
    of: str  # "now", "in 3600 s", ...
    currency: str = ""
    ttft_seconds: float | None = None  # tightest target of the classes with requests
    inter_token_seconds: float | None = None
    prefill_pods: float | None = None  # kept busy by prompts, in all roles; None if unknown
    decode_pods: float | None = None
    ratio: str = ""  # desired prefill : decode, in words
    roles: tuple[PlannedRole, ...] = ()


def plan_of(
    roles: Sequence[PlannedRole],
    *,
    of: str,
    pool: str = "",
    currency: str = "",
    ttft_seconds: float | None = None,
    inter_token_seconds: float | None = None,
) -> Plan:
    """Return the plan of one pool's roles."""
    prefill = [each.prefill_busy for each in roles if each.prefill_busy is not None]
    decode = [each.decode_busy for each in roles if each.decode_busy is not None]
    return Plan(
        pool=pool,
        of=of,
        currency=currency,
        ttft_seconds=ttft_seconds,
        inter_token_seconds=inter_token_seconds,
        prefill_pods=sum(prefill) if prefill else None,
        decode_pods=sum(decode) if decode else None,
        ratio=ratio_words(roles),
        roles=tuple(roles),
    )


def ratio_words(roles: Sequence[PlannedRole]) -> str:
    """Return the desired prefill : decode ratio in words, and the dominant work of pods that do both."""
    by_role = {each.role: each for each in roles}
    words = []
    if "prefill" in by_role and "decode" in by_role:
        prefill, decode = by_role["prefill"].wanted, by_role["decode"].wanted
        words.append(f"{prefill} prefill : {decode} decode pods")
    both = by_role.get("both")
    lean = None if both is None else both.prefill_lean
    if both is not None and lean is not None:
        to = "prefill" if lean >= 0.5 else "decode"
        words.append(f"pods of the role both lean to {to}: {lean:.0%} of their work is prompts")
    return "; ".join(words)


def offered(policy: ScalePolicy, variants: Sequence[VariantPods]) -> Sequence[VariantPods]:
    """Return the variants to choose from; a role without variants has a single one, without bounds."""
    if policy.variants:
        return variants
    # built here, not parsed: a policy may not have an empty selector
    whole = ScaleVariant(name=OTHERS, selector={}, pod_hour_price=NO_PRICE)
    return [msgspec.structs.replace(each, declared=whole) for each in variants]


def planned_roles(
    by_role: Mapping[str, ScalePolicy],
    kept: Mapping[str, RoleMemory],
    signals: Mapping[str, Signal],
    seen: PoolSeen,
    *,
    seconds: float,
) -> Mapping[str, PlannedRole]:
    """Return the plan by role for a time in `seconds`, by the last look; 0 is now."""
    planned = {}
    for role, policy in by_role.items():
        signal, memory = signals.get(role), kept.get(role)
        if signal is None or memory is None:
            continue
        if seconds <= 0.0 or memory.work is None or signal.state not in PLANNABLE:
            planned[role] = planned_now(signal, policy)
            continue
        pods = [pod for pod in seen.pods if pod.role == role]
        variants = offered(policy, variant_pods(policy, pods, memory.demand, promise=seen.inter_token_seconds))
        ready = sum(pod.serves for pod in pods)
        outlooks = memory.ahead(role, seen, RoleReady(prompts=ready, decoding=ready), seconds=seconds)
        planned[role] = planned_ahead(signal, policy, variants, outlooks, memory.work)
    return planned


def planned_now(signal: Signal, policy: ScalePolicy) -> PlannedRole:
    """Return the plan for now, from the signal."""
    demand = Demand(
        input=signal.input_tokens_per_second,
        cached=signal.cached_tokens_per_second,
        output=signal.output_tokens_per_second,
    )
    return _role(signal, policy, demand, [_variant(each, policy, wanted=each.wanted) for each in signal.variants])


def planned_ahead(
    signal: Signal,
    policy: ScalePolicy,
    variants: Sequence[VariantPods],
    outlooks: Outlooks,
    work: Work,
) -> PlannedRole:
    """Return the pods needed for the forecast."""
    quiet = msgspec.structs.replace(work, waiting_seconds=0.0, waiting_decode_seconds=0.0)  # worked off by then
    ahead = {each.name: outlooks for each in variants}
    choice, reason = chosen(policy, variants, ahead, quiet)
    factors = [each.busy / each.level for each in (outlooks.prompts, outlooks.decoding) if each and each.level]
    prompts = outlooks.prompts.busy if outlooks.prompts else None
    decoding = outlooks.decoding.busy if outlooks.decoding else None
    demand = Demand(
        input=work.uncached_rate * (factors[0] if factors else 1.0),
        cached=work.cached_rate * (factors[0] if factors else 1.0),
        output=work.output_rate * (factors[-1] if factors else 1.0),
    )
    then = msgspec.structs.replace(
        signal,
        prefill_busy=prompts,
        decode_busy=decoding,
        wanted=sum(choice.counts.values()),
        reason=f"by the trend of the last five minutes; {reason}",
    )
    lines = [_variant(each, policy, wanted=choice.counts.get(each.name, each.present)) for each in signal.variants]
    return _role(then, policy, demand, lines)


def chosen(
    policy: ScalePolicy, variants: Sequence[VariantPods], ahead: Mapping[str, Outlooks], work: Work
) -> tuple[Choice, str]:
    """Return the cheapest set for a forecast, ignoring present pods, and the reason."""
    offers = [msgspec.structs.replace(each, held=0) for each in offers_of(variants, ahead, work, {})]
    choice = cheapest(offers, least=policy.min_replicas, most=policy.max_replicas)
    need, name = need_of(variants, ahead, work, reference=variants[0].name if variants else OTHERS)
    words = "too little is known to say what the load needs" if need is None else need.words
    if name and need is not None:
        words = f"in {name} pods: {words}"
    return choice, words if choice.suffices else f"{words}; limited: the bounds leave no set of pods that suffices"


def _variant(each: VariantSignal, policy: ScalePolicy, *, wanted: int) -> PlannedVariant:
    declared = next((one for one in policy.variants if one.name == each.name), None)
    bounds = declared or policy
    return PlannedVariant(
        name=each.name,
        source=each.source,
        prefill_tokens_per_second=each.prefill_tokens_per_second,
        decode_tokens_per_second=each.decode_tokens_per_second,
        streams=each.streams,
        request_seconds=each.request_seconds,
        pod_hour_price=each.pod_hour_price,
        min_replicas=bounds.min_replicas,
        max_replicas=bounds.max_replicas,
        present=each.present,
        wanted=wanted,
        reason=SOURCE_WORDS[each.source],
    )


def _role(signal: Signal, policy: ScalePolicy, demand: Demand, variants: Sequence[PlannedVariant]) -> PlannedRole:
    hour, tokens = cost_per_hour(variants), demand.input + demand.cached + demand.output
    return PlannedRole(
        role=signal.role,
        state=signal.state,
        reason=signal.reason,
        present=signal.present,
        wanted=signal.wanted,
        min_replicas=policy.min_replicas,
        max_replicas=policy.max_replicas,
        demand=demand,
        prefill_busy=signal.prefill_busy,
        decode_busy=signal.decode_busy,
        cost_per_hour=hour,
        cost_per_million_tokens=None if hour is None else per_million(hour, tokens),
        cost_per_million_output_tokens=None if hour is None else per_million(hour, demand.output),
        variants=tuple(variants),
    )


def cost_per_hour(variants: Sequence[PlannedVariant]) -> float | None:
    """Return the cost of the desired pods, or None if any of them has no price."""
    wanted = [each for each in variants if each.wanted]
    if not variants or any(each.pod_hour_price is None for each in wanted):
        return None
    return sum((each.pod_hour_price or 0.0) * each.wanted for each in wanted)
