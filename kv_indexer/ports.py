"""The interfaces through which the indexer's rooms write the index and count.

`RedisIndexWriter` and the tests' in-memory twin implement the index; `PrometheusTelemetry` is above these rooms.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from kvmesh.blocks.findings import Finding
from kvmesh.blocks.index_changes import Applied, IndexChange
from kvmesh.blocks.source import Claim, Registry, SourceState, Stream, StreamPosition


class IndexWriter(Protocol):
    """Writes the shared index. Every method raises IndexUnavailableError within a bounded time.

    Methods that take a claim raise LeaseLostError and change nothing once the claim has passed to another indexer or
    has expired.
    """

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """Return the stream's position, or None if the index does not know the stream."""

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """Return engine hash -> block key, for the given (hash, group) pairs that the stream holds."""

    async def find_block_keys_elsewhere(
        self, stream: Stream, hashes: AbstractSet[int]
    ) -> Mapping[Stream, Mapping[int, bytes]]:
        """Return, for each other stream, engine hash -> block key for the given hashes that it holds in group 0."""

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        """Apply the change and advance the stream; return None if it does not follow the position."""

    async def begin_epoch(
        self, claim: Claim, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """Void all claims of the stream by a new epoch, if `expected_epoch` is current; return the position."""

    async def set_state(self, claim: Claim, *, epoch: int, state: SourceState, reason: str = "") -> None:
        """Record the state, unless the stream has a newer epoch."""

    async def set_started_at(self, claim: Claim, *, started_at: float) -> None:
        """Record when the publisher's process started, in unix seconds by its own clock."""

    async def set_namespace(self, claim: Claim, *, namespace: str) -> None:
        """Record the prefix of the stream's block keys; see `StreamPosition.namespace`."""

    async def sweep(self, *, fields: int) -> bool:
        """Clean one slice of the voided data; tell whether more is left."""

    async def read_registry(self) -> Registry:
        """Return a consistent snapshot."""


class IndexerTelemetry(Protocol):
    """The indexer's counters."""

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """Count applied batches and their events by type."""

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count unreadable events, batches and messages, by reason: each is a fault."""

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events that were understood but not indexed, by reason: most are left out on purpose."""

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        """Show how many stores wait for their parent block; called when the number has changed."""

    def gap(self, stream: Stream) -> None:
        """Count a gap in the live sequence."""

    def replayed(self, stream: Stream, *, batches: int) -> None:
        """Count batches received by replay."""

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        """Show a stream's state."""

    def forget(self, stream: Stream) -> None:
        """Stop showing a stream."""

    def findings(
        self, standing: Collection[Finding], *, appeared: Collection[Finding], endpoints: Collection[str]
    ) -> None:
        """Show the current findings of all watched endpoints; count the new ones."""
