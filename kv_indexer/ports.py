"""What the use cases need from the outside world; adapters implement these, tests fake them."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from kv_indexer.core.index_changes import IndexChange
from kv_indexer.core.source import Registry, SourceState, Stream, StreamPosition
from kv_indexer.wire.zmq_frames import Frame


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A change is in the index."""

    epoch: int  # of the stream after the change: a clear begins a new one
    left_out: int  # operations that found no free slot


class IndexWriter(Protocol):
    """The shared index, written. Every method raises IndexUnavailableError within a bounded time."""

    async def open_stream(self, stream: Stream) -> StreamPosition:
        """Register the stream if it is new, and return where it stands."""

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """Return where the stream stands; None if the index does not know it."""

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """Return engine hash -> block key for those of the given (hash, group) that the stream holds."""

    async def apply(self, stream: Stream, change: IndexChange) -> Applied | None:
        """Apply the change and advance the stream, or return None and do nothing: it does not follow."""

    async def begin_epoch(
        self, stream: Stream, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """Void what the stream claims, unless its epoch is not the expected one; return where it stands then."""

    async def set_state(
        self, stream: Stream, *, epoch: int, state: SourceState, reason: str = "", degraded: str = ""
    ) -> None:
        """Record the state; nothing happens if the epoch has passed. `degraded` marks the epoch for good."""

    async def drop_stream(self, stream: Stream) -> None:
        """Forget the stream and void what it claims."""

    async def sweep(self, *, fields: int) -> bool:
        """Clean one slice of what is void; tell whether more waits."""

    async def read_registry(self) -> Registry:
        """Return a consistent snapshot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAnswer:
    """One attempt at a replay: all it gave without a hole."""

    frames: tuple[Frame, ...]  # consecutive, the first is what was asked for
    ended: bool  # the publisher said that this is all, and there was no hole
    next_seq: int | None = None  # the first batch behind the hole at which this attempt was cut


class ReplaySource(Protocol):
    """A publisher's replay socket."""

    async def replay(self, start_seq: int) -> ReplayAnswer:
        """Ask once for all batches from `start_seq` on; an unreachable publisher gives an empty answer."""


class LiveEvents(Protocol):
    """A publisher's live socket."""

    async def connect(self) -> None:
        """Connect anew, dropping what an earlier connection still held; raise FeedLostError."""

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """Return what has arrived, at most a few dozen batches; empty on timeout. Raise FeedLostError."""

    def close(self) -> None:
        """Close at once."""


class IndexerTelemetry(Protocol):
    """What the indexer counts."""

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """Count applied batches and their events by type."""

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events, batches and messages that could not be understood, by reason: something is wrong."""

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events that were understood and are not in the index, by reason: most of these are meant to be."""

    def gap(self, stream: Stream) -> None:
        """Count a gap in the live sequence."""

    def replayed(self, stream: Stream, *, batches: int) -> None:
        """Count batches received by replay."""

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        """Show a stream's state."""

    def forget(self, stream: Stream) -> None:
        """Stop showing a stream."""
