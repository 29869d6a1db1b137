"""One stream's frames -> ordered events -> atomic index changes. The page to read first.

`follow_stream` and `catch_up` feed it live and replayed frames alike. It decides nothing about sockets and knows Redis
only as `ports.IndexWriter`.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from zlib import crc32

import msgspec
from msgspec.structs import replace

from kv_indexer.apply.change_plan import (
    SIZE_CHANGED,
    Plan,
    RootKeys,
    StreamContext,
    first_blocks_to_look_up,
    first_size_change,
    hashes_to_look_up,
    plan_adoption,
    plan_change,
)
from kv_indexer.events.event_fields import Fault
from kv_indexer.events.sequence import BatchAction, Frame, judge
from kv_indexer.events.vllm_events import decode_batch
from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kvmesh.blocks.block_keys import root_key
from kvmesh.blocks.events import AllBlocksCleared, CacheGroup, Event, EventBatch
from kvmesh.blocks.index_changes import Clear, IndexChange
from kvmesh.blocks.source import Claim, Stream, StreamPosition
from kvmesh.errors import DecodeError, IndexUnavailableError, StreamForgottenError

log = logging.getLogger(__name__)

OUT_OF_STEP_LIMIT = 5  # another writer that overtakes us this often in a row is not coming to rest
BLOCKS_A_CHANGE = 2000  # named by one change, if it holds several batches; Redis serves no other client meanwhile
RECENT_LIMIT = 1024  # batches whose checksum is remembered
WITNESS_LIMIT = 64  # of our own blocks, to compare with another stream's
# reasons of skipped events that may have been removals: without those the index would claim too much
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
LOST_EVENT = "undecodable-event"  # why a source is degraded then
OLD_NUMBER = "an old number with a later time"
OTHER_CONTENT = "an old number with other content"
OTHER_SIZE = "another block size"


def root_keys(*, hash_seed: str, model: str) -> RootKeys:
    """Return the root keys of one model, remembered by adapter and salt."""

    @lru_cache(maxsize=1024)
    def root(lora: str | None, cache_salt: str | None) -> bytes:
        return root_key(hash_seed=hash_seed, model=model, lora=lora, cache_salt=cache_salt)

    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Frames that cannot be applied as they come."""

    action: BatchAction  # GAP or RESTART
    frames: Sequence[Frame]  # from the offending one on
    sign: str = ""  # what showed a restart


class _Batch(msgspec.Struct, frozen=True, kw_only=True):
    frame: Frame
    decoded: EventBatch
    readable: bool


class EventApplier:
    """Applies one stream's batches exactly once and in order.

    All that must survive a crash is in Redis, but for two things. Orphans cost hits alone. That the
    publisher reports hits again (`apply.change_plan`) is learned again from a report of several blocks; a single first
    block that is reported before that counts twice, so that it may be claimed although it is gone, until a reset.
    """

    def __init__(
        self, *, claim: Claim, roots: RootKeys, writer: IndexWriter, telemetry: IndexerTelemetry, namespace: str = ""
    ) -> None:
        """Take the pool's `namespace` (see `StreamPosition`) if the stream belongs to one."""
        self._claim = claim
        self._namespace = namespace
        self._stream = claim.stream
        self._roots = roots
        self._writer = writer
        self._telemetry = telemetry
        self._context = StreamContext()
        self._recent: dict[int, int] = {}  # number -> checksum of what we applied under it
        self._verdicts: dict[Stream, tuple[int, bool]] = {}  # other stream -> (its epoch, whether its hashes are ours)
        self.position = StreamPosition(epoch=0)

    @property
    def orphans(self) -> int:
        """How many stores wait for their parents."""
        return len(self._context.orphans)

    async def resume(self) -> None:
        """Take up the stream where the index has it. Raise StreamForgottenError, IndexUnavailableError.

        What it holds under the keys of another pool or model is voided: no lookup would find it, and what is stored
        next would be chained to it.
        """
        self._adopt(await self._writer.read_position(self._stream))
        self._forget()
        before = self.position.namespace
        if before == self._namespace:
            return
        if self.position.last_seq >= 0:
            log.warning("%s belongs to another pool or model than before; beginning anew", self._stream.name)
            await self.begin_epoch()
        await self._writer.set_namespace(self._claim, namespace=self._namespace)
        self.position = replace(self.position, namespace=self._namespace)

    async def is_in_step(self) -> bool:
        """Tell whether the index had the stream where we left it; we go on from where it has it.

        It moves under us when someone clears it by hand, or when Redis fails over to a replica that lags.
        Raise StreamForgottenError if it is gone.
        """
        before = self.position
        self._adopt(await self._writer.read_position(self._stream))
        if (self.position.epoch, self.position.last_seq) == (before.epoch, before.last_seq):
            return True
        self._forget()
        return False

    async def begin_epoch(self, *, last_seq: int = -1, degraded: str = "") -> None:
        """Void all that the stream claims; `degraded` says what the new epoch will lack."""
        self._adopt(
            await self._writer.begin_epoch(
                self._claim, expected_epoch=self.position.epoch, last_seq=last_seq, degraded=degraded
            )
        )
        self._forget()

    def accept_block_sizes(self) -> None:
        """Take a change of block size for what this publisher does, no longer for a sign of a restart."""
        self._context.mixes_sizes = True

    async def apply(self, frames: Sequence[Frame]) -> Halt | None:
        """Apply what follows, drop what is known, and stop at the first gap or restart.

        Raise IndexUnavailableError, LeaseLostError, or StreamForgottenError if the index has lost the stream.
        """
        batches = [self._decode(frame) for frame in frames]
        for _ in range(OUT_OF_STEP_LIMIT):
            fresh, halt = self._judge(batches)
            fresh, halt = self._stop_at_other_size(fresh, halt)
            if await self._write_all(fresh):
                return halt
            # Redis lost its last writes, or the stream was cleared by hand: judge the same frames again
            self._adopt(await self._writer.read_position(self._stream))
            self._forget()
        raise IndexUnavailableError(f"{self._stream.name}: something keeps changing this stream")

    async def adopt_orphans(self) -> bool:
        """Ask other streams for the parents that ours never reported; tell whether any was found.

        Where engine hashes are content-addressed (vLLM >= 0.29 by default) another pod's block of the same hash has
        the same key. That is believed of a stream only if it has at least one of our own blocks under the same key,
        and none under another.
        """
        orphans, witnesses = self._context.orphans, self._witnesses()
        if not len(orphans) or not witnesses or self.position.last_crc is None:
            return False
        wanted = set(islice(orphans.parents(), RECENT_LIMIT))
        elsewhere = await self._writer.find_block_keys_elsewhere(self._stream, wanted | witnesses.keys())
        for other, keys in elsewhere.items():
            found = {parent: keys[parent] for parent in wanted & keys.keys()}
            if found and await self._agrees(other, keys, witnesses):
                self._context.keys.update(found)
        plan = plan_adoption(context=self._context, roots=self._roots)
        if not plan.operations:
            return False
        if not await self._write(plan, (), self._context.groups):
            self._context.orphans.clear()  # out of step; the next look at the position shows it
            return False
        return True

    async def _agrees(self, other: Stream, keys: Mapping[int, bytes], witnesses: Mapping[int, bytes]) -> bool:
        position = await self._writer.read_position(other)
        if position is None:
            return False
        common = keys.keys() & witnesses.keys()
        if common:
            self._verdicts[other] = (position.epoch, all(keys[each] == witnesses[each] for each in common))
        epoch, verdict = self._verdicts.get(other, (None, False))
        return verdict and epoch == position.epoch

    def _witnesses(self) -> dict[int, bytes]:
        """Return blocks whose keys we have computed from their own tokens: the newest first blocks."""
        keys, newest = self._context.keys, reversed(self._context.first_blocks)
        return dict(islice(((each, keys[each]) for each in newest if each in keys), WITNESS_LIMIT))

    def _adopt(self, position: StreamPosition | None) -> None:
        if position is None:
            raise StreamForgottenError(f"Redis does not know {self._stream.name} any more; it was emptied")
        self.position = position

    def _forget(self) -> None:
        """Start with a new context, from the index's position."""
        position = self.position
        self._context = StreamContext(
            block_sizes=dict(position.block_sizes), groups=position.groups, mixes_sizes=self._context.mixes_sizes
        )
        self._recent.clear()
        self._verdicts.clear()

    def _decode(self, frame: Frame) -> _Batch:
        try:
            return _Batch(frame=frame, decoded=decode_batch(frame.payload), readable=True)
        except DecodeError as error:
            self._telemetry.undecodable(self._stream, reasons={error.reason: 1})
            log.warning("batch %d of %s cannot be read: %s", frame.seq, self._stream.name, error)
            # its number is used up all the same; no time, so that it cannot look like a restart
            return _Batch(frame=frame, decoded=EventBatch(ts=0.0, events=()), readable=False)

    def _judge(self, batches: Sequence[_Batch]) -> tuple[list[_Batch], Halt | None]:
        last_seq, last_ts = self.position.last_seq, self.position.last_ts
        fresh: list[_Batch] = []
        for index, batch in enumerate(batches):
            seq, ts = batch.frame.seq, batch.decoded.ts
            verdict = judge(seq=seq, ts=ts, last_seq=last_seq, last_ts=last_ts)
            sign = OLD_NUMBER if verdict is BatchAction.RESTART else ""
            if verdict is BatchAction.DUPLICATE and self._recent.get(seq) not in (None, crc32(batch.frame.payload)):
                verdict, sign = BatchAction.RESTART, OTHER_CONTENT
            if verdict is BatchAction.APPLY:
                fresh.append(batch)
                last_seq, last_ts = seq, max(ts, last_ts)
            elif verdict is not BatchAction.DUPLICATE:
                return fresh, Halt(action=verdict, frames=_frames(batches[index:]), sign=sign)
        return fresh, None

    def _stop_at_other_size(self, fresh: list[_Batch], halt: Halt | None) -> tuple[list[_Batch], Halt | None]:
        if self._context.mixes_sizes:
            return fresh, halt
        index = first_size_change((batch.decoded.events for batch in fresh), self._context)
        if index is None:
            return fresh, halt
        self._telemetry.not_indexed(self._stream, reasons={SIZE_CHANGED: 1})
        later = _frames(fresh[index:]) + (list(halt.frames) if halt else [])
        return fresh[:index], Halt(action=BatchAction.RESTART, frames=later, sign=OTHER_SIZE)

    async def _write_all(self, fresh: Sequence[_Batch]) -> bool:
        """Apply these batches in as many changes as keep each short; False if the index is elsewhere."""
        for portion in _portions(fresh):
            groups = self._context.groups
            plan = await self._plan(portion)
            if not await self._write(plan, portion, groups):
                return False
        return True

    async def _plan(self, fresh: Sequence[_Batch]) -> Plan:
        events: list[Event] = [event for batch in fresh for event in batch.decoded.events]
        context = self._context
        context.is_exact = not self.position.degraded
        unknown, first_blocks = hashes_to_look_up(events, context), first_blocks_to_look_up(events, context)
        if unknown or first_blocks:
            found = await self._writer.find_block_keys(self._stream, unknown | first_blocks)
            context.keys.update(found)
            context.first_blocks.update({each: 1 for each, _ in first_blocks if each in found})
        return plan_change(events, context=context, roots=self._roots)

    async def _write(self, plan: Plan, fresh: Sequence[_Batch], groups: Mapping[int, CacheGroup]) -> bool:
        """Apply the plan of these batches (none: what became known since); False if the index is elsewhere."""
        position, context = self.position, self._context
        checksums = {batch.frame.seq: crc32(batch.frame.payload) for batch in fresh}
        last_seq = fresh[-1].frame.seq if fresh else position.last_seq
        change = IndexChange(
            epoch=position.epoch,
            previous_seq=position.last_seq,
            last_seq=last_seq,
            last_ts=max([position.last_ts, *(batch.decoded.ts for batch in fresh)]),
            last_crc=checksums[last_seq] if fresh else position.last_crc or 0,
            operations=tuple(plan.operations),
            events=sum(len(batch.decoded.events) for batch in fresh),
            groups=context.groups if context.groups is not groups else None,
            degraded=_doubt(fresh, plan),
        )
        applied = await self._writer.apply(self._claim, change)
        if applied is None:
            return False
        if applied.epoch != position.epoch:
            self._verdicts.clear()
        cleared = any(isinstance(operation, Clear) for operation in plan.operations)
        self.position = replace(
            position,
            epoch=applied.epoch,
            last_seq=change.last_seq,
            last_ts=change.last_ts,
            last_crc=change.last_crc,
            # from a reset on we know all there is
            degraded=("" if cleared else position.degraded) or change.degraded,
            block_sizes=dict(context.block_sizes),
            groups=context.groups,
        )
        self._recent.update(checksums)
        context.forget_oldest()
        for seq in list(islice(self._recent, max(len(self._recent) - RECENT_LIMIT, 0))):
            del self._recent[seq]
        self._count(fresh, plan, left_out=applied.left_out)
        if applied.left_out and not self.position.degraded:
            await self._read_doubt()
        return True

    async def _read_doubt(self) -> None:
        """Read how the index has marked what it left out: it alone knows what a clear has repaired."""
        now = await self._writer.read_position(self._stream)
        if now is not None and now.epoch == self.position.epoch:
            self.position = replace(self.position, degraded=now.degraded)

    def _count(self, fresh: Sequence[_Batch], plan: Plan, *, left_out: Mapping[str, int]) -> None:
        # once a batch: a Counter that stays empty costs as much as the rest
        events: dict[str, int] = {}
        undecodable = plan.not_understood
        for batch in fresh:
            for event in batch.decoded.events:
                kind = type(event).__name__
                events[kind] = events.get(kind, 0) + 1
            if batch.decoded.skipped:
                undecodable = undecodable + Counter(batch.decoded.skipped)
        not_indexed = plan.skipped + Counter(left_out) if left_out else plan.skipped
        self._telemetry.applied(self._stream, batches=len(fresh), events=events, last_ts=self.position.last_ts)
        if not_indexed:
            self._telemetry.not_indexed(self._stream, reasons=not_indexed)
        if undecodable:
            self._telemetry.undecodable(self._stream, reasons=undecodable)


def _frames(batches: Sequence[_Batch]) -> list[Frame]:
    return [batch.frame for batch in batches]


def _portions(batches: Sequence[_Batch]) -> Iterator[Sequence[_Batch]]:
    """Cut between batches, so that each portion names BLOCKS_A_CHANGE blocks at most, or is one batch.

    Never within a batch: the index knows its place by batches, and what the second half of one means (is it a report,
    what is its parent) is decided from the first half, which a successor would not know.
    """
    first, blocks = 0, 0
    for number, batch in enumerate(batches):
        more = sum(
            0 if isinstance(event, AllBlocksCleared) else len(event.block_hashes) for event in batch.decoded.events
        )
        if number > first and blocks + more > BLOCKS_A_CHANGE:
            yield batches[first:number]
            first, blocks = number, 0
        blocks += more
    if batches:
        yield batches[first:]


def _doubt(fresh: Sequence[_Batch], plan: Plan) -> str:
    """Return why the index is no longer exact after these batches, or ""; what came before a clear does not count."""
    doubt = SIZE_CHANGED if plan.skipped[SIZE_CHANGED] else ""
    for batch in fresh:
        if any(isinstance(event, AllBlocksCleared) for event in batch.decoded.events):
            doubt = ""
        if not batch.readable:
            doubt = DecodeError.reason
        elif not MAY_BE_REMOVALS.isdisjoint(batch.decoded.skipped):  # on which side of the clear is unknown
            doubt = doubt or LOST_EVENT
    return doubt
