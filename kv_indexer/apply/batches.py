"""Opens batches and cuts large input into turns: frames, portions of batches, pieces of events. Pure.

A pod decides how much it reports at once. So three things must not grow with it: the time that the event loop is
blocked, the time that Redis is blocked, and the memory for decoded events.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from zlib import crc32

import msgspec
from msgspec.structs import asdict, replace

from kv_indexer.apply.change_plan import OPERATION_BLOCKS, Plan
from kv_indexer.apply.store_rules import SIZE_CHANGED
from kv_indexer.events.event_fields import Fault
from kv_indexer.events.sequence import Frame
from kv_indexer.events.vllm_events import OpenBatch, decode_batch
from kvmesh.blocks.block_keys import TOKEN_BYTES
from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, MoreStored, is_dense
from kvmesh.errors import DecodeError

BLOCKS_A_CHANGE = 2000  # in one change; Redis serves no other client meanwhile
FRAME_BYTES = 256 << 10  # decoded in one go
LONG_BATCH_BYTES = 128 << 10  # a step of 8,192 tokens takes 40 kB
TURN_BYTES, TURN_BLOCKS = 32 << 10, 1000  # of a long batch; other streams are served in between


# Skip reasons of events that may have been removals: without these the index would claim too much.
MAY_BE_REMOVALS: frozenset[Fault] = frozenset(
    {
        "bad-block-hash",
        "bad-medium",
        "bad-group",
        "bad-locality",
        "bad-ownership",
        "too-few-fields",
        "undecodable-event",
    }
)
LOST_EVENT = "undecodable-event"  # the reason why the source is then degraded
CLEARED = AllBlocksCleared.__name__


class Batch(msgspec.Struct, kw_only=True):
    """One frame, opened."""

    frame: Frame
    crc: int  # of its payload
    ts: float  # the publisher's unix seconds
    events: Sequence[Event] = ()  # empty for a long batch
    rest: OpenBatch | None = None  # of a long batch: the part that is read in turns
    is_readable: bool = True
    kinds: dict[str, int] = {}  # type -> events read
    count: int = 0  # of events read
    skipped: Mapping[str, int] = {}  # reason -> events that cannot be read

    @property
    def cost(self) -> int:
        """Return how long its change will hold Redis, in blocks."""
        return sum(map(_cost, self.events))

    def note(self, events: Sequence[Event]) -> None:
        """Count events that were read."""
        kinds = self.kinds
        for event in events:
            kind = type(event).__name__
            kinds[kind] = kinds.get(kind, 0) + 1
        self.count += len(events)

    def turns(self) -> Iterator[Sequence[Event]]:
        """Yield a long batch's events in turns of about TURN_BLOCKS blocks at most; long events are cut into pieces."""
        assert self.rest is not None
        self.kinds, self.count = {}, 0
        self.rest.skipped.clear()
        for events in self.rest.turns(size=TURN_BYTES):
            self.note(events)
            yield from _turns(events)
        self.skipped = self.rest.skipped


def is_long(frame: Frame) -> bool:
    """Tell whether a batch is read and applied in turns."""
    return len(frame.payload) > LONG_BATCH_BYTES


def open_batch(frame: Frame) -> Batch:
    """Read a frame; of a long one, only its time. Raise DecodeError."""
    crc = crc32(frame.payload)
    if is_long(frame):
        opened = OpenBatch(frame.payload)
        return Batch(frame=frame, crc=crc, ts=opened.ts, rest=opened)
    read = decode_batch(frame.payload)
    batch = Batch(frame=frame, crc=crc, ts=read.ts, events=read.events, skipped=read.skipped)
    batch.note(read.events)
    return batch


def unreadable_batch(frame: Frame) -> Batch:
    """Return a placeholder for a frame that is not a batch: its sequence number is used up all the same."""
    return Batch(frame=frame, crc=crc32(frame.payload), ts=0.0, is_readable=False)  # no time: no sign of a restart


def doubt_of(batches: Sequence[Batch], plan: Plan) -> str:
    """Return why the index is no longer exact after these batches, or ""; doubts from before a clear do not count."""
    doubt = SIZE_CHANGED if plan.skipped[SIZE_CHANGED] else ""
    for batch in batches:
        if CLEARED in batch.kinds:
            doubt = ""
        if not batch.is_readable:
            doubt = DecodeError.reason
        elif not MAY_BE_REMOVALS.isdisjoint(batch.skipped):  # it may have come before or after the clear
            doubt = doubt or LOST_EVENT
    return doubt


def frame_groups(frames: Sequence[Frame]) -> Iterator[Sequence[Frame]]:
    """Cut between frames, into groups of at most FRAME_BYTES; a long batch is a group of one."""
    first, size = 0, 0
    for number, frame in enumerate(frames):
        more = len(frame.payload) if not is_long(frame) else FRAME_BYTES
        size += more
        if number > first and size > FRAME_BYTES:
            yield frames[first:number]
            first, size = number, more
    if frames:
        yield frames[first:]


def portions(batches: Sequence[Batch], *, alone: Collection[int] = ()) -> Iterator[Sequence[Batch]]:
    """Cut between batches, into portions that cost at most BLOCKS_A_CHANGE or are a single batch.

    Batches whose number is in `alone` become single portions.
    """
    if len(batches) == 1:  # the usual case
        yield batches
        return
    first, total = 0, 0
    for number, batch in enumerate(batches):
        more = batch.cost if batch.frame.seq not in alone else BLOCKS_A_CHANGE
        if number > first and total + more > BLOCKS_A_CHANGE:
            yield batches[first:number]
            first, total = number, 0
        total += more
    if batches:
        yield batches[first:]


def _cost(event: Event) -> int:
    return OPERATION_BLOCKS + (0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes))


def _turns(events: Iterable[Event]) -> Iterator[Sequence[Event]]:
    """Cut events into pieces and group these into turns of one change each."""
    turn: list[Event] = []
    total = 0
    for event in events:
        for piece in _pieces(event):
            more = _cost(piece)
            if turn and total + more > TURN_BLOCKS:
                yield turn
                turn, total = [], 0
            turn.append(piece)
            total += more
    yield turn


def _pieces(event: Event) -> Iterator[Event]:
    """Cut an event into consecutive events of the same meaning; one that will be skipped anyway stays whole."""
    if isinstance(event, AllBlocksCleared) or len(event.block_hashes) <= TURN_BLOCKS:
        yield event
        return
    starts = range(0, len(event.block_hashes), TURN_BLOCKS)
    if isinstance(event, BlockRemoved):
        for at in starts:
            yield replace(event, block_hashes=event.block_hashes[at : at + TURN_BLOCKS])
        return
    extra = event.extra_keys
    if (event.tokens and not is_dense(event)) or (extra is not None and len(extra) != len(event.block_hashes)):
        yield event
        return
    for at in starts:
        yield _piece(event, at, at + TURN_BLOCKS)


def _piece(event: BlockStored, first: int, last: int) -> BlockStored:
    size = event.block_size * TOKEN_BYTES
    changes = {
        "block_hashes": event.block_hashes[first:last],
        "tokens": event.tokens[first * size : last * size],
        "extra_keys": event.extra_keys[first:last] if event.extra_keys is not None else None,
    }
    if not first:
        return replace(event, **changes)
    return MoreStored(**asdict(event) | changes | {"parent_block_hash": event.block_hashes[first - 1]})


class FailedBatches:
    """The batches of one stream that failed on their last try: each replay brings the same ones again."""

    def __init__(self) -> None:
        self._failed: dict[int, int] = {}  # number -> checksum of its payload

    @property
    def numbers(self) -> Collection[int]:
        """The numbers of batches to apply one at a time, to find the faulty one."""
        return self._failed.keys()

    def is_poison(self, portion: Sequence[Batch]) -> bool:
        """Note a failed portion; tell whether it is a single batch that has failed before."""
        first = portion[0]
        if len(portion) == 1 and self._failed.pop(first.frame.seq, None) == first.crc:
            return True
        self._failed = {batch.frame.seq: batch.crc for batch in portion}
        return False

    def forgive(self, portion: Sequence[Batch]) -> None:
        """Note a portion that was applied."""
        for batch in portion if self._failed else ():
            self._failed.pop(batch.frame.seq, None)
