"""Keeps one stream of one pod true in the index, for as long as this indexer holds the claim on it.

Subscribe first, then replay, then live, so that nothing falls between the two. Every way a stream can go wrong leads
back to one of three steps: replay from the first missing batch, a new epoch, or a new session.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from math import inf
from typing import Any
from zlib import crc32

from kv_indexer.apply.apply_events import EventApplier
from kv_indexer.events.sequence import BatchAction, Frame, Restraint, is_another_process, is_same_process
from kv_indexer.follow.catch_up import (
    TRUNCATED,
    UNANSWERED,
    CatchUp,
    LiveEvents,
    OvertakenError,
    RecoveryPolicy,
    Replay,
)
from kv_indexer.follow.stream_state import StreamState
from kv_indexer.ports import IndexerTelemetry, IndexWriter
from kv_indexer.watch.watch_index import RecordCheck
from kvmesh.blocks.source import Claim, SourceState, StreamPosition, StreamRecord
from kvmesh.errors import (
    FeedLostError,
    IndexUnavailableError,
    KvIndexerError,
    LeaseLostError,
    StreamForgottenError,
    UnstablePublisherError,
)

log = logging.getLogger(__name__)

ASKED_AT_FIRST = 2  # probes that the replay of a new session counts for, in a large fleet
DOUBLINGS = 16  # beyond these every limit is reached
FEW = 8  # batches at once that show no backlog: what a publisher sends while we apply the ones before
MISSING = "missing-batches"  # why a stream is lost that has gaps too often
BEHIND = "behind"  # why a stream is replaying whose batches come faster than they are applied


class StreamFollower:
    """Follows one stream; `run` ends when the claim is lost, or by cancellation."""

    def __init__(
        self,
        *,
        claim: Claim,
        live: LiveEvents,
        replay: Replay | None,
        applier: EventApplier,
        writer: IndexWriter,
        telemetry: IndexerTelemetry,
        policy: RecoveryPolicy,
        started_at: Callable[[], Awaitable[float | None]] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
        slowdown: Callable[[], float] = lambda: 1.0,
        start_limit: AbstractAsyncContextManager[Any] | None = None,
        registered: Callable[[float], StreamRecord | None] = lambda _: None,
        subscribe: Callable[[RecordCheck], AbstractContextManager[None]] | None = None,
        on_lost: Callable[[], None] = lambda: None,
        quiet_limit_seconds: Callable[[], float] = lambda: inf,
    ) -> None:
        """Take what the follower asks and calls.

        `started_at` returns when the publisher's process started, in its own unix seconds; None where that cannot be
        known within a bounded time. `slowdown` returns how much rarer than by the policy a quiet publisher is looked
        at. `registered` returns the registry's record of the stream, if it was read within so many seconds. With
        `subscribe` a changed record wakes the follower, so that a quiet stream sleeps until there is something to do;
        without, it looks every `idle_seconds`. `on_lost` is called when the publisher cannot be heard any more.
        `quiet_limit_seconds` returns how long a quiet publisher may be left alone at most, if that is less than by the
        policy: a few streams can all be asked often.

        `start_limit` is entered to take the stream up for the first time: when thousands begin at once, each would find
        all its deadlines passed.
        """
        self._claim = claim
        self._name = claim.stream.name
        self._live = live
        self._applier = applier
        self._writer = writer
        self._telemetry = telemetry
        self._policy = policy
        self._ask_start = started_at
        self._sleep = sleep
        self._clock = clock
        self._slowdown = slowdown
        self._start_limit = start_limit or nullcontext()
        self._registered = registered
        self._subscribe = subscribe
        self._waits_since: float | None = None  # for a batch
        self._quiet_limit_seconds = quiet_limit_seconds
        self._quiet_probes = 0  # in a row that brought nothing
        self._heard_at = -inf  # when a batch last showed that none before it is missing
        self._offset: float | None = None  # of our clock to the publisher's, without a backlog between them
        self._is_behind = False
        self._spread = crc32(self._name.encode()) / (1 << 32)
        self._catch_up = CatchUp(
            stream=claim.stream,
            live=live,
            replay=replay,
            applier=applier,
            telemetry=telemetry,
            policy=policy,
            on_doubt=self._show_replaying,
            on_restart=self._restrain_restarts,
            on_hole=self._restrain_holes,
        )
        self._state = StreamState(
            claim=claim, writer=writer, telemetry=telemetry, position=lambda: applier.position, on_lost=on_lost
        )
        self._delay = policy.retry_seconds
        self._restarts, self._gaps, self._holes = (
            self._restraint(free) for free in (policy.free_restarts, policy.free_gaps, policy.free_holes)
        )
        self._started_at: float | None = None  # of the process whose blocks the index has
        self._seen_started_at: float | None = None  # as it is now
        self._asked_started_at: float | None = None  # as it was before the replay
        self._heal_at = self._orphans_at = 0.0
        self._heal_delay, self._orphan_delay = policy.heal_seconds, policy.orphan_seconds
        self._orphans = 0
        self._said_orphans: int | None = None  # as telemetry knows it

    async def run(self) -> None:
        """Follow the stream through every failure, until the claim has passed to another indexer."""
        subscribed = self._subscribe(self._check_record) if self._subscribe else nullcontext()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(self._watch_identity(), name=f"identity-{self._name}")
            try:
                with subscribed:
                    while True:
                        await self._sleep(await self._attempt())
            except LeaseLostError as error:
                log.info("%s", error)
            watch.cancel()

    async def _attempt(self) -> float:
        """Hold one session; return how long to wait before the next."""
        try:
            await self._session()
        except LeaseLostError:
            raise
        except StreamForgottenError as error:
            # the lease book registers it again; then it is rebuilt by replay
            await self._state.show_lost(str(error), error.reason)
        except IndexUnavailableError as error:
            # what the pod says meanwhile is replayed afterwards
            await self._state.show_lost(f"cannot write the index, waiting: {error}", error.reason)
        except UnstablePublisherError as error:
            await self._state.show_lost(str(error), error.reason, is_unheard=True)
            return error.wait_seconds
        except FeedLostError as error:
            await self._state.show_lost(str(error), error.reason, is_unheard=True)
        except Exception:  # a defect must not end the other streams
            log.exception("following %s failed; starting over", self._name)
            await self._state.show_lost("a defect, see the traceback", KvIndexerError.reason)
        delay = self._delay
        self._delay = min(delay * 2, self._policy.retry_limit_seconds)
        return delay

    async def _session(self) -> None:
        try:
            async with self._start_limit:
                self._start_limit = nullcontext()
                await self._begin()
            self._delay = self._policy.retry_seconds
            self._heal_at = self._clock() + self._heal_delay
            self._offset, self._is_behind = None, False
            stale_since = self._clock()
            # of a large fleet all begin at once, and each has just been asked for what it has
            self._quiet_probes = ASKED_AT_FIRST if self._slowdown() > 1 and self._started_at is not None else 0
            while True:
                before = self._applier.position
                frames = await self._receive(stale_since)
                if frames:
                    await self._advance(frames)
                    self._note_backlog(frames)
                else:
                    await self._check_step()
                stale_since = await self._check_progress(before, stale_since)
                await self._look_after()
                self._show_orphans()
                await self._show_caught_up()
        finally:
            self._live.close()

    async def _begin(self) -> None:
        await self._applier.resume()
        self._state.note_recorded()
        await self._live.connect()
        await self._show_replaying()
        await self._take_up()
        self._heard_at = -inf if self._catch_up.trouble else self._clock()
        await self._show_caught_up()

    async def _receive(self, stale_since: float) -> Sequence[Frame]:
        self._waits_since = self._clock()
        try:
            return await self._live.receive(timeout_seconds=self._patience(stale_since))
        finally:
            self._waits_since = None

    def _patience(self, stale_since: float) -> float:
        """Return how long to wait for a batch: until something else is due."""
        if self._subscribe is None:
            return self._idle_seconds()
        due = stale_since + self._probe_seconds()
        if self._may_heal():
            due = min(due, self._heal_at)
        if self._applier.orphans:
            due = min(due, self._orphans_at)
        now = self._clock()
        if (unconfirmed_at := self._unconfirmed_at()) > now:
            due = min(due, unconfirmed_at)
        return max(due - now, 0.0)

    def _check_record(self, record: StreamRecord | None, asked_at: float) -> bool:
        """Wake up if the record, asked for while we wait, is not what we have written; tell whether it is.

        A record that was asked for before may be older than what we have written since: then the next one counts.
        """
        is_ours = self._is_ours(record)
        if not is_ours and self._waits_since is not None and asked_at > self._waits_since:
            self._live.interrupt()
        return is_ours

    async def _check_step(self) -> None:
        if self._is_ours(self._registered(self._idle_seconds())):
            return  # thousands of quiet streams are read at once, not one by one
        is_in_step = await self._applier.is_in_step()
        self._state.note_recorded()
        if not is_in_step:
            await self._show_replaying()  # what it has now may be older than what we had
            await self._catch_up.complete(probe=True)

    def _is_ours(self, record: StreamRecord | None) -> bool:
        position = self._applier.position
        return (
            record is not None
            and (record.epoch, record.last_seq) == (position.epoch, position.last_seq)
            and (record.epoch, record.state, record.reason) == self._state.recorded
        )

    async def _check_progress(self, before: StreamPosition, stale_since: float) -> float:
        """Ask who is there after a while without a new batch; return since when there is none.

        A lost last batch has no follower that would show the gap, and what another process says may look like what is
        known already. Once a probe has brought nothing, neither is likely while the connection holds and the start time
        stays the same: then the next ones are rarer.
        """
        now, position = self._clock(), self._applier.position
        if (position.epoch, position.last_seq) != (before.epoch, before.last_seq):
            self._quiet_probes, self._heard_at = 0, now
            return now
        if now - stale_since < self._probe_seconds():
            return stale_since
        await self._beside_live(self._catch_up.complete(probe=True, beside_live=True))
        position = self._applier.position
        is_quiet = (position.epoch, position.last_seq) == (before.epoch, before.last_seq)
        self._quiet_probes = self._quiet_probes + 1 if is_quiet else 0
        if not is_quiet or not self._catch_up.trouble:
            self._heard_at = self._clock()
        return self._clock()

    def _probe_seconds(self) -> float:
        """Return after how long without a batch the publisher is asked."""
        # thousands that began at once must not ask at once: none later than it would, the more the more spread
        early = self._spread * (1 - 1 / self._slowdown()) / 2
        first = self._idle_seconds() * self._policy.idle_probes
        policy = self._policy
        limit = policy.quiet_probe_limit if self._started_at is not None else policy.unknown_probe_limit
        longest = max(min(first * limit, self._quiet_limit_seconds()), first)
        return (1 - early) * min(first * (1 << min(self._quiet_probes, DOUBLINGS)), longest)

    async def _beside_live(self, asking: Awaitable[None]) -> None:
        """Ask the publisher while batches come; a gap or a restart that they show is dealt with first."""
        try:
            await asking
        except OvertakenError as overtaken:
            await self._advance(overtaken.frames)

    def _note_backlog(self, frames: Sequence[Frame]) -> None:
        """Find out by the publisher's own times whether its batches have to wait for us.

        Clocks may differ: what a batch takes where nothing waits is compared with what it takes now.
        """
        last_ts = self._applier.position.last_ts
        offset = self._clock() - last_ts
        if len(frames) + self._live.waiting <= FEW or self._offset is None or not last_ts:
            self._offset, self._is_behind = (offset if last_ts else None), False
        elif offset - self._offset > self._policy.behind_seconds:
            self._is_behind = True

    async def _take_up(self) -> None:
        """Find out whether the publisher is still the one whose blocks the index has, and get what is missing."""
        position = self._applier.position
        before = position.started_at if position.started_at is not None else self._started_at
        now = self._seen_started_at = self._asked_started_at = await self._ask_started_at()
        if is_another_process(before, now):
            await self._catch_up.restart("its process has another start time")
        else:
            same = is_same_process(before, now)
            epoch = position.epoch
            await self._catch_up.complete(probe=True, same_process=same)
            unproven = self._catch_up.trouble
            if unproven and not same and position.last_seq >= 0 and self._applier.position.epoch == epoch:
                await self._catch_up.void(unproven)
        await self._note_started_at()

    async def _advance(self, frames: Sequence[Frame]) -> None:
        while frames:
            halt = await self._applier.apply(frames)
            if halt is None:
                return
            frames = halt.frames
            await self._show_replaying()  # what is claimed now may be gone
            if halt.action is BatchAction.RESTART:
                await self._catch_up.restart(halt.sign)
                continue
            wait = self._gaps.disturb(now=self._clock())
            if wait:  # what comes meanwhile waits in the socket: one replay may fill many gaps
                await self._state.show(SourceState.LOST, MISSING)
                await self._sleep(wait)
            await self._catch_up.close_gap(frames[0].seq)
            # what was let pass is older than where we are now, and would look like another process's
            frames = [each for each in frames if each.seq > self._applier.position.last_seq]

    async def _look_after(self) -> None:
        """Do what is due beside the batches."""
        if is_another_process(self._started_at, self._seen_started_at):
            await self._catch_up.restart("its process has another start time")
        now = self._clock()
        if now >= self._orphans_at and self._applier.orphans:
            await self._adopt_orphans(now)
        if now >= self._heal_at and self._may_heal():
            await self._beside_live(self._catch_up.heal())
            self._heal_delay = min(self._heal_delay * 2, self._policy.heal_limit_seconds)
            self._heal_at = self._clock() + self._heal_delay

    def _may_heal(self) -> bool:
        return self._catch_up.trouble == UNANSWERED or self._applier.position.degraded in (TRUNCATED, UNANSWERED)

    async def _adopt_orphans(self, now: float) -> None:
        """Look for lost parents elsewhere, ever more rarely while that leads nowhere and nothing new waits."""
        waiting = self._applier.orphans
        if await self._applier.adopt_orphans() or waiting > self._orphans:
            self._orphan_delay = self._policy.orphan_seconds
        else:
            self._orphan_delay = min(self._orphan_delay * 2, self._policy.orphan_limit_seconds)
        self._orphans = self._applier.orphans
        self._orphans_at = now + self._orphan_delay

    async def _watch_identity(self) -> None:
        while self._ask_start is not None:
            await asyncio.sleep(self._policy.identity_seconds * self._slowdown())
            seen = await self._ask_started_at()
            if seen is not None:
                self._seen_started_at = seen
                if is_another_process(self._started_at, seen):
                    self._live.interrupt()

    def _idle_seconds(self) -> float:
        return self._policy.idle_seconds * self._slowdown()

    async def _ask_started_at(self) -> float | None:
        return await self._ask_start() if self._ask_start is not None else None

    async def _note_started_at(self) -> None:
        """Record whose blocks the index has from here on: not whose start time came in during the replay."""
        seen = self._asked_started_at
        if seen is not None and is_another_process(self._applier.position.started_at, seen) | (
            self._applier.position.started_at is None and self._started_at is None
        ):
            await self._writer.set_started_at(self._claim, started_at=seen)
        self._started_at = seen if seen is not None else self._started_at

    async def _restrain_restarts(self) -> None:
        await self._show_replaying()
        self._asked_started_at = self._seen_started_at
        await self._note_started_at()  # first, or else the same sign would begin the next epoch, too
        wait = self._restarts.disturb(now=self._clock())
        if wait:
            raise UnstablePublisherError(f"{self._name} keeps contradicting itself", wait_seconds=wait)

    async def _restrain_holes(self) -> None:
        """Let batches pass where gaps void all that is claimed again and again: each costs all readers a look."""
        await self._show_replaying()
        wait = self._holes.disturb(now=self._clock())
        if not wait:
            return
        await self._state.show(SourceState.LOST, MISSING)
        until, last_seq = self._clock() + wait, self._applier.position.last_seq
        while (left := until - self._clock()) > 0:
            for frame in await self._live.receive(timeout_seconds=left):
                last_seq = frame.seq
        if last_seq != self._applier.position.last_seq:
            await self._catch_up.skip_to(last_seq)

    def _restraint(self, free: int) -> Restraint:
        policy = self._policy
        return Restraint(
            free=free,
            first_seconds=policy.retry_seconds,
            limit_seconds=policy.unstable_limit_seconds,
            calm_seconds=policy.calm_seconds,
        )

    async def _show_caught_up(self) -> None:
        degraded = self._applier.position.degraded or self._catch_up.trouble
        if self._is_behind:
            await self._state.show(SourceState.REPLAYING, BEHIND)
        elif self._unconfirmed_at() <= self._clock():
            await self._state.show(SourceState.UNCONFIRMED, self._catch_up.trouble)
        else:
            await self._state.show(SourceState.DEGRADED if degraded else SourceState.LIVE, degraded)

    def _unconfirmed_at(self) -> float:
        """Return when what is claimed becomes unconfirmed unless a batch comes: its last ones may have been lost."""
        if not self._catch_up.trouble or not self._applier.position.block_sizes:
            return inf
        return self._heard_at + self._policy.unconfirmed_seconds

    async def _show_replaying(self) -> None:
        await self._state.show(SourceState.REPLAYING)

    def _show_orphans(self) -> None:
        waiting = self._applier.orphans
        if waiting != self._said_orphans:
            self._said_orphans = waiting
            self._telemetry.orphans(self._claim.stream, waiting=waiting)
