"""The pods of a pool, as `GET /state` shows them: those desired by role, and why a pod gets no requests. Pure."""

from collections.abc import Sequence
from typing import Any

from extproc.answers.attainment import Attainment
from extproc.pages.decision_state import rounded
from extproc.pages.picker_state import (
    ClassState,
    EndpointState,
    ScaleState,
    StepState,
    VariantState,
)
from extproc.pods.endpoint import EndpointStatus, EndpointTrouble, Reachability
from extproc.policy.priority import PriorityClass
from extproc.scaling.seen import Signal, VariantSignal
from kvmesh.blocks.cache_groups import is_of_group
from kvmesh.blocks.source import WORST_FIRST, SourceStatus


def pod_state(status: EndpointStatus, sources: Sequence[SourceStatus], **known_here: Any) -> EndpointState:
    """Return a pod with its report, its part of the index, and `known_here`: fields that only the picker knows."""
    load, models = status.load, status.models
    tiers: dict[str, int] = {}
    for source in sources:
        if source.tier is not None:
            tiers[source.tier] = tiers.get(source.tier, 0) + source.cached_blocks
    # skip a hybrid model's other cache groups: they hold blocks of the same prompts
    counted = [source for source in sources if not is_of_group(source.tier)] or sources
    worst = min(sources, key=lambda source: WORST_FIRST.index(source.state), default=None)
    return EndpointState(
        address=status.address,
        state=status.reachability.value,
        cached_blocks=sum(source.cached_blocks for source in counted),
        running=load.running_requests if load else None,
        waiting=load.waiting_requests if load else None,
        kv_usage=load.kv_usage if load else None,
        hit_rate=load.prefix_hit_rate if load else None,
        models=sorted(models.models) if models else None,
        adapters=sorted(models.adapters) if models else None,
        max_model_len=models.max_model_len if models else None,
        prefill_tokens_per_second=rounded(status.trend.prefill_tokens_per_second),
        inter_token_ms=rounded(status.trend.inter_token_seconds, times=1000.0),
        tiers=tiers,
        cached_tokens=sum(source.cached_blocks * (source.block_size or 0) for source in counted),
        block_tokens=min((source.block_size for source in counted if source.block_size), default=None),
        index_state=worst.state.value if worst is not None else None,
        index_reason=worst.reason if worst is not None else "",
        **known_here,
    )


def class_state(
    name: str,
    item: PriorityClass,
    attained: Attainment | None,
    *,
    waiting: int,
    waiting_for_pod: int,
    steps: Sequence[StepState],
    routed: int,
) -> ClassState:
    """Return a class with its targets, its attainment, its waiting requests and its degradation levels."""
    targets = item.targets
    return ClassState(
        name=name,
        priority=item.priority,
        sheddable=item.sheddable,
        target_ttft_ms=round(targets.ttft_seconds * 1000),
        target_inter_token_ms=targets.inter_token_seconds * 1000,
        objective=item.objective,
        attainment=attained.share if attained is not None else None,
        judged=attained.judged if attained is not None else 0,
        waiting=waiting,
        waiting_for_pod=waiting_for_pod,
        steps=sorted({line.step for line in steps}),
        in_force=steps,
        routed=routed,
    )


def scale_state(signal: Signal) -> ScaleState:
    """Return the shown state of one role."""
    return ScaleState(
        role=signal.role,
        wanted=signal.wanted,
        told=signal.told,
        ready=signal.ready,
        present=signal.present,
        state=signal.state.value,
        reason=signal.reason,
        shadow=signal.shadow,
        saturation=rounded(signal.saturation),
        prefill_lean=None if signal.prefill_lean is None else round(signal.prefill_lean, 3),
        cost_per_hour=_price(signal.costs.per_hour),
        cost_per_million_tokens=_price(signal.costs.per_million_tokens),
        cost_per_million_output_tokens=_price(signal.costs.per_million_output_tokens),
        variants=tuple(_variant(each) for each in signal.variants),
    )


def _variant(each: VariantSignal) -> VariantState:
    return VariantState(
        name=each.name,
        wanted=each.wanted,
        told=each.told,
        ready=each.ready,
        present=each.present,
        source=each.source.value,
        prefill_tokens_per_second=rounded(each.prefill_tokens_per_second),
        decode_tokens_per_second=rounded(each.decode_tokens_per_second),
        pod_hour_price=each.pod_hour_price,
    )


def _price(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def stopped(
    status: EndpointStatus, trouble: EndpointTrouble | None, avoided: tuple[float, float] | None, *, ahead: float
) -> dict[str, Any]:
    """Return since when a pod gets nothing, why, and when it is tried again.

    `ahead` is the offset from the arguments' monotonic seconds to unix seconds.
    """
    if trouble is not None and status.reachability is not Reachability.READY:
        every = round(trouble.asked_every_seconds, 3)
        return {"since": trouble.since + ahead, "problem": trouble.problem, "asked_every_seconds": every}
    if avoided is not None:
        return {"since": avoided[0] + ahead, "trial_at": avoided[1] + ahead}
    return {}
