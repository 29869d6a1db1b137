"""Use case: one stream's frames -> ordered events -> one atomic index change.

The page to read first. `follow_stream` feeds it live and replayed frames alike; it decides nothing about sockets and
knows Redis only as `ports.IndexWriter`.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from zlib import crc32

from kv_indexer.core.block_keys import root_key
from kv_indexer.core.events import Event, EventBatch
from kv_indexer.core.index_changes import Clear, IndexChange, Plan, RootKeys, parents_to_look_up, plan_change
from kv_indexer.core.sequence import Verdict, judge
from kv_indexer.core.source import SourceState, Stream, StreamPosition
from kv_indexer.errors import DecodeError, IndexUnavailableError, StreamForgottenError
from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kv_indexer.wire.vllm_events import decode_batch
from kv_indexer.wire.zmq_frames import Frame

log = logging.getLogger(__name__)

KNOWN_KEYS_LIMIT = 65_536  # engine hashes remembered a stream; Redis has them all
OUT_OF_STEP_LIMIT = 5  # another writer that overtakes us this often in a row is not coming to rest


def root_keys(*, hash_seed: str, model: str) -> RootKeys:
    """Return the root keys of one model, remembered by adapter and salt."""

    @lru_cache(maxsize=1024)
    def root(lora: str | None, cache_salt: str | None) -> bytes:
        return root_key(hash_seed=hash_seed, model=model, lora=lora, cache_salt=cache_salt)

    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """Frames that cannot be applied as they come."""

    verdict: Verdict  # GAP or RESTART
    frames: Sequence[Frame]  # from the offending one on


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    frame: Frame
    decoded: EventBatch
    readable: bool


class EventApplier:
    """Applies one stream's batches exactly once and in order; keeps no state that Redis does not have."""

    def __init__(self, *, stream: Stream, roots: RootKeys, writer: IndexWriter, telemetry: IndexerTelemetry) -> None:
        self._stream = stream
        self._roots = roots
        self._writer = writer
        self._telemetry = telemetry
        self._known: dict[int, bytes] = {}
        self.position = StreamPosition(epoch=0)

    async def resume(self) -> None:
        """Take up the stream where the index has it, registering it if it is new. Raise IndexUnavailableError."""
        self.position = await self._writer.open_stream(self._stream)
        self._known.clear()  # another epoch may have other engine hashes

    async def is_in_step(self) -> bool:
        """Tell whether the index had the stream where we left it; we go on from where it has it.

        It moves under us when another indexer follows the same pod, or when Redis fails over to a replica that lags.
        Raise StreamForgottenError if it is gone.
        """
        before = self.position
        self._adopt(await self._writer.read_position(self._stream))
        if self.position.epoch != before.epoch:
            self._known.clear()
        return (self.position.epoch, self.position.last_seq) == (before.epoch, before.last_seq)

    async def begin_epoch(self, *, last_seq: int = -1, degraded: str = "") -> None:
        """Void all that the stream claims; `degraded` says what the new epoch will lack."""
        self._adopt(
            await self._writer.begin_epoch(
                self._stream, expected_epoch=self.position.epoch, last_seq=last_seq, degraded=degraded
            )
        )
        self._known.clear()

    async def apply(self, frames: Sequence[Frame]) -> Halt | None:
        """Apply what follows, drop what is known, and stop at the first gap or restart.

        Raise IndexUnavailableError, or StreamForgottenError if the index has lost the stream.
        """
        batches = [self._decode(frame) for frame in frames]
        for _ in range(OUT_OF_STEP_LIMIT):
            fresh, halt = self._judge(batches)
            if not fresh:
                return halt
            sizes = dict(self.position.block_sizes)
            plan = await self._plan(fresh, sizes)
            if await self._write(fresh, plan, sizes):
                await self._mark_undecodable(fresh)
                return halt
            # another indexer was faster, or Redis lost its last writes: judge the same frames anew
            self._adopt(await self._writer.read_position(self._stream))
        raise IndexUnavailableError(f"{self._stream.name}: another indexer keeps changing this stream")

    def _adopt(self, position: StreamPosition | None) -> None:
        if position is None:
            raise StreamForgottenError(f"Redis does not know {self._stream.name} any more; it was emptied")
        self.position = position

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
            if verdict is Verdict.APPLY:
                fresh.append(batch)
                last_seq, last_ts = seq, max(ts, last_ts)
            elif verdict is not Verdict.DUPLICATE:
                return fresh, Halt(verdict=verdict, frames=[later.frame for later in batches[index:]])
        return fresh, None

    async def _plan(self, fresh: Sequence[_Batch], sizes: dict[str, int]) -> Plan:
        events: list[Event] = [event for batch in fresh for event in batch.decoded.events]
        unknown = parents_to_look_up(events, known=self._known)
        if unknown:
            self._known.update(await self._writer.find_block_keys(self._stream, unknown))
        return plan_change(events, known=self._known, roots=self._roots, block_sizes=sizes)

    async def _write(self, fresh: Sequence[_Batch], plan: Plan, sizes: dict[str, int]) -> bool:
        last = fresh[-1].frame
        last_ts = max(self.position.last_ts, *(batch.decoded.ts for batch in fresh))
        change = IndexChange(
            epoch=self.position.epoch,
            previous_seq=self.position.last_seq,
            last_seq=last.seq,
            last_ts=last_ts,
            last_crc=crc32(last.payload),
            operations=tuple(plan.operations),
        )
        applied = await self._writer.apply(self._stream, change)
        if applied is None:
            return False
        cleared = any(isinstance(operation, Clear) for operation in plan.operations)
        self.position = replace(
            self.position,
            epoch=applied.epoch,
            last_seq=change.last_seq,
            last_ts=change.last_ts,
            last_crc=change.last_crc,
            degraded="" if cleared else self.position.degraded,  # from a reset on we know all there is
            block_sizes=sizes,
        )
        self._forget_oldest()
        self._count(fresh, plan, left_out=applied.left_out)
        return True

    async def _mark_undecodable(self, fresh: Sequence[_Batch]) -> None:
        if not self.position.degraded and not all(batch.readable for batch in fresh):
            reason = DecodeError.reason
            self.position = replace(self.position, degraded=reason)
            await self._writer.set_state(
                self._stream, epoch=self.position.epoch, state=SourceState.DEGRADED, reason=reason, degraded=reason
            )

    def _forget_oldest(self) -> None:
        surplus = len(self._known) - KNOWN_KEYS_LIMIT
        if surplus > 0:
            for engine_hash in list(islice(self._known, surplus + KNOWN_KEYS_LIMIT // 4)):
                del self._known[engine_hash]

    def _count(self, fresh: Sequence[_Batch], plan: Plan, *, left_out: int) -> None:
        events = Counter(type(event).__name__ for batch in fresh for event in batch.decoded.events)
        not_indexed = plan.skipped + Counter({"no-free-slot": left_out})  # adding drops zeros
        undecodable = Counter(plan.not_understood)
        for batch in fresh:
            undecodable.update(batch.decoded.skipped)
        self._telemetry.applied(self._stream, batches=len(fresh), events=events, last_ts=self.position.last_ts)
        if not_indexed:
            self._telemetry.not_indexed(self._stream, reasons=not_indexed)
        if undecodable:
            self._telemetry.undecodable(self._stream, reasons=undecodable)
