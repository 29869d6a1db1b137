"""Hand-written fakes and short ways to say events; shared by unit and integration tests of the indexer."""

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kv_indexer.events.sequence import Frame, ReplayAnswer
from kvmesh.blocks.source import SourceState, Stream
from kvmesh.errors import FeedLostError, LeaseLostError

BLOCK = 4  # tokens


def prompt(blocks: int) -> bytes:
    """The tokens of blocks 1 … n, and one more, because the last token of a prompt is never a hit."""
    return array("I", range(blocks * BLOCK + 1)).tobytes()


def stored(*hashes: int, parent: int | None = None, first_block: int | None = None, **more: Any) -> dict[str, Any]:
    """A BlockStored of blocks whose engine hashes are their places in the prompt, unless told otherwise."""
    first = (hashes[0] if first_block is None else first_block) - 1
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": list(range(first * BLOCK, (first + len(hashes)) * BLOCK)),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **more,
    }


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    """A BlockRemoved."""
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0, **more}


CLEARED = {"type": "AllBlocksCleared"}


def payload(*events: Mapping[str, Any], ts: float) -> bytes:
    """A batch as vLLM >= 0.24 writes it."""
    return msgspec.msgpack.encode([ts, list(events), 0])


def frame(seq: int, *events: Mapping[str, Any], ts: float | None = None) -> Frame:
    """A batch with its number, which is its time too unless told otherwise."""
    return Frame(seq=seq, payload=payload(*events, ts=float(seq) if ts is None else ts))


class CountingTelemetry:
    """Keeps what the indexer counts."""

    def __init__(self) -> None:
        self.batches = self.gaps = self.replayed_batches = 0
        self.events: Counter[str] = Counter()
        self.unindexed: Counter[str] = Counter()
        self.decode_errors: Counter[str] = Counter()
        self.states: list[tuple[SourceState, str]] = []
        self.waiting_orphans: list[int] = []

    def applied(self, stream: Stream, *, batches: int, events: Mapping[str, int], last_ts: float) -> None:
        self.batches += batches
        self.events.update(events)

    def undecodable(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        self.decode_errors.update(reasons)

    def not_indexed(self, stream: Stream, *, reasons: Mapping[str, int]) -> None:
        self.unindexed.update(reasons)

    def orphans(self, stream: Stream, *, waiting: int) -> None:
        self.waiting_orphans.append(waiting)

    def gap(self, stream: Stream) -> None:
        self.gaps += 1

    def replayed(self, stream: Stream, *, batches: int) -> None:
        self.replayed_batches += batches

    def state(self, stream: Stream, *, state: SourceState, reason: str) -> None:
        self.states.append((state, reason))

    def forget(self, stream: Stream) -> None:
        self.states.clear()

    def findings(self, standing: object, *, appeared: object, endpoints: object) -> None:
        pass


class FakeIdentity:
    """When the publisher's process started, as its /metrics say."""

    def __init__(self, started_at: float | None = None) -> None:
        self.value = started_at
        self.asked = 0

    async def started_at(self) -> float | None:
        self.asked += 1
        return self.value


class FakePod:
    """A publisher with a replay buffer and a script of what arrives live; both of the follower's sockets.

    Script entries: frames (arrive together), [] (an idle second), an exception (raised), a callable (called).
    """

    def __init__(self, *, buffer: Sequence[Frame] = (), live: Sequence[Any] = ()) -> None:
        self.buffer = list(buffer)
        self.script = list(live)
        self.requests: list[int] = []
        self.dropped_once: set[int] = set()  # batches that the next replay loses
        self.answers_replay = True
        self.longest_answer = 1_000_000
        self.connects = 0
        self.died = False  # the live connection has gone; noticed at the next look
        self.reborn: list[Frame] | None = None  # the buffer of who answers the next replay, after this pod's death
        self.cut_once: int | None = None  # the next answer lacks all from here on, but has an end
        self.receive_yields = 0
        self.waiting = 0  # frames that receive would return at once, as a socket knows
        self.interrupted = 0
        self.waits: list[float] = []  # how long each receive would have waited
        self.on_receive: Callable[[], None] = lambda: None

    async def connect(self) -> None:
        self.connects += 1
        if self.script and isinstance(self.script[0], FeedLostError):
            raise self.script.pop(0)

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        self.waits.append(timeout_seconds)
        for _ in range(self.receive_yields):
            await asyncio.sleep(0)
        while self.script and callable(self.script[0]):
            self.script.pop(0)()
        self.on_receive()
        if not self.script:
            raise LeaseLostError("the script has ended")  # ends the follower under test
        step = self.script.pop(0)
        if isinstance(step, Exception):
            raise step
        frames: Sequence[Frame] = step
        return frames

    def interrupt(self) -> None:
        self.interrupted += 1

    def check(self) -> None:
        if self.died:
            self.died = False
            raise FeedLostError("closed by the pod")

    def close(self) -> None:
        pass

    def forget_all_but(self, buffer: Sequence[Frame]) -> None:
        """Be another process."""
        self.buffer = list(buffer)

    def die_into(self, buffer: Sequence[Frame]) -> None:
        """Be another process from the next replay on, as if this one had died just before."""
        self.reborn = list(buffer)

    async def replay(self, start_seq: int) -> ReplayAnswer:
        self.requests.append(start_seq)
        if self.reborn is not None:
            self.buffer, self.reborn, self.died = self.reborn, None, True
        if not self.answers_replay:
            return ReplayAnswer(frames=(), ended=False)
        lost, self.dropped_once = self.dropped_once, set()
        frames: list[Frame] = []
        for each in self.buffer:
            if each.seq < start_seq or each.seq in lost:
                continue
            if self.cut_once is not None and each.seq >= self.cut_once:
                break
            if each.seq != start_seq + len(frames):
                return ReplayAnswer(frames=tuple(frames), ended=False, next_seq=each.seq)
            if len(frames) == self.longest_answer:
                return ReplayAnswer(frames=tuple(frames), ended=False)
            frames.append(each)
        self.cut_once = None
        return ReplayAnswer(frames=tuple(frames), ended=True)
