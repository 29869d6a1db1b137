"""What became of requests, recorded or simulated, and the same in sums by class and tenant."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from extproc.load.summary import percentile
from extproc.policy.priority import PriorityClass
from extproc.records.access_log import MICROSECONDS, AccessRecord
from extproc.replay_log import read_log

SERVED, REFUSED, ABANDONED = "served", "refused", "left"
ALL = "*"  # in place of a class or a tenant: all of them
MOST_TENANTS = 10  # of a class, that are shown by themselves


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """What became of one request; seconds."""

    class_name: str
    tenant: str
    outcome: str  # SERVED, REFUSED, or ABANDONED: the client left before there was a decision
    reason: str = ""  # of a refusal
    waited_seconds: float = 0.0  # for room, whatever came of it
    steps: tuple[str, ...] = ()  # of degradation
    withheld: tuple[str, ...] = ()  # what a policy in shadow would have done
    ttft_seconds: float | None = None  # from the arrival at the picker
    inter_token_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What became of some requests together."""

    requests: int
    served: int
    refused: Mapping[str, int]  # by reason
    left: int
    waited: int  # requests
    waited_p50_seconds: float | None  # of those that were served; None: none was
    waited_p95_seconds: float | None
    degraded: Mapping[str, int]  # by step
    withheld: Mapping[str, int]
    ttft_known: int
    ttft_p50_seconds: float | None
    ttft_p95_seconds: float | None
    ttft_target_seconds: float | None  # of the first token; None: several classes, or none of that name
    in_target: float | None  # share of the requests with a known first token, refused ones counted as missed
    inter_token_p50_seconds: float | None


def recorded_fate(record: AccessRecord, *, names: Mapping[str, str]) -> Fate:
    """Return what the log says of a request. `names`: hash of a tenant -> its name, as far as they are known."""
    outcome = {read_log.REFUSED: REFUSED, read_log.ABANDONED: ABANDONED}.get(record.fate, SERVED)
    first, inter_token = record.first_token_us, None
    if first is not None and record.ended_us is not None and (record.output_tokens or 0) > 1:
        assert record.output_tokens is not None, "as was just asked"
        inter_token = max(record.ended_us - first, 0) / MICROSECONDS / (record.output_tokens - 1)
    return Fate(
        class_name=record.class_ or "",
        tenant=names.get(record.tenant or "", record.tenant or ""),
        outcome=outcome,
        reason=(record.reason or "") if outcome == REFUSED else "",
        waited_seconds=(record.queued_us or 0) / MICROSECONDS,
        steps=record.steps,
        withheld=record.shadow,
        ttft_seconds=None if first is None else first / MICROSECONDS,
        inter_token_seconds=inter_token,
    )


def sums_of(fates: Sequence[Fate], *, target: float | None) -> Sums:
    """Return the sums of some requests, whose first token is promised within `target` seconds."""
    served = [fate for fate in fates if fate.outcome == SERVED]
    waited = [fate.waited_seconds for fate in served]
    first = [fate.ttft_seconds for fate in served if fate.ttft_seconds is not None]
    tokens = [fate.inter_token_seconds for fate in served if fate.inter_token_seconds is not None]
    refused = Counter(fate.reason for fate in fates if fate.outcome == REFUSED)
    in_target = None
    if target is not None and first:
        # of what is known, as much as it stands for is compared with what was refused; a picker does not read the
        # answer of a request that was late before it was sent
        late = sum(fate.ttft_seconds is None and fate.waited_seconds > target for fate in served)
        within = sum(each <= target for each in first) / (len(first) + late) * len(served)
        in_target = within / max(len(served) + sum(refused.values()), 1)
    return Sums(
        requests=len(fates),
        served=len(served),
        refused=dict(refused.most_common()),
        left=sum(fate.outcome == ABANDONED for fate in fates),
        waited=sum(fate.waited_seconds > 0.0 for fate in fates),
        waited_p50_seconds=_percentile(waited, 0.5),
        waited_p95_seconds=_percentile(waited, 0.95),
        degraded=dict(Counter(step for fate in fates for step in dict.fromkeys(fate.steps)).most_common()),
        withheld=dict(Counter(code for fate in fates for code in dict.fromkeys(fate.withheld)).most_common()),
        ttft_known=len(first),
        ttft_p50_seconds=_percentile(first, 0.5),
        ttft_p95_seconds=_percentile(first, 0.95),
        ttft_target_seconds=target,
        in_target=in_target,
        inter_token_p50_seconds=_percentile(tokens, 0.5),
    )


def _percentile(values: Sequence[float], share: float) -> float | None:
    """Return None where there are no values."""
    return percentile(values, share) if values else None


def groups_of(fates: Sequence[Fate]) -> list[tuple[str, str]]:
    """Return (class, tenant) of what is shown: each class, its tenants with the most requests, then all together."""
    found: list[tuple[str, str]] = []
    classes = Counter(fate.class_name for fate in fates)
    for class_name in sorted(classes):
        found.append((class_name, ALL))
        tenants = Counter(fate.tenant for fate in fates if fate.class_name == class_name)
        if len(tenants) > 1:
            found += [(class_name, tenant) for tenant, _ in tenants.most_common(MOST_TENANTS)]
    return [*found, (ALL, ALL)] if len(classes) > 1 else found


def grouped(
    fates: Iterable[Fate], groups: Sequence[tuple[str, str]], *, classes: Mapping[str, PriorityClass]
) -> dict[tuple[str, str], Sums]:
    """Return the sums of each group."""
    members: dict[tuple[str, str], list[Fate]] = {group: [] for group in groups}
    for fate in fates:
        for group in ((fate.class_name, ALL), (fate.class_name, fate.tenant), (ALL, ALL)):
            if group in members:
                members[group].append(fate)
    return {
        group: sums_of(each, target=classes[group[0]].targets.ttft_seconds if group[0] in classes else None)
        for group, each in members.items()
    }
