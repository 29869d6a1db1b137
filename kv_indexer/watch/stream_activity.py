"""What has happened on one stream lately, and the facts that the rules look at. Pure: time is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.findings import FindingReason
from kvmesh.blocks.source import SourceState
from kvmesh.pods.pod_report import EngineCounters, PodReport

MAX_REASONS = 32  # remembered by name; more come from no version that we know
OTHER = "other"
RECENT_SECONDS = 300.0  # "the last minutes"
ASSUMED_BLOCK_SIZE = 128  # of a pod that does not say; few have larger ones
NAMED_REASONS = 3  # in one message
# in other states the index is not expected to know
JUDGED = (SourceState.LIVE, SourceState.DEGRADED, SourceState.UNCONFIRMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """How often something happened without a long pause."""

    count: int
    began_at: float  # monotonic seconds
    last_at: float


class Spells:
    """By reason: how often since it began, and when last. A pause of `pause_seconds` ends a spell."""

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._spells: dict[str, Spell] = {}

    def add(self, reason: str, count: int, *, now: float) -> None:
        """Count something that has just happened."""
        if reason not in self._spells and len(self._spells) >= MAX_REASONS:
            reason = OTHER
        spell = self._spells.get(reason)
        if spell is None or now - spell.last_at > self._pause_seconds:
            spell = Spell(count=0, began_at=now, last_at=now)
        self._spells[reason] = Spell(count=spell.count + count, began_at=spell.began_at, last_at=now)

    def lasting(self, *, now: float) -> Mapping[str, Spell]:
        """Return the spells that have not ended, most frequent first."""
        if not self._spells:
            return {}  # nearly always, and of thousands of streams
        still = [item for item in self._spells.items() if now - item[1].last_at <= self._pause_seconds]
        return dict(sorted(still, key=lambda item: (-item[1].count, item[0])))


@dataclass(slots=True, kw_only=True)
class StreamActivity:
    """One stream since its follower began. All times in monotonic seconds."""

    state: SourceState | None = None
    state_since: float = 0.0
    batches: int = 0  # live or replayed, readable or not
    last_batch_at: float | None = None
    undecodable: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))
    not_indexed: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))

    def received(self, batches: int, *, now: float) -> None:
        """Note that batches came."""
        self.batches += batches
        self.last_batch_at = now

    def became(self, state: SourceState, *, now: float) -> None:
        """Note a state; the same state again does not restart `state_since`."""
        if state is not self.state:
            self.state_since = now
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingPolicy:
    """When a rule is sure."""

    silent_seconds: float = 30.0  # since events were due, or blocks should have been indexed
    stuck_seconds: float = 30.0  # replaying without a batch
    settle_seconds: float = 2.0  # a pod's counters lag behind its events
    least_blocks: int = 2  # due, before their events are missed
    large_block_tokens: int = 128  # hybrid models; others have 16 to 64
    large_block_requests: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """One look at one stream, or at a pod that has none."""

    endpoint: str
    dp_rank: int | None  # None: the pod publishes no stream that we know of
    activity: StreamActivity
    report: PodReport | None = None
    counters: EngineCounters | None = None  # of the engine behind the stream
    blocks: int = 0  # that the index holds of it, over all tiers
    gpu_block_size: int | None = None  # as the index has it
    ranks_left_out: int = 0  # of a pod: beyond those that are followed of one pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What a rule has found."""

    reason: FindingReason
    message: str
    began_at: float  # monotonic seconds


def is_judged(facts: StreamFacts) -> bool:
    """Tell whether the index is expected to know what the pod holds."""
    return facts.dp_rank is None or facts.activity.state in JUDGED


def due_size(facts: StreamFacts, report: PodReport) -> int:
    """Return how many tokens make a block whose event is due."""
    return max(report.block_size or 0, facts.gpu_block_size or 0) or ASSUMED_BLOCK_SIZE


def name_spells(spells: Mapping[str, Spell]) -> str:
    """Name the most frequent reasons."""
    named = [f"{reason} ×{spell.count}" for reason, spell in list(spells.items())[:NAMED_REASONS]]
    return ", ".join([*named, "…"] if len(spells) > NAMED_REASONS else named)
