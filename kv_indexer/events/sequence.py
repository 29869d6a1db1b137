"""The messages that carry event batches, and the rules of their sequence. Pure: no sockets.

Formats: `ZmqEventPublisher` in vllm/distributed/kv_events.py. Live (PUB): `[topic, seq, payload]`. A replay (ROUTER)
answers `[b"", seq, payload]` up to vLLM 0.25 and `[b"", topic, seq, payload]` later, so it is read from the right. The
publisher counts batches from 0, and its time stamps never fall while it lives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

BATCH_LIMIT = 4096  # of one answer: undecoded batches must not fill the memory
BYTE_LIMIT = 64 << 20
SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
DOUBLINGS = 32  # of a wait; every limit is reached by then
SAME_START_SECONDS = 1.0  # start times that differ by less count as equal: clocks and their texts are rounded


class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One batch, not yet decoded."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAnswer:
    """The result of one replay attempt: all batches up to the first hole."""

    frames: tuple[Frame, ...]  # consecutive, from the requested one on
    ended: bool  # the publisher sent the end marker, and there was no hole
    next_seq: int | None = None  # the first batch behind the hole that ended this attempt
    whole_from: int | None = None  # after a hole, the first batch of the unbroken rest


def parse_live(parts: Sequence[bytes]) -> Frame | None:
    """Return the batch, or None if this is no message of ours (too few parts, a number of the wrong length)."""
    if len(parts) < 3 or len(parts[-2]) != SEQ_BYTES or parts[-2] == END_SEQ:
        return None
    return Frame(seq=int.from_bytes(parts[-2], "big"), payload=parts[-1])


def is_replay_end(parts: Sequence[bytes]) -> bool:
    """Tell whether a replay answer is the end marker, in either of its two forms."""
    return len(parts) >= 2 and (parts[-2] == END_SEQ or not parts[-1])


def parse_replay(parts: Sequence[bytes]) -> Frame | None:
    """Return the batch of a replay answer, or None if it is malformed."""
    if len(parts) < 2 or len(parts[-2]) != SEQ_BYTES:
        return None
    return Frame(seq=int.from_bytes(parts[-2], "big"), payload=parts[-1])


def replay_request(start_seq: int) -> list[bytes]:
    """Return a DEALER's request for all buffered batches from `start_seq` on."""
    return [b"", start_seq.to_bytes(SEQ_BYTES, "big")]


class BatchAction(Enum):
    """What to do with a batch."""

    APPLY = auto()  # the next one
    DUPLICATE = auto()  # already applied, for example live and then in a replay
    GAP = auto()  # earlier batches are missing: replay from last + 1
    RESTART = auto()  # another publisher process: the old one's blocks are void


def judge(*, seq: int, ts: float, last_seq: int, last_ts: float) -> BatchAction:
    """Judge a live or replayed batch by the last one applied (`last_seq` is -1 before the first)."""
    if seq == last_seq + 1:
        return BatchAction.APPLY
    if seq > last_seq:
        return BatchAction.GAP
    # an old number with a later time: only a new process counts from 0 again
    return BatchAction.RESTART if ts > last_ts else BatchAction.DUPLICATE


class Probe(Enum):
    """What a replay that starts at our own last batch reveals about the publisher."""

    SAME = auto()  # it still has our last batch: the same process
    RESTARTED = auto()  # another batch under that number
    EMPTY = auto()  # nothing from there on: a new process, or an answer that was dropped on the way
    UNKNOWN = auto()  # its buffer starts later: no proof either way, and a gap in any case


def judge_probe(*, last_seq: int, last_crc: int | None, first_seq: int | None, first_crc: int | None) -> Probe:
    """Judge the first batch of a replay from `last_seq`; `first_seq` is None if the replay was empty.

    A living publisher keeps its newest batch in the buffer, so a repeatedly empty answer comes from a new process.
    """
    if first_seq is None:
        return Probe.EMPTY
    if first_seq != last_seq:
        return Probe.UNKNOWN
    return Probe.SAME if last_crc is None or last_crc == first_crc else Probe.RESTARTED


def is_another_process(before: float | None, now: float | None) -> bool:
    """Tell whether two start times (unix seconds, publisher's clock) prove different processes; None proves nothing."""
    return before is not None and now is not None and abs(before - now) >= SAME_START_SECONDS


def is_same_process(before: float | None, now: float | None) -> bool:
    """Tell whether two start times prove that the process is the same; None proves nothing."""
    return before is not None and now is not None and abs(before - now) < SAME_START_SECONDS


@dataclass(slots=True, kw_only=True)
class Restraint:
    """Limits the work that a publisher can cause: some disturbances are free, then each waits longer than the last.

    Free disturbances come back at an even rate: a publisher that disturbs us for ever has to wait, but is never given
    up. Times are monotonic seconds, given by the caller.
    """

    free: int  # per `calm_seconds`
    first_seconds: float
    limit_seconds: float
    calm_seconds: float
    _level: float = 0.0  # disturbances not forgiven yet
    _last: float = 0.0

    def disturb(self, *, now: float) -> float:
        """Count a disturbance; return how many seconds to wait because of it."""
        forgiven = (now - self._last) * self.free / self.calm_seconds
        self._level, self._last = max(self._level - forgiven, 0.0) + 1.0, now
        surplus = self._level - self.free
        if surplus <= 0:
            return 0.0
        wait: float = self.first_seconds * 2.0 ** min(surplus - 1, DOUBLINGS)
        if wait >= self.limit_seconds:  # a deeper debt would only delay the recovery
            self._level -= 1.0
        return min(wait, self.limit_seconds)


class History:
    """The received batches of one replay, in any order and however often each arrives; holds no sockets.

    Batches behind a hole are kept until it is filled: if each message is dropped with some probability, the run before
    the first hole would hardly ever grow.
    """

    def __init__(self, start_seq: int) -> None:
        self.next_seq = start_seq  # the first missing batch
        self.ended = False
        self.contradicts_itself = False  # two different batches under one number: another process has answered
        self._frames: list[Frame] = []
        self._behind: dict[int, Frame] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames) + len(self._behind)

    @property
    def is_full(self) -> bool:
        """Whether the caller should take the batches before more are requested."""
        return len(self) >= BATCH_LIMIT or self._bytes >= BYTE_LIMIT

    @property
    def is_complete(self) -> bool:
        """Whether the publisher has sent the end marker, and there is no hole."""
        return self.ended and not self._behind

    def last_hole(self) -> int | None:
        """Return the last missing batch, or None if the end is not known."""
        if not self.ended:
            return None
        seq = max(self._behind, default=self.next_seq)
        while seq in self._behind:
            seq -= 1
        return seq

    def add(self, frame: Frame) -> bool:
        """Add a batch; return False if it is not new."""
        known = self._behind.get(frame.seq)
        if known is not None:
            self.contradicts_itself = self.contradicts_itself or known.payload != frame.payload
            return False
        if frame.seq < self.next_seq:
            return False
        self._behind[frame.seq] = frame
        self._bytes += len(frame.payload)
        while self.next_seq in self._behind:
            self._frames.append(self._behind.pop(self.next_seq))
            self.next_seq += 1
        return True

    def answer(self) -> ReplayAnswer:
        """Return the batches before the first hole."""
        if self.contradicts_itself:
            return ReplayAnswer(frames=(), ended=False)
        last_hole = self.last_hole() if self._behind else None
        return ReplayAnswer(
            frames=tuple(self._frames),
            ended=self.is_complete,
            next_seq=min(self._behind, default=None),
            whole_from=None if last_hole is None else last_hole + 1,
        )
