"""Assigns each endpoint to one pool for indexing, and lists the streams of its pods. Pure.

Redis, where all indexers meet, decides which indexer follows a stream.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.source import EventAddresses, Stream
from kvmesh.documents.pools import Pool, PoolEndpoint

RANKS_A_POD = 128  # data-parallel ranks followed per pod: each has a follower, sockets and slots
_FIRST_KINDS = ("InferencePool",)  # first of all: a Service for the same pods is most often the older way to reach them


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFeed(EventAddresses):
    """Where a stream is published, and its pool and model in the index: with another one it is another feed."""

    pool: str  # "namespace/name"
    model: str  # part of every block key


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One endpoint as its pool declares it."""

    endpoint: PoolEndpoint
    pool: str
    model: str | None  # None if the pod must be asked
    feed: EventAddresses | None  # None if the pod must be asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All endpoints of all pools."""

    members: Mapping[str, Member] = field(default_factory=dict)  # by address
    pools: Mapping[str, Pool] = field(default_factory=dict)
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # address in several pools -> first is indexed


def membership(pools: Iterable[Pool]) -> Membership:
    """Assign each endpoint to one pool: InferencePools first, then by name, so that all indexers agree."""
    ordered = sorted(pools, key=lambda pool: (pool.kind not in _FIRST_KINDS, pool.name))
    members: dict[str, Member] = {}
    shared: dict[str, list[str]] = {}
    for pool in ordered:
        templates = pool.event_sources
        for endpoint in pool.endpoints:
            first = members.get(endpoint.address)
            if first is not None:
                shared.setdefault(endpoint.address, [first.pool]).append(pool.name)
                continue
            members[endpoint.address] = Member(
                endpoint=endpoint,
                pool=pool.name,
                model=pool.model,
                feed=templates.addresses(endpoint) if templates else None,
            )
    return Membership(
        members=members,
        pools={pool.name: pool for pool in ordered},
        shared={address: tuple(names) for address, names in shared.items()},
    )


def is_other_feed(before: Member, after: Member) -> bool:
    """Tell whether the pod must be asked again; a change of its readiness is no reason."""
    ranks = before.endpoint.rank, after.endpoint.rank
    return (before.pool, before.model, before.feed, ranks[0]) != (after.pool, after.model, after.feed, ranks[1])


def own_rank(ranks: Mapping[int, EventAddresses], member: Member) -> Mapping[int, EventAddresses]:
    """Return the streams of this endpoint.

    A pod with one port per data-parallel rank may list all of its ranks on every port; they are matched in order,
    because on a second node they begin at a higher number. If a pod has a single port, all ranks belong to it.
    """
    rank, ordered = member.endpoint.rank, sorted(ranks)
    if rank is None or len(ranks) <= 1:
        return ranks
    if rank not in ranks:
        return {ordered[rank]: ranks[ordered[rank]]} if rank < len(ordered) else {}
    return {rank: ranks[rank]}


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAnswer:
    """A pod's last answer about where it publishes."""

    asked_at: float  # monotonic seconds
    ranks: Mapping[int, EventAddresses]  # empty if it publishes nothing


def known_streams(answers: Mapping[str, PodAnswer]) -> dict[Stream, EventAddresses]:
    """Return the streams that pods announce, and where each is published; `answers` is by endpoint.

    At most RANKS_A_POD streams per pod are followed.
    """
    return {
        Stream(endpoint=endpoint, dp_rank=rank): answer.ranks[rank]
        for endpoint, answer in answers.items()
        for rank in (answer.ranks if len(answer.ranks) <= RANKS_A_POD else sorted(answer.ranks)[:RANKS_A_POD])
    }


def vanished_streams(answers: Mapping[str, PodAnswer], registered_at: Mapping[Stream, float]) -> frozenset[Stream]:
    """Return the registered streams that their pod no longer announces.

    `registered_at` says when we first saw each in the registry, in monotonic seconds: an answer older than that proves
    nothing, because another indexer may have asked the pod after us. A pod that has not answered proves nothing either.
    """
    return frozenset(
        stream
        for stream, seen_at in registered_at.items()
        if (answer := answers.get(stream.endpoint)) and stream.dp_rank not in answer.ranks and answer.asked_at > seen_at
    )
