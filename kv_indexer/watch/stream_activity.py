"""The recent activity of one stream, and the facts that the rules judge. Pure: time is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.findings import FindingReason
from kvmesh.blocks.source import SourceState
from kvmesh.pods.pod_report import EngineCounters, PodReport

MAX_REASONS = 32  # remembered by name; no known version has more
OTHER = "other"
RECENT_SECONDS = 300.0  # the meaning of "the last minutes"
ASSUMED_BLOCK_SIZE = 128  # for a pod that does not report it; few have larger blocks
NAMED_REASONS = 3  # in one message
# in other states the index need not be complete
JUDGED = (SourceState.LIVE, SourceState.DEGRADED, SourceState.UNCONFIRMED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spell:
    """How often something happened without a long pause."""

    count: int
    began_at: float  # monotonic seconds
    last_at: float


class Spells:
    """One spell per reason: count, start and last time. A pause of `pause_seconds` ends a spell."""

    def __init__(self, *, pause_seconds: float) -> None:
        self._pause_seconds = pause_seconds
        self._spells: dict[str, Spell] = {}

    def add(self, reason: str, count: int, *, now: float) -> None:
        """Count an occurrence."""
        if reason not in self._spells and len(self._spells) >= MAX_REASONS:
            reason = OTHER
        spell = self._spells.get(reason)
        if spell is None or now - spell.last_at > self._pause_seconds:
            spell = Spell(count=0, began_at=now, last_at=now)
        self._spells[reason] = Spell(count=spell.count + count, began_at=spell.began_at, last_at=now)

    def lasting(self, *, now: float) -> Mapping[str, Spell]:
        """Return the current spells, most frequent first."""
        if not self._spells:
            return {}  # the usual case, for thousands of streams
        still = [item for item in self._spells.items() if now - item[1].last_at <= self._pause_seconds]
        return dict(sorted(still, key=lambda item: (-item[1].count, item[0])))


@dataclass(slots=True, kw_only=True)
class StreamActivity:
    """One stream's activity since its follower began. All times in monotonic seconds."""

    state: SourceState | None = None
    state_since: float = 0.0
    batches: int = 0  # live or replayed, readable or not
    last_batch_at: float | None = None
    undecodable: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))
    not_indexed: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))

    def received(self, batches: int, *, now: float) -> None:
        """Note received batches."""
        self.batches += batches
        self.last_batch_at = now

    def became(self, state: SourceState, *, now: float) -> None:
        """Note a state; the same state again does not restart `state_since`."""
        if state is not self.state:
            self.state_since = now
        self.state = state


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingPolicy:
    """Thresholds at which a rule is sure."""

    silent_seconds: float = 30.0  # since events were due, or blocks should have been indexed
    stuck_seconds: float = 30.0  # replaying without a batch
    settle_seconds: float = 2.0  # a pod's counters lag behind its events
    least_blocks: int = 2  # due before their events are missed
    large_block_tokens: int = 128  # hybrid models; others have 16 to 64
    large_block_requests: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFacts:
    """The facts about one stream, or about a pod without one, at one time."""

    endpoint: str
    dp_rank: int | None  # None if the pod publishes no known stream
    activity: StreamActivity
    report: PodReport | None = None
    counters: EngineCounters | None = None  # of the engine behind the stream
    blocks: int = 0  # that the index holds of the stream, in all tiers
    gpu_block_size: int | None = None  # as indexed
    ranks_left_out: int = 0  # ranks of a pod above the limit per pod


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The result of a rule."""

    reason: FindingReason
    message: str
    began_at: float  # monotonic seconds


def is_judged(facts: StreamFacts) -> bool:
    """Tell whether the index is expected to hold the pod's blocks."""
    return facts.dp_rank is None or facts.activity.state in JUDGED


def due_size(facts: StreamFacts, report: PodReport) -> int:
    """Return the tokens of a block whose event is due."""
    return max(report.block_size or 0, facts.gpu_block_size or 0) or ASSUMED_BLOCK_SIZE


def name_spells(spells: Mapping[str, Spell]) -> str:
    """Name the most frequent reasons."""
    named = [f"{reason} ×{spell.count}" for reason, spell in list(spells.items())[:NAMED_REASONS]]
    return ", ".join([*named, "…"] if len(spells) > NAMED_REASONS else named)
