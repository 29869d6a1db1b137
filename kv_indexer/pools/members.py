"""Which endpoints are indexed for which pool, each once; and which streams their pods have. Pure.

Which indexer follows a stream is decided in Redis, where all indexers meet, and not here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.source import EventAddresses, Stream
from kvmesh.documents.pools import Pool, PoolEndpoint

RANKS_A_POD = 128  # data-parallel ranks that are followed of one: each has a follower, sockets and slots of its own
_FIRST_KINDS = ("InferencePool",)  # before any other: a Service beside it is most often the older way to the same pods


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolFeed(EventAddresses):
    """Where a stream is published, and into whose part of the index it goes: another pool or model is another feed."""

    pool: str  # "namespace/name"
    model: str  # part of every block key


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One endpoint as its pool has it."""

    endpoint: PoolEndpoint
    pool: str
    model: str | None  # None: the pod is asked
    feed: EventAddresses | None  # None: the pod is asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """All endpoints of all pools."""

    members: Mapping[str, Member] = field(default_factory=dict)  # by address
    pools: Mapping[str, Pool] = field(default_factory=dict)
    shared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # address in several pools -> first is indexed


def membership(pools: Iterable[Pool]) -> Membership:
    """Give each endpoint to one pool: an InferencePool before others, then by name, so that all indexers agree."""
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
    """Tell whether the pod must be asked anew; a change of its readiness alone is no reason."""
    ranks = before.endpoint.rank, after.endpoint.rank
    return (before.pool, before.model, before.feed, ranks[0]) != (after.pool, after.model, after.feed, ranks[1])


def own_rank(ranks: Mapping[int, EventAddresses], member: Member) -> Mapping[int, EventAddresses]:
    """Return those streams that belong to this endpoint.

    A pod with a port for each data-parallel rank may name all of its ranks on every port; they count in order, because
    on a second node they begin at a higher number. All ranks of a pod with a single port are that port's.
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
    ranks: Mapping[int, EventAddresses]  # empty: it publishes nothing


def known_streams(answers: Mapping[str, PodAnswer]) -> dict[Stream, EventAddresses]:
    """Return the streams that pods say they have, and where each is published; `answers` is by endpoint.

    Of one pod, the first RANKS_A_POD are followed.
    """
    return {
        Stream(endpoint=endpoint, dp_rank=rank): answer.ranks[rank]
        for endpoint, answer in answers.items()
        for rank in (answer.ranks if len(answer.ranks) <= RANKS_A_POD else sorted(answer.ranks)[:RANKS_A_POD])
    }


def vanished_streams(answers: Mapping[str, PodAnswer], registered_at: Mapping[Stream, float]) -> frozenset[Stream]:
    """Return the registered streams that their pod does not have.

    `registered_at` says when we first saw each in the registry, in monotonic seconds: an answer older than that proves
    nothing, because another indexer may have asked the pod after us. A pod that has not answered proves nothing either.
    """
    return frozenset(
        stream
        for stream, seen_at in registered_at.items()
        if (answer := answers.get(stream.endpoint)) and stream.dp_rank not in answer.ranks and answer.asked_at > seen_at
    )
