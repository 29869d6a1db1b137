"""The state of the pools in the index, for the page /pools and for metrics. Pure."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from kv_indexer.pools.members import Membership, PodAnswer, PoolFeed
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.source import Registry, SourceState, Stream
from kvmesh.documents.documents import DocumentProblem
from kvmesh.documents.pools import Pool, PoolEndpoint

NOT_FOLLOWED = "not-followed"  # the state of a stream without an owner in the registry


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamReport:
    """One stream of an endpoint."""

    dp_rank: int
    state: str  # a SourceState, or NOT_FOLLOWED
    reason: str
    followed_here: bool
    blocks: Mapping[str, int] = field(default_factory=dict)  # by tier


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointReport:
    """One endpoint of a pool."""

    address: str
    pod: str
    ready: bool
    terminating: bool
    indexed_for: str  # the pool that its blocks belong to; another pool if several have this endpoint
    model: str | None  # as its streams are indexed; None if unknown or if it has none
    streams: tuple[StreamReport, ...] = ()
    findings: tuple[str, ...] = ()  # reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolReport:
    """One pool."""

    name: str
    kind: str
    model: str | None  # as declared; None if the pods decide
    models: tuple[str, ...]  # as its endpoints are indexed; more than one is usually a mistake
    endpoints: tuple[EndpointReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolsReport:
    """All pools, by name."""

    pools: tuple[PoolReport, ...] = ()
    conflicts: int = 0  # endpoints in several pools
    problems: tuple[DocumentProblem, ...] = ()
    synced: bool = True  # the documents have been read once


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFacts:
    """This indexer's knowledge apart from the pools."""

    answers: Mapping[str, PodAnswer]
    states: Mapping[Stream, tuple[SourceState, str]]
    held: Collection[Stream]
    registry: Registry
    findings: Collection[Finding]


def pools_report(known: Membership, facts: IndexFacts) -> PoolsReport:
    """Assemble the state of each pool."""
    slots = facts.registry.slots_by_stream()
    records = {record.stream: record for record in facts.registry.streams}
    reasons: dict[str, list[str]] = {}
    for finding in facts.findings:
        reasons.setdefault(finding.endpoint, []).append(finding.reason)

    def stream_report(stream: Stream) -> StreamReport:
        record = records.get(stream)
        state, reason = facts.states.get(stream, (None, ""))
        if state is None and record is not None and record.owner:
            state, reason = record.state, record.reason
        blocks: dict[str, int] = {}
        for slot in slots.get(stream, ()):
            blocks[slot.tier] = blocks.get(slot.tier, 0) + slot.blocks
        return StreamReport(
            dp_rank=stream.dp_rank,
            state=state.value if state else NOT_FOLLOWED,
            reason=reason,
            followed_here=stream in facts.held,
            blocks=blocks,
        )

    def endpoint_report(endpoint: PoolEndpoint, pool: str) -> EndpointReport:
        indexed_for = known.members[endpoint.address].pool
        answer = facts.answers.get(endpoint.address) if indexed_for == pool else None
        ranks = answer.ranks if answer else {}
        feed = next(iter(ranks.values()), None)
        return EndpointReport(
            address=endpoint.address,
            pod=endpoint.pod,
            ready=endpoint.ready,
            terminating=endpoint.terminating,
            indexed_for=indexed_for,
            model=feed.model if isinstance(feed, PoolFeed) else None,
            streams=tuple(stream_report(Stream(endpoint=endpoint.address, dp_rank=rank)) for rank in sorted(ranks)),
            findings=tuple(reasons.get(endpoint.address, ())) if indexed_for == pool else (),
        )

    def pool_report(pool: Pool) -> PoolReport:
        endpoints = tuple(endpoint_report(each, pool.name) for each in pool.endpoints)
        return PoolReport(
            name=pool.name, kind=pool.kind, model=pool.model, models=served(endpoints), endpoints=endpoints
        )

    return PoolsReport(
        pools=tuple(pool_report(known.pools[name]) for name in sorted(known.pools)), conflicts=len(known.shared)
    )


def served(endpoints: Iterable[EndpointReport]) -> tuple[str, ...]:
    """Return the models as which these endpoints are indexed."""
    return tuple(sorted({each.model for each in endpoints if each.model}))
