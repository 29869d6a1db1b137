"""What has happened on one stream lately, as the telemetry hears it; `watch_pods` looks at it. Time is an argument."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvmesh.blocks.source import SourceState

MAX_REASONS = 32  # remembered by name; more come from no version that we know
OTHER = "other"


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
        return dict(sorted(self._still(now), key=lambda item: (-item[1].count, item[0])))

    def _still(self, now: float) -> Iterator[tuple[str, Spell]]:
        return ((reason, spell) for reason, spell in self._spells.items() if now - spell.last_at <= self._pause_seconds)


RECENT_SECONDS = 300.0  # "the last minutes"


@dataclass(slots=True, kw_only=True)
class StreamActivity:
    """One stream since its follower began. All times in monotonic seconds."""

    state: SourceState | None = None
    state_reason: str = ""
    state_since: float = 0.0
    batches: int = 0  # live or replayed, readable or not
    last_batch_at: float | None = None
    undecodable: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))
    not_indexed: Spells = field(default_factory=lambda: Spells(pause_seconds=RECENT_SECONDS))

    def received(self, batches: int, *, now: float) -> None:
        """Note that batches came."""
        self.batches += batches
        self.last_batch_at = now

    def became(self, state: SourceState, reason: str, *, now: float) -> None:
        """Note a state; one that is told again goes on."""
        if state is not self.state:
            self.state_since = now
        self.state, self.state_reason = state, reason
