"""Findings, which are faults although nothing has failed, and a record of when each appears and heals.

`watch.finding_rules` decides what amounts to a finding; `docs/reference/findings.md` gives the remedy for each reason.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

HEAL_SECONDS = 3.0  # a finding must be away this long, so that it does not flicker


class FindingReason(StrEnum):
    """The kinds of findings; also the metric's label."""

    NO_EVENTS = "no-events"  # requests are served, events are due, none come
    SHORT_PROMPTS = "short-prompts"  # blocks so large that no prompt fills one: no event is due, nothing can match
    NOTHING_INDEXED = "nothing-indexed"  # the pod's own cache is hit, but the index holds none of its blocks
    BLOCK_SIZE_CHANGED = "block-size-changed"
    DECODE_ERRORS = "decode-errors"
    STUCK_IN_REPLAY = "stuck-in-replay"
    SHARE_REACHED = "share-reached"  # a pod wants more of the index than one pod may have
    BATCH_SKIPPED = "batch-skipped"  # it could not be applied, and its stream's blocks were voided


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that an operator should look at."""

    endpoint: str
    dp_rank: int | None  # None for the pod as a whole
    reason: str  # a FindingReason, or one of a later version
    message: str  # the fault, then the remedy
    since: float  # unix seconds

    @property
    def subject(self) -> str:
        """Return the finding's subject: `HOST:PORT`, or `HOST:PORT#RANK` for one stream."""
        return self.endpoint if self.dp_rank is None else f"{self.endpoint}#{self.dp_rank}"

    @property
    def key(self) -> tuple[str, str]:
        """Return the identity of a finding: equal keys mean the same finding."""
        return self.subject, self.reason


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingNews:
    """The changes since the last look."""

    appeared: tuple[Finding, ...] = ()
    healed: tuple[Finding, ...] = ()


class FindingBook:
    """The current findings."""

    def __init__(self, *, heal_seconds: float = HEAL_SECONDS) -> None:
        self._heal_seconds = heal_seconds
        self._current: dict[tuple[str, str], Finding] = {}
        self._seen_at: dict[tuple[str, str], float] = {}

    @property
    def current(self) -> tuple[Finding, ...]:
        """Return the current findings, each with its latest message and its first `since`."""
        return tuple(self._current.values())

    def look(self, found: Iterable[Finding], *, now: float) -> FindingNews:
        """Note the findings at `now` (monotonic seconds), and return the changes."""
        appeared = []
        for finding in found:
            before = self._current.get(finding.key)
            if before is None:
                appeared.append(finding)
            self._current[finding.key] = replace(finding, since=before.since) if before else finding
            self._seen_at[finding.key] = now
        gone = [key for key, seen_at in self._seen_at.items() if now - seen_at >= self._heal_seconds]
        healed = tuple(self._drop(key) for key in gone)
        return FindingNews(appeared=tuple(appeared), healed=healed)

    def forget(self, subjects: Iterable[str]) -> None:
        """Drop the findings of subjects that we no longer judge; they have not healed."""
        away = frozenset(subjects)
        for key in [key for key in self._current if key[0] in away]:
            self._drop(key)

    def _drop(self, key: tuple[str, str]) -> Finding:
        del self._seen_at[key]
        return self._current.pop(key)
