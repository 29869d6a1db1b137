"""One pod as the pages show it: what it reports, what the index has of it, and why it serves nothing. Pure."""

from collections.abc import Sequence
from typing import Any

from extproc.pages.decision_state import rounded
from extproc.pages.picker_state import EndpointState
from extproc.pods.endpoint import EndpointStatus, Reachability
from extproc.pods.endpoint_trouble import EndpointTrouble
from kvmesh.blocks.cache_groups import is_of_group
from kvmesh.blocks.source import WORST_FIRST, SourceStatus


def endpoint_state(status: EndpointStatus, sources: Sequence[SourceStatus], **known_here: Any) -> EndpointState:
    """Return a pod with what it reports, what the index has of it and `known_here`: fields that only the picker has."""
    load, models = status.load, status.models
    tiers: dict[str, int] = {}
    for source in sources:
        if source.tier is not None:
            tiers[source.tier] = tiers.get(source.tier, 0) + source.cached_blocks
    # other cache groups of a hybrid model hold blocks of the same prompts
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


def stopped(
    status: EndpointStatus, trouble: EndpointTrouble | None, avoided: tuple[float, float] | None, *, ahead: float
) -> dict[str, Any]:
    """Return since when a pod gets nothing, why, and when it is tried again; `ahead`: of unix seconds."""
    if trouble is not None and status.reachability is not Reachability.READY:
        every = round(trouble.asked_every_seconds, 3)
        return {"since": trouble.since + ahead, "problem": trouble.problem, "asked_every_seconds": every}
    if avoided is not None:
        return {"since": avoided[0] + ahead, "trial_at": avoided[1] + ahead}
    return {}
