"""The messages around event batches, and the rules of their sequence. Pure: no sockets.

Formats: `ZmqEventPublisher` in vllm/distributed/kv_events.py. Live (PUB): `[topic, seq, payload]`. A replay (ROUTER)
answers `[b"", seq, payload]` up to vLLM 0.25 and `[b"", topic, seq, payload]` later, so it is read from the right.
The publisher counts batches from 0, and its time stamps never fall while it lives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
DOUBLINGS = 32  # of a wait; every limit is reached by then
SAME_START_SECONDS = 1.0  # start times that differ by less are one: clocks and their texts are rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One batch, not yet decoded."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAnswer:
    """One attempt at a replay: all it gave without a hole."""

    frames: tuple[Frame, ...]  # consecutive, the first is what was asked for
    ended: bool  # the publisher sent the end marker, and there was no hole
    next_seq: int | None = None  # the first batch behind the hole at which this attempt was cut
    whole_from: int | None = None  # the first batch from which on nothing was missing, where that lies behind a hole


def parse_live(parts: Sequence[bytes]) -> Frame | None:
    """Return the batch, or None if this is no message of ours (too few parts, short number)."""
    if len(parts) < 3 or len(parts[-2]) != SEQ_BYTES or parts[-2] == END_SEQ:
        return None
    return Frame(seq=int.from_bytes(parts[-2], "big"), payload=parts[-1])


def is_replay_end(parts: Sequence[bytes]) -> bool:
    """Tell whether a replay answer is the end marker, in either of its forms."""
    return len(parts) >= 2 and (parts[-2] == END_SEQ or not parts[-1])


def parse_replay(parts: Sequence[bytes]) -> Frame | None:
    """Return the batch of a replay answer, or None if it is malformed."""
    if len(parts) < 2 or len(parts[-2]) != SEQ_BYTES:
        return None
    return Frame(seq=int.from_bytes(parts[-2], "big"), payload=parts[-1])


def replay_request(start_seq: int) -> list[bytes]:
    """Return what a DEALER sends to get all buffered batches from `start_seq` on."""
    return [b"", start_seq.to_bytes(SEQ_BYTES, "big")]


class BatchAction(Enum):
    """What to do with a batch."""

    APPLY = auto()  # the next one
    DUPLICATE = auto()  # seen before, for example live and in a replay
    GAP = auto()  # some before it are missing: replay from last + 1
    RESTART = auto()  # another publisher process: what the old one published is void


def judge(*, seq: int, ts: float, last_seq: int, last_ts: float) -> BatchAction:
    """Judge a live or replayed batch by the last one applied (`last_seq` -1: none yet)."""
    if seq == last_seq + 1:
        return BatchAction.APPLY
    if seq > last_seq:
        return BatchAction.GAP
    # a number that was used before, yet a later time: only a new process counts from 0 again
    return BatchAction.RESTART if ts > last_ts else BatchAction.DUPLICATE


class Probe(Enum):
    """What a replay that starts at our own last batch says about the publisher."""

    SAME = auto()  # it still has our last batch: the same process
    RESTARTED = auto()  # something else under that number
    EMPTY = auto()  # nothing from there on: a new process, or an answer of which all was dropped on the way
    UNKNOWN = auto()  # its buffer starts later: no proof either way, and a gap in any case


def judge_probe(*, last_seq: int, last_crc: int | None, first_seq: int | None, first_crc: int | None) -> Probe:
    """Judge the first batch of a replay from `last_seq`; `first_seq` None means that the replay was empty.

    A living publisher keeps its newest batch in the buffer, so an answer that stays empty comes from a new process.
    """
    if first_seq is None:
        return Probe.EMPTY
    if first_seq != last_seq:
        return Probe.UNKNOWN
    return Probe.SAME if last_crc is None or last_crc == first_crc else Probe.RESTARTED


def is_another_process(before: float | None, now: float | None) -> bool:
    """Tell whether two start times (unix seconds of the publisher) belong to different processes; None says nothing."""
    return before is not None and now is not None and abs(before - now) >= SAME_START_SECONDS


def is_same_process(before: float | None, now: float | None) -> bool:
    """Tell whether two start times prove that the process is the same; None proves nothing."""
    return before is not None and now is not None and abs(before - now) < SAME_START_SECONDS


@dataclass(slots=True, kw_only=True)
class Restraint:
    """Limits what a publisher may make us do: some times are free, then each has to wait longer than the last.

    What is free comes back evenly, so that whoever disturbs us for ever has to wait, and is never given up. Times are
    monotonic seconds, given by the caller.
    """

    free: int  # in `calm_seconds`
    first_seconds: float
    limit_seconds: float
    calm_seconds: float
    _level: float = 0.0  # disturbances that are not forgiven yet
    _last: float = 0.0

    def disturb(self, *, now: float) -> float:
        """Take note of a disturbance; return how many seconds to wait for it."""
        forgiven = (now - self._last) * self.free / self.calm_seconds
        self._level, self._last = max(self._level - forgiven, 0.0) + 1.0, now
        surplus = self._level - self.free
        if surplus <= 0:
            return 0.0
        wait: float = self.first_seconds * 2.0 ** min(surplus - 1, DOUBLINGS)
        if wait >= self.limit_seconds:  # to be ever deeper in debt would only delay the return
            self._level -= 1.0
        return min(wait, self.limit_seconds)
