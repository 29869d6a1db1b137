"""The claimants of blocks: streams, sources, and their records in the registry. Values only.

A *stream* is one pod's event sequence: (endpoint, data-parallel rank). A *source* claims blocks: it is a stream's tier
within one epoch, with its own small integer slot. A new epoch takes new slots, so that the claims of the old one are
invisible at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from kvmesh.blocks.cache_groups import CacheGroup, is_of_group
from kvmesh.blocks.findings import Finding


class SourceState(StrEnum):
    """How far a stream's sources can be trusted."""

    REPLAYING = "replaying"  # catching up; its claims are stale
    LIVE = "live"  # exact
    DEGRADED = "degraded"  # correct but incomplete; the reason names the gap
    UNCONFIRMED = "unconfirmed"  # silent, and lost events cannot be replayed: its blocks may be gone
    LOST = "lost"  # the pod's events cannot be reached, or no indexer follows them


COUNTED = frozenset({SourceState.LIVE, SourceState.DEGRADED})  # lookups use only blocks of such streams
NOT_FOLLOWED = "not-followed"  # the reason of a stream without a living indexer
# an endpoint with several streams is only as good as the worst of them
WORST_FIRST = (
    SourceState.LOST,
    SourceState.UNCONFIRMED,
    SourceState.REPLAYING,
    SourceState.DEGRADED,
    SourceState.LIVE,
)


# a struct, not a dataclass: thousands are hashed and compared often, in C
class Stream(msgspec.Struct, frozen=True, kw_only=True, order=True, cache_hash=True):
    """One event sequence."""

    endpoint: str  # HOST:PORT of the pod's API
    dp_rank: int = 0

    @property
    def name(self) -> str:
        """Return the name used in Redis and logs: `HOST:PORT#RANK`."""
        return f"{self.endpoint}#{self.dp_rank}"


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """One indexer's right to write a stream; a later claim on it has a greater fence and voids this one."""

    stream: Stream
    fence: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EventAddresses:
    """The ZMQ addresses at which one stream is published."""

    events: str
    replay: str | None = None
    announced: bool = False  # by the pod itself, not by the mesh's configuration


def reachable(events: str, replay: str | None, *, host: str) -> EventAddresses:
    """Return a pod's addresses, with wildcards replaced by the `host` at which we reach the pod."""

    def at_host(address: str) -> str:
        for wildcard in ("tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:", "tcp://:::"):
            if address.startswith(wildcard):
                return f"tcp://{host}:{address[len(wildcard) :]}"
        return address

    return EventAddresses(events=at_host(events), replay=at_host(replay) if replay else None)


class StreamPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Up to where a stream is applied; stored in Redis with the blocks, in the same atomic step."""

    epoch: int
    last_seq: int = -1  # -1 if nothing is applied yet
    part: int = 0  # applied parts of the next batch, 0 if none
    last_ts: float = 0.0  # the publisher's unix seconds
    last_crc: int | None = None  # crc32 of the payload of `last_seq`; None if never seen
    degraded: str = ""  # why this epoch is not exact, or ""
    block_sizes: Mapping[str, int] = {}  # tier -> tokens per block
    groups: Mapping[int, CacheGroup] = {}  # KV cache groups, as described by stores so far
    started_at: float | None = None  # the publisher's process, in unix seconds by its own clock; None if unknown
    state: SourceState | None = None  # as recorded; None if the record is unreadable
    reason: str = ""  # of the state
    namespace: str = ""  # prefix of its block keys in hex; "" if the stream belongs to no pool


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamRecord:
    """A stream's record in the registry."""

    endpoint: str
    dp_rank: int
    epoch: int
    last_seq: int
    last_ts: float
    state: SourceState
    reason: str
    owner: str = ""  # the indexer that follows it, or ""
    fence: int = 0
    applied_at: float = 0.0  # Redis' unix seconds of the last change; 0.0 before the first
    events: int = 0  # applied in total

    @property
    def stream(self) -> Stream:
        """Return the stream of this record."""
        return Stream(endpoint=self.endpoint, dp_rank=self.dp_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """A source that lookups may use; slots that wait for their sweep are left out."""

    slot: int
    endpoint: str
    dp_rank: int
    tier: str
    epoch: int
    block_size: int
    blocks: int

    @property
    def stream(self) -> Stream:
        """Return the stream that holds the blocks."""
        return Stream(endpoint=self.endpoint, dp_rank=self.dp_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStatus:
    """One line of `/sources`: a source, or a stream without any claim yet (`tier` and `slot` None)."""

    endpoint: str
    dp_rank: int
    tier: str | None
    slot: int | None
    epoch: int
    state: SourceState
    reason: str
    last_seq: int
    last_batch_at: float  # the publisher's unix seconds; 0.0 before the first batch
    block_size: int | None
    cached_blocks: int
    owner: str = ""  # the indexer that follows the stream
    applied_at: float = 0.0  # Redis' unix seconds of the last change
    events: int = 0  # of the stream, applied in total

    @property
    def stream(self) -> Stream:
        """Return the stream of this source."""
        return Stream(endpoint=self.endpoint, dp_rank=self.dp_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointCache:
    """The index's knowledge of one endpoint, over all of its ranks and its tiers of full attention."""

    cached_blocks: int
    block_size: int | None  # tokens; None before the first block. The smallest, if tiers differ
    state: SourceState  # the worst of its streams
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexStatus:
    """The state of the index, as pages show it."""

    sources: tuple[SourceStatus, ...]
    indexer_alive: bool  # an indexer has written its heartbeat within the last seconds
    unreadable: tuple[str, ...]  # ignored records, each with the reason
    findings: tuple[Finding, ...] = ()  # faults although nothing has failed; only indexers know them


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """A consistent snapshot of all streams and sources."""

    version: bytes  # equal versions mean equal slots
    streams: tuple[StreamRecord, ...] = ()
    slots: tuple[SlotRecord, ...] = ()  # each has its stream among `streams`
    indexer_alive: bool = False
    unreadable: tuple[str, ...] = ()  # records left out above, each with the reason

    def status(self) -> IndexStatus:
        """Return the state of the index for pages."""
        return IndexStatus(sources=tuple(self.sources()), indexer_alive=self.indexer_alive, unreadable=self.unreadable)

    def sources(self) -> list[SourceStatus]:
        """Return one line per source, ordered by endpoint, rank and tier."""
        slots = self.slots_by_stream()
        streams = sorted(self.streams, key=lambda record: (record.endpoint, record.dp_rank))
        return [
            _line(stream, slot)
            for stream in streams
            for slot in sorted(slots.get(stream.stream, ()), key=lambda slot: slot.tier) or (None,)
        ]

    def slots_by_stream(self) -> Mapping[Stream, Sequence[SlotRecord]]:
        """Return the sources of each stream that has any."""
        slots: dict[Stream, list[SlotRecord]] = {}
        for slot in self.slots:
            slots.setdefault(slot.stream, []).append(slot)
        return slots

    def ranked(self) -> Mapping[str, Sequence[str]]:
        """Return the streams' names by endpoint, of endpoints with several ranks."""
        names: dict[str, list[str]] = {}
        for record in self.streams:
            names.setdefault(record.endpoint, []).append(record.stream.name)
        return {endpoint: ranks for endpoint, ranks in names.items() if len(ranks) > 1}

    def endpoints(self) -> dict[str, EndpointCache]:
        """Sum up the sources by endpoint, of pods with several ranks also by rank."""
        lines: dict[str, list[SourceStatus]] = {}
        ranked = self.ranked()
        for line in self.sources():
            lines.setdefault(line.endpoint, []).append(line)
            if line.endpoint in ranked:
                lines.setdefault(line.stream.name, []).append(line)
        found = {}
        for endpoint, of_endpoint in lines.items():
            worst = min(of_endpoint, key=lambda line: WORST_FIRST.index(line.state))
            # other groups hold the same prompts: they count only if there is no full attention to tell how much
            tiers = [line for line in of_endpoint if line.tier is not None]
            counted = [line for line in tiers if not is_of_group(line.tier)] or tiers
            found[endpoint] = EndpointCache(
                cached_blocks=sum(line.cached_blocks for line in counted),
                block_size=min((line.block_size for line in counted if line.block_size), default=None),
                state=worst.state,
                reason=worst.reason,
            )
        return found


def _line(stream: StreamRecord, slot: SlotRecord | None) -> SourceStatus:
    return SourceStatus(
        endpoint=stream.endpoint,
        dp_rank=stream.dp_rank,
        tier=slot.tier if slot else None,
        slot=slot.slot if slot else None,
        epoch=stream.epoch,
        state=stream.state,
        reason=stream.reason,
        last_seq=stream.last_seq,
        last_batch_at=stream.last_ts,
        block_size=slot.block_size if slot else None,
        cached_blocks=slot.blocks if slot else 0,
        owner=stream.owner,
        applied_at=stream.applied_at,
        events=stream.events,
    )
