"""The rules of one event sequence: what a batch's number and time say about it. Pure; used by `apply_events`.

The publisher counts batches from 0 and its time stamps never fall while it lives
(`ZmqEventPublisher` in vllm/distributed/kv_events.py).
"""

from enum import Enum, auto


class Verdict(Enum):
    """What to do with a batch."""

    APPLY = auto()  # the next one
    DUPLICATE = auto()  # seen before, for example live and in a replay
    GAP = auto()  # some before it are missing: replay from last + 1
    RESTART = auto()  # another publisher process: what the old one said is void


def judge(*, seq: int, ts: float, last_seq: int, last_ts: float) -> Verdict:
    """Judge a live or replayed batch by the last one applied (`last_seq` -1: none yet)."""
    if seq == last_seq + 1:
        return Verdict.APPLY
    if seq > last_seq:
        return Verdict.GAP
    # a number that was used before, yet a later time: only a new process counts anew
    return Verdict.RESTART if ts > last_ts else Verdict.DUPLICATE


class Probe(Enum):
    """What a replay that starts at our own last batch says about the publisher."""

    SAME = auto()  # it still has our last batch: the same process
    RESTARTED = auto()  # it has less than we applied, or something else under that number
    UNKNOWN = auto()  # its buffer starts later: no proof either way, and a gap in any case


def judge_probe(*, last_seq: int, last_crc: int | None, first_seq: int | None, first_crc: int | None) -> Probe:
    """Judge the first batch of a replay from `last_seq`; `first_seq` None means that the replay was empty.

    A living publisher keeps its newest batch in the buffer, so an empty answer comes from a new process.
    """
    if first_seq is None:
        return Probe.RESTARTED
    if first_seq != last_seq:
        return Probe.UNKNOWN
    return Probe.SAME if last_crc is None or last_crc == first_crc else Probe.RESTARTED
