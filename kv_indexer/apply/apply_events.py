"""One stream's frames -> ordered events -> atomic index changes. Read this module first.

`follow_stream` and `catch_up` feed it live and replayed frames alike. It makes no decision about sockets and knows
Redis only as `ports.IndexWriter`.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice

from msgspec.structs import replace

from kv_indexer.apply.batches import (
    BLOCKS_A_CHANGE,
    TURN_BLOCKS,
    Batch,
    FailedBatches,
    doubt_of,
    frame_groups,
    is_long,
    open_batch,
    portions,
    unreadable_batch,
)
from kv_indexer.apply.change_plan import Plan, plan_adoption, plan_change
from kv_indexer.apply.hit_reports import GROUP_SHIFT, first_block, first_blocks_to_look_up
from kv_indexer.apply.look_ups import hashes_to_look_up
from kv_indexer.apply.orphans import OrphanTable, ParentSearch
from kv_indexer.apply.pod_shares import PodShares
from kv_indexer.apply.store_rules import SIZE_CHANGED, first_size_change
from kv_indexer.apply.stream_context import StreamContext
from kv_indexer.events.sequence import BatchAction, Frame, judge
from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kvmesh.blocks.block_keys import RootKeys, root_key
from kvmesh.blocks.cache_groups import DENSE_KINDS, CacheGroup, describe, has_rule
from kvmesh.blocks.events import Event
from kvmesh.blocks.index_changes import Clear, IndexChange
from kvmesh.blocks.source import Claim, StreamPosition
from kvmesh.errors import (
    DecodeError,
    IndexRefusesError,
    IndexUnavailableError,
    LeaseLostError,
    StreamForgottenError,
)

log = logging.getLogger(__name__)

OUT_OF_STEP_LIMIT = 5  # give up if other writers overtake us this often in a row
RECENT_LIMIT = 1024  # batches whose checksum is remembered
WITNESS_LIMIT = 64  # of our own blocks, compared with another stream's
PARENTS_LIMIT = 64  # per search
OLD_NUMBER = "an old number with a later time"
OTHER_CONTENT = "an old number with other content"
OTHER_SIZE = "another block size"
BATCH_SKIPPED = "batch-skipped"  # why a source is degraded after a batch that failed twice was skipped
SHOWN_LIMIT = 300  # characters of an error that the log repeats


def root_keys(*, hash_seed: str, model: str) -> RootKeys:
    """Return the root keys of one model, remembered by adapter and salt."""

    @lru_cache(maxsize=1024)
    def root(lora: str | None, cache_salt: str | None) -> bytes:
        return root_key(hash_seed=hash_seed, model=model, lora=lora, cache_salt=cache_salt)

    return root


@dataclass(frozen=True, slots=True, kw_only=True)
class Halt:
    """The frames at which `apply` stopped: a gap or a restart comes first."""

    action: BatchAction  # GAP or RESTART
    frames: Sequence[Frame]  # from the offending one on
    sign: str = ""  # the evidence of a restart


class _SizeChangedError(Exception):
    """A long batch turned out to come from another process."""


class EventApplier:
    """Applies one stream's batches exactly once and in order.

    Everything that must survive a crash is in Redis, with two exceptions. Lost orphans only cost hits. Whether the
    publisher reports hits as stores (`apply.hit_reports`) is learned again from a report of several blocks; a single
    first block reported before that is counted twice, so that it may stay claimed after its removal, until a reset.
    """

    def __init__(
        self,
        *,
        claim: Claim,
        roots: RootKeys,
        writer: IndexWriter,
        telemetry: IndexerTelemetry,
        namespace: str = "",
        shares: PodShares | None = None,
    ) -> None:
        """`namespace` is the pool's, if the stream belongs to one (see `StreamPosition`); `shares` are the process's.

        `close` gives the stream's part of the shares back.
        """
        self._claim = claim
        self._namespace = namespace
        self._stream = claim.stream
        self._roots = roots
        self._writer = writer
        self._telemetry = telemetry
        self._shares = shares or PodShares()
        self._share = self._shares.join(self._stream.endpoint)
        self._orphans = OrphanTable(pod=self._stream.endpoint, shares=self._shares.orphans)
        self._context = StreamContext(orphans=self._orphans)
        self._recent: dict[int, int] = {}  # sequence number -> checksum of the applied payload
        self._failed = FailedBatches()
        self._parents = ParentSearch(stream=self._stream, writer=writer)
        self.position = StreamPosition(epoch=0)

    @property
    def orphans(self) -> int:
        """The number of stores that wait for their parents."""
        return len(self._orphans)

    def close(self) -> None:
        """Give back the stream's part of its pod's share."""
        self._orphans.clear()
        self._shares.leave(self._stream.endpoint)

    async def resume(self) -> None:
        """Resume at the position in the index. Raise StreamForgottenError, IndexUnavailableError.

        Void the entries under the keys of another pool or model: no lookup would find them, and later stores would be
        chained to them.
        """
        await self._find_place()
        if self._lacks_groups():
            log.warning("%s: its other KV cache groups are not indexed yet; beginning anew", self._stream.name)
            await self.begin_epoch()
        before = self.position.namespace
        if before == self._namespace:
            return
        if self.position.last_seq >= 0:
            log.warning("%s belongs to another pool or model than before; beginning anew", self._stream.name)
            await self.begin_epoch()
        await self._writer.set_namespace(self._claim, namespace=self._namespace)
        self.position = replace(self.position, namespace=self._namespace)

    def _lacks_groups(self) -> bool:
        """Tell whether the stream was last followed by an indexer that left out all groups but full attention."""
        known = {tier.partition("/")[2] for tier in self.position.block_sizes}
        groups = [group for group in self.position.groups.values() if group.kind not in DENSE_KINDS and has_rule(group)]
        return any(describe(group) not in known for group in groups)

    async def is_in_step(self) -> bool:
        """Tell whether the position in the index is still ours; if not, continue from the one in the index.

        The position changes without us if someone clears the stream by hand, or if Redis fails over to a lagging
        replica. Raise StreamForgottenError if the stream is gone.
        """
        before = self.position
        self._adopt(await self._writer.read_position(self._stream))
        now = self.position
        if (now.epoch, now.last_seq, now.part) == (before.epoch, before.last_seq, 0):
            return True
        await self._settle()
        return False

    async def begin_epoch(self, *, last_seq: int = -1, degraded: str = "") -> None:
        """Void all claims of the stream; `degraded` names the gap of the new epoch."""
        self._adopt(
            await self._writer.begin_epoch(
                self._claim, expected_epoch=self.position.epoch, last_seq=last_seq, degraded=degraded
            )
        )
        self._forget()

    def accept_block_sizes(self) -> None:
        """Treat a change of block size as normal for this publisher, no longer as a sign of a restart."""
        self._context.mixes_sizes = True

    async def apply(self, frames: Sequence[Frame]) -> Halt | None:
        """Apply the frames that follow the position, drop known ones, and stop at the first gap or restart.

        If a batch cannot be applied, its error is raised. If the index was not at fault and the batch fails again, it
        is skipped and all claims of the stream are voided: its removals are unknown. Raise IndexUnavailableError,
        LeaseLostError, or StreamForgottenError if the index has lost the stream.
        """
        if len(frames) == 1:
            return await self._apply(frames)
        done = 0
        for group in frame_groups(frames):
            halt = await self._apply(group)
            done += len(group)
            if halt is not None:
                return Halt(action=halt.action, frames=[*halt.frames, *frames[done:]], sign=halt.sign)
        return None

    async def adopt_orphans(self) -> bool:
        """Look in other streams for parents that ours never reported; tell whether any was found.

        Do nothing while another stream is searching: a waiting search would delay this stream's events.
        """
        orphans, witnesses, search = self._orphans, self._witnesses(), self._shares.search
        if not len(orphans) or not witnesses or self.position.last_crc is None or search.locked():
            return False
        async with search:
            self._context.keys.update(await self._parents.find(orphans.some_parents(PARENTS_LIMIT), witnesses))
        plan = plan_adoption(self._context)
        if not plan.operations:
            return False
        if not await self._write_rest(plan, (), self._context.groups):
            orphans.clear()  # out of step; the next check of the position shows it
            return False
        return True

    def _witnesses(self) -> dict[int, bytes]:
        """Return the newest first blocks: we have computed their keys from their own tokens."""
        keys, newest = self._context.keys, reversed(self._context.first_blocks)
        firsts = (each for each in newest if not each >> GROUP_SHIFT)  # other streams are searched in group 0 alone
        return dict(islice(((each, keys[each]) for each in firsts if each in keys), WITNESS_LIMIT))

    async def _find_place(self) -> None:
        self._adopt(await self._writer.read_position(self._stream))
        await self._settle()

    async def _settle(self) -> None:
        self._forget()
        if self.position.part:
            log.warning("%s: a long batch was applied in part; beginning anew", self._stream.name)
            await self.begin_epoch()

    def _adopt(self, position: StreamPosition | None) -> None:
        if position is None:
            raise StreamForgottenError(f"Redis does not know {self._stream.name} any more; it was emptied")
        self.position = position

    def _forget(self) -> None:
        position = self.position
        self._orphans.clear()
        self._context = StreamContext(
            block_sizes=dict(position.block_sizes),
            groups=position.groups,
            orphans=self._orphans,
            mixes_sizes=self._context.mixes_sizes,
        )
        self._recent.clear()
        self._parents.forget()

    async def _apply(self, frames: Sequence[Frame]) -> Halt | None:
        if is_long(frames[0]) or self._share.streams == 1:  # long: takes turns itself; single: no one waits
            return await self._apply_batches([self._open(frame) for frame in frames])
        async with self._share.turn:
            return await self._apply_batches([self._open(frame) for frame in frames])

    async def _apply_batches(self, batches: Sequence[Batch]) -> Halt | None:
        if self.position.part:  # a change of block size within a long batch ended it early
            await self._settle()
        for _ in range(OUT_OF_STEP_LIMIT):
            fresh, halt = self._judge(batches)
            fresh, halt = self._stop_at_other_size(fresh, halt)
            try:
                if await self._write_all(fresh):
                    return halt
            except _SizeChangedError:
                return self._other_size(fresh, halt)
            # Redis lost its last writes, or the stream was cleared by hand: judge the same frames again
            await self._find_place()
        raise IndexUnavailableError(f"{self._stream.name}: something keeps changing this stream")

    def _open(self, frame: Frame) -> Batch:
        try:
            return open_batch(frame)
        except DecodeError as error:
            log.warning("batch %d of %s cannot be read: %s", frame.seq, self._stream.name, error)
        except Exception:  # without this, a defect would fail the same batch at each replay
            log.exception("batch %d of %s cannot be read", frame.seq, self._stream.name)
        self._telemetry.undecodable(self._stream, reasons={DecodeError.reason: 1})
        return unreadable_batch(frame)

    def _judge(self, batches: Sequence[Batch]) -> tuple[list[Batch], Halt | None]:
        last_seq, last_ts = self.position.last_seq, self.position.last_ts
        fresh: list[Batch] = []
        for index, batch in enumerate(batches):
            seq, ts = batch.frame.seq, batch.ts
            verdict = judge(seq=seq, ts=ts, last_seq=last_seq, last_ts=last_ts)
            sign = OLD_NUMBER if verdict is BatchAction.RESTART else ""
            if verdict is BatchAction.DUPLICATE and self._recent.get(seq) not in (None, batch.crc):
                verdict, sign = BatchAction.RESTART, OTHER_CONTENT
            if verdict is BatchAction.APPLY:
                fresh.append(batch)
                last_seq, last_ts = seq, max(ts, last_ts)
            elif verdict is not BatchAction.DUPLICATE:
                return fresh, Halt(action=verdict, frames=_frames(batches[index:]), sign=sign)
        return fresh, None

    def _stop_at_other_size(self, fresh: list[Batch], halt: Halt | None) -> tuple[list[Batch], Halt | None]:
        if self._context.mixes_sizes:
            return fresh, halt
        index = first_size_change((batch.events for batch in fresh), self._context)
        if index is None:
            return fresh, halt
        return fresh[:index], self._other_size(fresh[index:], halt)

    def _other_size(self, later: Sequence[Batch], halt: Halt | None) -> Halt:
        self._telemetry.not_indexed(self._stream, reasons={SIZE_CHANGED: 1})
        frames = _frames(later) + (list(halt.frames) if halt else [])
        return Halt(action=BatchAction.RESTART, frames=frames, sign=OTHER_SIZE)

    async def _write_all(self, fresh: Sequence[Batch]) -> bool:
        """Apply these batches in several short changes; return False if the position in the index is another."""
        for portion in portions(fresh, alone=self._failed.numbers):
            try:
                is_applied = await self._write(portion)
            except (LeaseLostError, StreamForgottenError, _SizeChangedError):
                raise
            except Exception as error:  # the same error will come again when the batch is replayed
                await self._note_failure(portion, error)
                continue
            if not is_applied:
                return False
            self._failed.forgive(portion)
        return True

    async def _write(self, batches: Sequence[Batch]) -> bool:
        """Apply these batches; return False if the position in the index is another."""
        groups, plan = self._context.groups, Plan()
        if batches[0].rest is not None:
            return await self._write_long(batches[0], plan)
        events = batches[0].events if len(batches) == 1 else [event for batch in batches for event in batch.events]
        await self._plan(events, plan)
        return await self._write_rest(plan, batches, groups)

    async def _write_long(self, batch: Batch, plan: Plan) -> bool:
        groups = self._context.groups
        for events in batch.turns():
            if not self._context.mixes_sizes and first_size_change((events,), self._context) is not None:
                raise _SizeChangedError
            async with self._share.turn:
                await self._plan(events, plan)
                # write everything: the next turn's look-ups must find it in the index
                if not await self._write_parts(plan, within=0):
                    return False
            await asyncio.sleep(0)  # even if there was nothing to write
        async with self._share.turn:
            return await self._write_rest(plan, (batch,), groups)

    async def _write_parts(self, plan: Plan, *, within: int) -> bool:
        """Apply the plan until at most `within` blocks are left; False if the position in the index is another."""
        while plan.cost > within:
            operations = plan.cut(TURN_BLOCKS)
            at = self.position
            change = IndexChange(
                epoch=at.epoch,
                previous_seq=at.last_seq,
                last_seq=at.last_seq,
                previous_part=at.part,
                part=at.part + 1,
                last_ts=at.last_ts,
                last_crc=at.last_crc or 0,
                operations=tuple(operations),
            )
            if not await self._change(change, plan):
                return False
        return True

    async def _plan(self, events: Sequence[Event], plan: Plan) -> None:
        context = self._context
        context.is_exact = not self.position.degraded
        unknown, first_blocks = hashes_to_look_up(events, context), first_blocks_to_look_up(events, context)
        if unknown or first_blocks:
            await self._look_up(unknown, first_blocks)
        plan_change(events, context=context, roots=self._roots, plan=plan)

    async def _look_up(self, unknown: set[tuple[int, int]], first_blocks: set[tuple[int, int]]) -> None:
        """Look up these (engine hash, group) in the index, group by group, because block sizes may differ."""
        context = self._context
        by_group: dict[int, set[tuple[int, int]]] = {}
        for name in unknown | first_blocks:
            by_group.setdefault(name[1], set()).add(name)
        for number, names in by_group.items():
            found = await self._writer.find_block_keys(self._stream, names)
            group = context.groups.get(number)
            (context.keys if group is None else context.chain(group.block_size)).update(found)
            for engine_hash, of_group in first_blocks:
                if of_group == number and engine_hash in found:
                    context.first_blocks[first_block(engine_hash, number)] = 1

    async def _write_rest(self, plan: Plan, fresh: Sequence[Batch], groups: Mapping[int, CacheGroup]) -> bool:
        """Without batches, the plan is of adopted orphans. Return False if the position in the index is another."""
        if plan.cost > BLOCKS_A_CHANGE and not await self._write_parts(plan, within=BLOCKS_A_CHANGE):
            return False
        at, context, last = self.position, self._context, fresh[-1] if fresh else None
        change = IndexChange(
            epoch=at.epoch,
            previous_seq=at.last_seq,
            last_seq=last.frame.seq if last else at.last_seq,
            previous_part=at.part,
            last_ts=max([at.last_ts, *(batch.ts for batch in fresh)]),
            last_crc=last.crc if last else at.last_crc or 0,
            operations=tuple(plan.operations),
            events=sum([batch.count for batch in fresh]),
            groups=context.groups if context.groups is not groups else None,
            degraded=doubt_of(fresh, plan),
        )
        if not await self._change(change, plan):
            return False
        for batch in fresh:
            self._recent[batch.frame.seq] = batch.crc
        context.forget_oldest(known_keys=self._share.known_keys)
        for seq in list(islice(self._recent, max(len(self._recent) - RECENT_LIMIT, 0))):
            del self._recent[seq]
        self._count(fresh, plan)
        if plan.left_out and not self.position.degraded:
            await self._read_doubt()
        return True

    async def _change(self, change: IndexChange, plan: Plan) -> bool:
        position = self.position
        applied = await self._writer.apply(self._claim, change)
        if applied is None:
            return False
        if applied.epoch != position.epoch:
            self._parents.forget()
        for reason, count in applied.left_out.items():
            plan.left_out[reason] = plan.left_out.get(reason, 0) + count
        cleared = any(isinstance(operation, Clear) for operation in change.operations)
        self.position = replace(
            position,
            epoch=applied.epoch,
            last_seq=change.last_seq,
            part=change.part,
            last_ts=change.last_ts,
            last_crc=change.last_crc,
            # from a reset on we know everything
            degraded=("" if cleared else position.degraded) or change.degraded,
            block_sizes=dict(self._context.block_sizes),
            groups=self._context.groups,
        )
        return True

    async def _note_failure(self, portion: Sequence[Batch], error: Exception) -> None:
        if isinstance(error, IndexUnavailableError) and not await self._is_index_well(error):
            raise error
        if not self._failed.is_poison(portion):
            raise error
        (batch,) = portion
        log.error(
            "%s: batch %d could not be applied again and is skipped; all blocks of the stream are let go: %s",
            self._stream.name,
            batch.frame.seq,
            repr(error)[:SHOWN_LIMIT],
        )
        await self.begin_epoch(last_seq=batch.frame.seq - 1, degraded=BATCH_SKIPPED)
        plan = Plan(skipped=Counter({BATCH_SKIPPED: 1}))
        if not await self._write_rest(plan, portion, self._context.groups):
            raise error

    async def _is_index_well(self, error: IndexUnavailableError) -> bool:
        """Tell whether the index still works, except for the change that has just failed."""
        if isinstance(error, IndexRefusesError):
            return False
        try:
            return await self._writer.read_position(self._stream) is not None
        except IndexUnavailableError:
            return False

    async def _read_doubt(self) -> None:
        """Read the `degraded` mark after the index left operations out: only it knows if a clear has reset the mark."""
        now = await self._writer.read_position(self._stream)
        if now is not None and now.epoch == self.position.epoch:
            self.position = replace(self.position, degraded=now.degraded)

    def _count(self, fresh: Sequence[Batch], plan: Plan) -> None:
        # once per batch: a Counter that stays empty costs as much as the rest
        events = fresh[0].kinds if len(fresh) == 1 else {}
        undecodable = plan.not_understood
        for batch in fresh:
            for kind, count in batch.kinds.items() if len(fresh) > 1 else ():
                events[kind] = events.get(kind, 0) + count
            if batch.skipped:
                undecodable = undecodable + Counter(batch.skipped)
        not_indexed = plan.skipped + Counter(plan.left_out) if plan.left_out else plan.skipped
        self._telemetry.applied(self._stream, batches=len(fresh), events=events, last_ts=self.position.last_ts)
        if not_indexed:
            self._telemetry.not_indexed(self._stream, reasons=not_indexed)
        if undecodable:
            self._telemetry.undecodable(self._stream, reasons=undecodable)


def _frames(batches: Sequence[Batch]) -> list[Frame]:
    return [batch.frame for batch in batches]
