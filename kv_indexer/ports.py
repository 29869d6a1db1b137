"""The index as it is written, and the counters, as the indexer's rooms use them.

`RedisIndexWriter` and the in-memory twin implement the index; `PrometheusTelemetry` is in a layer above these rooms.
"""

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet
from typing import Protocol

from kvmesh.blocks.findings import Finding
from kvmesh.blocks.index_changes import Applied, IndexChange
from kvmesh.blocks.source import Claim, Registry, SourceState, Stream, StreamPosition


class IndexWriter(Protocol):
    """The shared index, written. Every method raises IndexUnavailableError within a bounded time.

    Methods that take a claim raise LeaseLostError and change nothing once the claim has passed to another indexer or
    has expired.
    """

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """Return the stream's position; None if the index does not know it."""

    async def find_block_keys(self, stream: Stream, hashes: AbstractSet[tuple[int, int]]) -> Mapping[int, bytes]:
        """Return engine hash -> block key for those of the given (hash, group) that the stream holds."""

    async def find_block_keys_elsewhere(
        self, stream: Stream, hashes: AbstractSet[int]
    ) -> Mapping[Stream, Mapping[int, bytes]]:
        """Return, by other stream, engine hash -> block key for those hashes that it holds in group 0."""

    async def apply(self, claim: Claim, change: IndexChange) -> Applied | None:
        """Apply the change and advance the stream, or return None and do nothing: it does not follow."""

    async def begin_epoch(
        self, claim: Claim, *, expected_epoch: int, last_seq: int, degraded: str
    ) -> StreamPosition | None:
        """Void what the stream claims, unless its epoch is not the expected one; return its position then."""

    async def set_state(self, claim: Claim, *, epoch: int, state: SourceState, reason: str = "") -> None:
        """Record the state; nothing happens if the epoch has passed."""

    async def set_started_at(self, claim: Claim, *, started_at: float) -> None:
        """Record when the publisher's process started, in its own unix seconds."""

    async def set_namespace(self, claim: Claim, *, namespace: str) -> None:
        """Record what the stream's block keys begin with; see `StreamPosition.namespace`."""

    async def sweep(self, *, fields: int) -> bool:
        """Clean one slice of what is void; tell whether more waits."""

    async def read_registry(self) -> Registry:
        """Return a consistent snapshot."""


class IndexerTelemetry(Protocol):
    """What the indexer counts."""

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """Count applied batches and their events by type."""

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events, batches and messages that could not be understood, by reason: something is wrong."""

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events that were understood and are not in the index, by reason: most of these are meant to be."""

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        """Show how many stores wait for their parent block; called when that has changed."""

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
        """Show the current findings of all watched endpoints; count those that have just appeared."""
