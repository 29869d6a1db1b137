"""What the use cases need from the outside world; adapters implement these, tests fake them."""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from kv_indexer.events.sequence import Frame, ReplayAnswer
from kvmesh.blocks.findings import Finding
from kvmesh.blocks.index_changes import Applied, IndexChange
from kvmesh.blocks.source import Claim, EventAddresses, Registry, SourceState, Stream, StreamPosition
from kvmesh.pods.pod_report import PodReport


class IndexWriter(Protocol):
    """The shared index, written. Every method raises IndexUnavailableError within a bounded time.

    Methods that take a claim raise LeaseLostError and change nothing once the claim has passed to another indexer or
    has expired.
    """

    async def read_position(self, stream: Stream) -> StreamPosition | None:
        """Return where the stream stands; None if the index does not know it."""

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
        """Void what the stream claims, unless its epoch is not the expected one; return where it stands then."""

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


class LeaseBook(Protocol):
    """Which indexer follows which stream; kept in Redis, judged by its clock."""

    async def tick(self, candidates: AbstractSet[Stream]) -> Mapping[Stream, Claim]:
        """Say that this indexer lives, renew what it holds, take what is free; return all it holds now.

        `candidates` are the streams that it could follow. A stream that the index does not know is registered when it
        is taken. Raise IndexUnavailableError.
        """

    async def drop(self, claim: Claim) -> None:
        """Forget a stream that its pod no longer has, and void what it claims.

        Raise IndexUnavailableError, or LeaseLostError if the stream is another's by now.
        """

    async def release(self) -> None:
        """Give everything back at once: this indexer ends. Raise IndexUnavailableError."""


class EventDirectory(Protocol):
    """Where pods publish their events."""

    async def find(self, endpoint: str) -> Mapping[int, EventAddresses]:
        """Return data-parallel rank -> addresses. Raise FeedLostError, or NoEventSourceError if there are none."""

    async def served_models(self, endpoint: str) -> AbstractSet[str]:
        """Return the model names that the pod answers to. Raise FeedLostError."""


class PodDirectory(EventDirectory, Protocol):
    """What pods say of themselves, asked one by one."""

    async def first_model(self, endpoint: str) -> str | None:
        """Return the first base model that the pod serves, None if it names none. Raise FeedLostError."""


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

    def interrupt(self) -> None:
        """Have a `receive` that waits return at once, with what has arrived or with nothing."""

    def check(self) -> None:
        """Raise FeedLostError if the connection has gone since `connect`: who is there now may be another process."""

    def close(self) -> None:
        """Close at once."""


class PublisherIdentity(Protocol):
    """What tells one publisher process from the next on the same address."""

    async def started_at(self) -> float | None:
        """Ask when its process started, in its own unix seconds; None within a bounded time if it does not say."""


class IndexerTelemetry(Protocol):
    """What the indexer counts."""

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        """Count applied batches and their events by type."""

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events, batches and messages that could not be understood, by reason: something is wrong."""

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        """Count events that were understood and are not in the index, by reason: most of these are meant to be."""

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        """Show how many stores wait for their parent block; told when that has changed."""

    def gap(self, stream: Stream) -> None:
        """Count a gap in the live sequence."""

    def replayed(self, stream: Stream, *, batches: int) -> None:
        """Count batches received by replay."""

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        """Show a stream's state."""

    def forget(self, stream: Stream) -> None:
        """Stop showing a stream."""


class PodReports(Protocol):
    """What the pods say of themselves."""

    def latest(self, endpoint: str) -> PodReport | None:
        """Return the last report, however old; None if there was none."""


class FindingShelf(Protocol):
    """Where all indexers keep what they have found, for the command line to read."""

    async def share(self, standing: Collection[Finding], *, healed: Collection[Finding]) -> tuple[Finding, ...]:
        """Confirm what stands, take away what has healed; return what any indexer stands by.

        What is not confirmed for a while is void. Raise IndexUnavailableError.
        """


class FindingDisplay(Protocol):
    """Where this indexer shows its own findings."""

    def findings(
        self, standing: Collection[Finding], *, appeared: Collection[Finding], endpoints: Collection[str]
    ) -> None:
        """Show what stands, of all the endpoints that are watched; count what has just appeared."""
