"""The multipart messages around event batches: live (PUB) and replay (ROUTER). Used by the ZMQ adapters; no sockets.

Formats: `ZmqEventPublisher` in vllm/distributed/kv_events.py. Live: `[topic, seq, payload]`. A replay answers
`[b"", seq, payload]` up to vLLM 0.25 and `[b"", topic, seq, payload]` later, so it is read from the right.
"""

from collections.abc import Sequence
from dataclasses import dataclass

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One batch, not yet decoded."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayAnswer:
    """One attempt at a replay: all it gave without a hole."""

    frames: tuple[Frame, ...]  # consecutive, the first is what was asked for
    ended: bool  # the publisher said that this is all, and there was no hole
    next_seq: int | None = None  # the first batch behind the hole at which this attempt was cut


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
