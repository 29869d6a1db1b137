"""The access log: one line for each request and its outcome, kept for its writers, which never hold up a pick.

Observes requests (`records.request_story`). On the event loop a line is noted and put into each target's buffer; what
does not fit there is dropped, counted, and owned up to in the log itself. `write_records` writes the buffers.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from extproc.records.access_record import AccessRecord, NameHashes, add_end, record_of_decision
from extproc.records.audit_chain import GAP
from extproc.records.request_story import Decided, Ended, Fate

log = logging.getLogger(__name__)

MOST_WAITING = 10_000  # records of one target, a few hundred bytes each
COMPLAINT_SECONDS = 60.0


class GapRecord(msgspec.Struct, frozen=True, kw_only=True):
    """So many records are missing here: the target did not take them fast enough."""

    kind: str = GAP
    at: float  # unix seconds
    dropped: int
    why: str


Record = AccessRecord | GapRecord


class RecordBuffer:
    """What waits for one target. The event loop puts, one writer takes; both at any time."""

    def __init__(self, target: str, *, most: int = MOST_WAITING, unix_seconds: Callable[[], float] = time.time) -> None:
        """`target` is for metrics and the log: stdout, file, stream."""
        self.target = target
        self.written = 0
        self.dropped = 0
        self._most = most
        self._unix_seconds = unix_seconds
        self._waiting: deque[Record] = deque()  # its two ends may be used by two threads
        self._missing = 0  # dropped since the last one that fitted
        self._complained_at = float("-inf")

    def put(self, record: AccessRecord) -> None:
        """Keep it, or drop and count it."""
        waiting = self._waiting
        if len(waiting) >= self._most:
            self._drop()
            return
        if self._missing:
            waiting.append(self._gap())
        waiting.append(record)

    def take(self, most: int) -> Sequence[Record]:
        """Return the oldest ones and let go of them."""
        waiting = self._waiting
        return [waiting.popleft() for _ in range(min(most, len(waiting)))]

    def rest(self) -> Sequence[Record]:
        """Return all that is left, and at the end what is missing. Nothing may be put any more."""
        rest = list(self.take(len(self._waiting)))
        if self._missing:
            rest.append(self._gap())
        return rest

    def count_written(self, records: int) -> None:
        """Count what its target has."""
        self.written += records

    def lost(self, records: int) -> None:
        """Count what was taken and could not be written by the end."""
        self.dropped += records

    def _gap(self) -> GapRecord:
        missing, self._missing = self._missing, 0
        return GapRecord(at=self._unix_seconds(), dropped=missing, why="the target was too slow")

    def _drop(self) -> None:
        self._missing += 1
        self.dropped += 1
        now = time.monotonic()
        if now - self._complained_at >= COMPLAINT_SECONDS:
            self._complained_at = now
            log.error("the access log drops records", extra={"target": self.target, "dropped": self.dropped})


class AccessLog:
    """Implements `request_story.RequestObserver`."""

    def __init__(self, buffers: Sequence[RecordBuffer], *, names_key: bytes) -> None:
        """`names_key` is the key of the hashes that stand for tenants and prompts."""
        self.buffers: Sequence[RecordBuffer] = tuple(buffers)
        self._names = NameHashes(names_key)
        self._open: dict[int, AccessRecord] = {}  # as many as exchanges

    def use_names_key(self, key: bytes) -> None:
        """Hash names with another key from now on. Called from any thread."""
        self._names = NameHashes(key)

    def decided(self, decided: Decided, /) -> None:
        """Note the first half of the line."""
        share = decided.audit_share
        if share < 1.0 and not self._is_written(decided, share):
            return
        line = record_of_decision(decided, self._names)
        if decided.fate is Fate.ROUTED or decided.fate is Fate.FAILED_OPEN:
            self._open[decided.number] = line
        else:
            self._put(line)

    def ended(self, ended: Ended, /) -> None:
        """Write the whole line; one that began before this log did, or is not of its share, has none."""
        line = self._open.pop(ended.number, None)
        if line is not None:
            add_end(line, ended)
            self._put(line)

    def close(self) -> None:
        """Write what is known of exchanges that go on: another picker will never tell of them."""
        lines, self._open = self._open, {}
        for line in lines.values():
            self._put(line)

    def _put(self, line: AccessRecord) -> None:
        for buffer in self.buffers:
            buffer.put(line)

    def _is_written(self, decided: Decided, share: float) -> bool:
        return self._names.is_written(decided.record.facts.request_id or str(decided.number), share=share)
