"""Keeps one stream's entries in the index correct, for as long as this indexer holds the claim on it.

Subscribe first, then replay, then live, so that nothing is lost in between. Every failure of a stream leads back to one
of three steps: replay from the first missing batch, a new epoch, or a new session.
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

ASKED_AT_FIRST = 2  # probes that a new session's replay replaces, in a large fleet
DOUBLINGS = 16  # every limit is reached by then
FEW = 8  # up to this many batches at once are no backlog: the publisher sent them while we applied the last ones
MISSING = "missing-batches"  # why a stream with too frequent gaps is lost
BEHIND = "behind"  # why a stream is replaying: its batches arrive faster than they are applied


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
        """Take the follower's callbacks and sources.

        `started_at` returns when the publisher's process started, in unix seconds by its own clock, or None if it
        cannot tell within a bounded time. `slowdown` is the factor by which checks of a quiet publisher are rarer than
        in the policy. `registered` returns the registry's record of the stream, if read within the given number of
        seconds. With `subscribe` a changed record wakes the follower, so that a quiet stream sleeps until there is
        work; without, the follower checks every `idle_seconds`. `on_lost` is called when the publisher can no longer be
        heard. `quiet_limit_seconds` returns a limit on the time between two probes of a quiet publisher, if shorter
        than the policy's: a few streams can all be probed often.

        `start_limit` is entered to start the stream for the first time: if thousands started at once, all deadlines of
        each would pass before its turn.
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
        self._quiet_probes = 0  # consecutive probes without news
        self._heard_at = -inf  # when a batch last showed that no earlier one is missing
        self._offset: float | None = None  # of our clock to the publisher's, measured without a backlog
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
        self._seen_started_at: float | None = None  # as last reported
        self._asked_started_at: float | None = None  # as it was before the replay
        self._heal_at = self._orphans_at = 0.0
        self._heal_delay, self._orphan_delay = policy.heal_seconds, policy.orphan_seconds
        self._orphans = 0
        self._said_orphans: int | None = None  # as the telemetry shows it

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
        """Run one session; return how long to wait before the next."""
        try:
            await self._session()
        except LeaseLostError:
            raise
        except StreamForgottenError as error:
            # the lease book registers it again; then it is rebuilt by replay
            await self._state.show_lost(str(error), error.reason)
        except IndexUnavailableError as error:
            # the pod's batches of the meantime are replayed afterwards
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
            # a large fleet starts all streams at once, and each has just been probed by its replay
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
        """Wake up if the record, read while we wait, differs from the one that we wrote; tell whether it is ours.

        A record read before we began to wait may be older than our last write: then the next record counts.
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
            await self._show_replaying()  # the index may now have an older state than ours
            await self._catch_up.complete(probe=True)

    def _is_ours(self, record: StreamRecord | None) -> bool:
        position = self._applier.position
        return (
            record is not None
            and (record.epoch, record.last_seq) == (position.epoch, position.last_seq)
            and (record.epoch, record.state, record.reason) == self._state.recorded
        )

    async def _check_progress(self, before: StreamPosition, stale_since: float) -> float:
        """Probe the publisher after a while without a new batch; return since when there has been none.

        If the last batch was lost, no later one shows the gap; and the batches of another process may look like known
        ones. Once a probe has brought nothing, both are unlikely as long as the connection holds and the start time
        stays the same: further probes are rarer.
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
        # streams that started together must not probe together: some probe earlier, the more spread the larger the
        # fleet
        early = self._spread * (1 - 1 / self._slowdown()) / 2
        first = self._idle_seconds() * self._policy.idle_probes
        policy = self._policy
        limit = policy.quiet_probe_limit if self._started_at is not None else policy.unknown_probe_limit
        longest = max(min(first * limit, self._quiet_limit_seconds()), first)
        return (1 - early) * min(first * (1 << min(self._quiet_probes, DOUBLINGS)), longest)

    async def _beside_live(self, asking: Awaitable[None]) -> None:
        """Probe the publisher while live batches are applied; a gap or a restart that they show is handled first."""
        try:
            await asking
        except OvertakenError as overtaken:
            await self._advance(overtaken.frames)

    def _note_backlog(self, frames: Sequence[Frame]) -> None:
        """Compare the delay by the publisher's clock, which may differ, with that of a batch that did not wait."""
        last_ts = self._applier.position.last_ts
        offset = self._clock() - last_ts
        if len(frames) + self._live.waiting <= FEW or self._offset is None or not last_ts:
            self._offset, self._is_behind = (offset if last_ts else None), False
        elif offset - self._offset > self._policy.behind_seconds:
            self._is_behind = True

    async def _take_up(self) -> None:
        """Find out whether the publisher is still the process whose blocks the index has, and fetch missing batches."""
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
            await self._show_replaying()  # current claims may be stale
            if halt.action is BatchAction.RESTART:
                await self._catch_up.restart(halt.sign)
                continue
            wait = self._gaps.disturb(now=self._clock())
            if wait:  # batches that arrive meanwhile wait in the socket: one replay may fill many gaps
                await self._state.show(SourceState.LOST, MISSING)
                await self._sleep(wait)
            await self._catch_up.close_gap(frames[0].seq)
            # older batches than the position would look like another process's
            frames = [each for each in frames if each.seq > self._applier.position.last_seq]

    async def _look_after(self) -> None:
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
        """Search for missing parents elsewhere, ever more rarely while it is fruitless and no new orphans come."""
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
        """Record which process's blocks the index has from now on; start times seen during the replay do not count."""
        seen = self._asked_started_at
        if seen is not None and is_another_process(self._applier.position.started_at, seen) | (
            self._applier.position.started_at is None and self._started_at is None
        ):
            await self._writer.set_started_at(self._claim, started_at=seen)
        self._started_at = seen if seen is not None else self._started_at

    async def _restrain_restarts(self) -> None:
        await self._show_replaying()
        self._asked_started_at = self._seen_started_at
        await self._note_started_at()  # first, otherwise the same start time would also begin the next epoch
        wait = self._restarts.disturb(now=self._clock())
        if wait:
            raise UnstablePublisherError(f"{self._name} keeps contradicting itself", wait_seconds=wait)

    async def _restrain_holes(self) -> None:
        """Skip batches if gaps void all claims again and again: each epoch makes all readers read the registry."""
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
        """Return when the claims become unconfirmed if no batch comes: the last batches may have been lost."""
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
