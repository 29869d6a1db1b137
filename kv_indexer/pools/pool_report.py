"""How the pools stand in the index, for the page /pools and for metrics: values, and what puts them together."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kv_indexer.pools.members import Membership, PodAnswer, PoolFeed
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry, SlotRecord, SourceState, Stream
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import PoolEndpoint

NOT_FOLLOWED = "not-followed"  # the state of a stream that no indexer follows, as far as the registry tells


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamStanding:
    """One stream of an endpoint."""

    dp_rank: int
    state: str  # a SourceState, or NOT_FOLLOWED
    reason: str
    followed_here: bool
    blocks: Mapping[str, int] = field(default_factory=dict)  # by tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStanding:
    """One endpoint of a pool."""

    address: str
    pod: str
    ready: bool
    terminating: bool
    indexed_for: str  # the pool that its blocks belong to: another one, where several have the same endpoint
    model: str | None  # as its streams are indexed; None: not known yet, or it has none
    streams: tuple[StreamStanding, ...] = ()
    findings: tuple[str, ...] = ()  # reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStanding:
    """One pool."""

    name: str
    kind: str
    model: str | None  # as declared; None: as its pods say
    models: tuple[str, ...]  # as its endpoints are indexed; more than one is most often a mistake
    endpoints: tuple[EndpointStanding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsReport:
    """All pools, by name."""

    pools: tuple[PoolStanding, ...] = ()
    conflicts: int = 0  # endpoints in several pools
    problems: tuple[DocumentProblem, ...] = ()
    synced: bool = True  # the documents have been read once


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """What this indexer knows beside the pools."""

    answers: Mapping[str, PodAnswer]
    states: Mapping[Stream, tuple[SourceState, str]]
    held: Collection[Stream]
    registry: Registry
    findings: Collection[Finding]


def pools_report(known: Membership, facts: IndexFacts) -> PoolsReport:
    """Put together how each pool stands."""
    slots: dict[Stream, list[SlotRecord]] = {}
    for slot in facts.registry.slots:
        slots.setdefault(Stream(endpoint=slot.endpoint, dp_rank=slot.dp_rank), []).append(slot)
    told = {Stream(endpoint=each.endpoint, dp_rank=each.dp_rank): each for each in facts.registry.streams}
    reasons: dict[str, list[str]] = {}
    for finding in facts.findings:
        reasons.setdefault(finding.endpoint, []).append(finding.reason)

    def stream(each: Stream) -> StreamStanding:
        record = told.get(each)
        state, reason = facts.states.get(each, (None, ""))
        if state is None and record is not None and record.owner:
            state, reason = record.state, record.reason
        blocks: dict[str, int] = {}
        for slot in slots.get(each, ()):
            blocks[slot.tier] = blocks.get(slot.tier, 0) + slot.blocks
        return StreamStanding(
            dp_rank=each.dp_rank,
            state=state.value if state else NOT_FOLLOWED,
            reason=reason,
            followed_here=each in facts.held,
            blocks=blocks,
        )

    def endpoint(each: PoolEndpoint, pool: str) -> EndpointStanding:
        indexed_for = known.members[each.address].pool
        answer = facts.answers.get(each.address) if indexed_for == pool else None
        ranks = answer.ranks if answer else {}
        feed = next(iter(ranks.values()), None)
        return EndpointStanding(
            address=each.address,
            pod=each.pod,
            ready=each.ready,
            terminating=each.terminating,
            indexed_for=indexed_for,
            model=feed.model if isinstance(feed, PoolFeed) else None,
            streams=tuple(stream(Stream(endpoint=each.address, dp_rank=rank)) for rank in sorted(ranks)),
            findings=tuple(reasons.get(each.address, ())) if indexed_for == pool else (),
        )

    return PoolsReport(
        pools=tuple(_pool(known, name, endpoint) for name in sorted(known.pools)),
        conflicts=len(known.shared),
    )


def _pool(known: Membership, name: str, endpoint: Callable[[PoolEndpoint, str], EndpointStanding]) -> PoolStanding:
    pool = known.pools[name]
    endpoints = tuple(endpoint(each, name) for each in pool.endpoints)
    return PoolStanding(name=name, kind=pool.kind, model=pool.model, models=served(endpoints), endpoints=endpoints)


def served(endpoints: Iterable[EndpointStanding]) -> tuple[str, ...]:
    """Return the models that these endpoints are indexed as."""
    return tuple(sorted({each.model for each in endpoints if each.model}))
