"""Brings one stream up to date by replay, however badly the replay socket behaves.

It always ends, after a bounded number of requests without progress. Batches that are missing then are lost for good,
perhaps with removals among them: no older block can be trusted any more, so a new epoch begins.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from kv_indexer.apply.apply_events import OTHER_SIZE, EventApplier
from kv_indexer.events.sequence import BatchAction, Frame, Probe, ReplayAnswer, judge_probe
from kv_indexer.ports import IndexerTelemetry
from kvmesh.blocks.source import Stream, StreamPosition

log = logging.getLogger(__name__)

NO_REPLAY = "no-replay-endpoint"
UNANSWERED = "replay-unanswered"
TRUNCATED = "history-truncated"
LOOK_SECONDS = 1.0  # longest wait for live batches during a replay


# requests all batches from a number on, once; an unreachable publisher gives an empty answer
Replay = Callable[[int], Awaitable[ReplayAnswer]]


class LiveEvents(Protocol):
    """A publisher's live socket."""

    async def connect(self) -> None:
        """Connect again and drop everything received on an earlier connection. Raise FeedLostError."""

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """Return the arrived batches, at most a few dozen; empty on timeout. Raise FeedLostError."""

    @property
    def waiting(self) -> int:
        """The number of batches that can be received at once."""

    def interrupt(self) -> None:
        """Make a waiting `receive` return at once, with the arrived batches or none."""

    def check(self) -> None:
        """Raise FeedLostError if the connection was lost since `connect`: the peer may now be another process."""

    def close(self) -> None:
        """Close at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """How hard to try."""

    attempts_without_progress: int = 3  # replays without news before a batch counts as lost for good
    replay_limit_seconds: float = 60.0  # for all of a history: a publisher that takes longer counts as silent
    batches_per_change: int = 64  # maximum applied in one atomic step
    idle_seconds: float = 1.0  # without a batch; then the stored position is checked
    idle_probes: int = 1  # idle periods before the publisher is asked for missed batches
    quiet_probe_limit: int = 80  # factor on that time if there was nothing new; doubles up to this
    unknown_probe_limit: int = 10  # the same if the publisher's start time is unknown
    unconfirmed_seconds: float = 30.0  # without a batch, if the publisher cannot be asked for missed ones
    behind_seconds: float = 1.0  # maximum age of a backlog before the stream is shown as behind
    retry_seconds: float = 0.25  # after a pod was lost; doubles up to the limit
    retry_limit_seconds: float = 2.0
    identity_seconds: float = 5.0  # between requests for the publisher's start time
    orphan_seconds: float = 1.0  # between searches for missing parents on other pods; doubles up to the limit
    orphan_limit_seconds: float = 30.0
    heal_seconds: float = 15.0  # before a degraded source requests the whole history again; doubles up to the limit
    heal_limit_seconds: float = 600.0
    free_restarts: int = 4  # contradictions of a publisher per `calm_seconds`, before it has to wait
    free_gaps: int = 32  # gaps, the same
    free_holes: int = 8  # the same for gaps that cannot be filled: each voids all claims of the stream
    unstable_limit_seconds: float = 30.0  # longest of these waits
    calm_seconds: float = 60.0


class OvertakenError(Exception):
    """A live batch that cannot be applied as it is must be handled before the replay continues."""

    def __init__(self, frames: Sequence[Frame]) -> None:
        super().__init__("a live batch comes first")
        self.frames = frames  # from that batch on


class CatchUp:
    """Replays one stream until the publisher has no more."""

    def __init__(
        self,
        *,
        stream: Stream,
        live: LiveEvents,
        replay: Replay | None,
        applier: EventApplier,
        telemetry: IndexerTelemetry,
        policy: RecoveryPolicy,
        on_doubt: Callable[[], Awaitable[None]],
        on_restart: Callable[[], Awaitable[None]],
        on_hole: Callable[[], Awaitable[None]],
    ) -> None:
        """`on_doubt` is called before the claims of the stream become stale; the other two after a new epoch.

        `on_restart` is for another process, `on_hole` for batches that are lost for good. Both may raise to end the
        session, or let batches pass.
        """
        self._stream = stream
        self._live = live
        self._replay = replay
        self._applier = applier
        self._telemetry = telemetry
        self._policy = policy
        self._on_doubt = on_doubt
        self._on_restart = on_restart
        self._on_hole = on_hole
        self.is_silent = False  # the replay socket did not answer the last request

    @property
    def trouble(self) -> str:
        """Why batches missed now could not be replayed, or ""."""
        return NO_REPLAY if self._replay is None else UNANSWERED if self.is_silent else ""

    async def complete(
        self, *, probe: bool, goal: int = -1, same_process: bool = False, beside_live: bool = False
    ) -> None:
        """Replay until the publisher has no more batches, at least up to `goal`.

        A probe starts at our own last batch to check that the publisher is the same process; `same_process` says that
        this is known already. `beside_live` applies live batches as they come, because the stream's blocks stay in use
        meanwhile. Raise OvertakenError.
        """
        if self._replay is None:
            return
        probe = probe and self._applier.position.last_seq >= 0
        fruitless = 0
        answered, mute = False, self.is_silent  # one attempt is enough for a publisher that was silent last time
        clock = asyncio.get_running_loop().time
        until = clock() + self._policy.replay_limit_seconds
        while fruitless < self._policy.attempts_without_progress and clock() < until:
            asked = self._applier.position
            answer = await self._ask(self._replay, asked.last_seq + (not probe), beside_live=beside_live)
            if not answered and not _says_something(answer):
                if mute:
                    break
                mute = True
            answered = answered or _says_something(answer)
            if probe and answer.ended | bool(answer.frames):
                verdict = _judge(asked, answer)
                # everything but the end of an answer may have been dropped on the way: an empty answer is requested
                # again
                is_sure = verdict is Probe.RESTARTED or fruitless + 1 == self._policy.attempts_without_progress
                if verdict is Probe.RESTARTED or (verdict is Probe.EMPTY and is_sure and not same_process):
                    await self.restart("its replay does not continue ours")
                    return
                probe = verdict is Probe.EMPTY
            await self._apply(answer.frames)
            position = self._applier.position
            if answer.ended and position.last_seq >= goal and not probe:
                break
            fruitless = 0 if position.last_seq > asked.last_seq else fruitless + 1
            if answer.next_seq == asked.last_seq + 1 and same_process:
                probe = False  # our last batch has just left its buffer, the next one has not
            elif fruitless == self._policy.attempts_without_progress and answer.next_seq is not None:
                # behind the last hole, not the first: each hole voids everything before it
                await self.give_up_before(answer.whole_from or answer.next_seq, TRUNCATED)
                fruitless, probe = 0, False
        else:
            answered = answered and clock() < until
        self._note_answer(answered)

    async def close_gap(self, seq: int) -> None:
        """Replay the batches missing before live batch `seq`, or give them up."""
        self._telemetry.gap(self._stream)
        missing = self._applier.position.last_seq + 1
        log.warning("%s: batches %d to %d are missing", self._stream.name, missing, seq - 1)
        if not self.trouble:  # `heal` retries a silent publisher: live batches would wait here
            await self.complete(probe=False, goal=seq - 1)
        if self._applier.position.last_seq < seq - 1:
            await self.give_up_before(seq, self.trouble or TRUNCATED)

    async def restart(self, sign: str) -> None:
        """Void the blocks of the old process, and replay from the start."""
        log.warning("%s: the publisher has restarted (%s); its old blocks are void", self._stream.name, sign)
        await self._on_doubt()
        await self._applier.begin_epoch()
        await self._on_restart()
        await self.complete(probe=False)

    async def void(self, reason: str) -> None:
        """Void blocks that may be another process's: the publisher cannot be identified."""
        log.warning("%s may be another process than before (%s); its old blocks are void", self._stream.name, reason)
        await self._applier.begin_epoch(degraded=reason)

    async def give_up_before(self, seq: int, reason: str) -> None:
        """Begin a new epoch: batches before `seq` are lost, and their removals with them."""
        log.error(
            "%s: batch %d and all before it are lost for good (%s); keeping only what follows",
            self._stream.name,
            seq - 1,
            reason,
        )
        await self._on_doubt()
        await self._applier.begin_epoch(last_seq=seq - 1, degraded=reason)
        await self._on_hole()

    async def skip_to(self, seq: int) -> None:
        """Begin a new epoch after batch `seq`, as if everything up to it were lost."""
        await self._applier.begin_epoch(last_seq=seq, degraded=self.trouble or TRUNCATED)

    async def heal(self) -> None:
        """Make a source exact again if the publisher can replay its whole history after all; otherwise change nothing.

        Live batches are applied as they come. Raise OvertakenError.
        """
        if self._replay is None:
            return
        position = self._applier.position
        if position.degraded not in (TRUNCATED, UNANSWERED):
            await self.complete(probe=True, same_process=True, beside_live=True)
            return
        seq, fruitless = 0, 0
        while seq <= position.last_seq and fruitless < self._policy.attempts_without_progress:
            answer = await self._ask(self._replay, seq, beside_live=True)
            if _says_something(answer):
                self.is_silent = False
            elif self.is_silent:
                return
            seq += len(answer.frames)
            fruitless = 0 if answer.frames else fruitless + 1
        if seq > position.last_seq:
            log.warning("%s: the whole history can be had after all; beginning anew", self._stream.name)
            await self._on_doubt()
            await self._applier.begin_epoch()
            await self.complete(probe=False)

    async def _ask(self, replay: Replay, start_seq: int, *, beside_live: bool = False) -> ReplayAnswer:
        answer = await (self._ask_beside_live(replay, start_seq) if beside_live else replay(start_seq))
        # another process may answer on the same address; the live connection would not have survived that
        self._live.check()
        return answer

    async def _ask_beside_live(self, replay: Replay, start_seq: int) -> ReplayAnswer:
        async def ask() -> ReplayAnswer:
            return await replay(start_seq)

        asking = asyncio.create_task(ask(), name=f"replay-{self._stream.name}")
        try:
            await asyncio.wait([asking], timeout=0)
            asking.add_done_callback(lambda _: self._live.interrupt())
            while not asking.done():
                frames = await self._live.receive(timeout_seconds=LOOK_SECONDS)
                halt = await self._applier.apply(frames) if frames else None
                if halt is not None:
                    raise OvertakenError(halt.frames)
            return await asking
        finally:
            asking.cancel()
            await asyncio.wait([asking])

    async def _apply(self, frames: Sequence[Frame]) -> None:
        before = self._applier.position.last_seq
        step = self._policy.batches_per_change
        for first in range(0, len(frames), step):
            halt = await self._applier.apply(frames[first : first + step])
            if halt is not None and halt.action is BatchAction.RESTART and halt.sign == OTHER_SIZE:
                # the history of a single process has both sizes
                log.error("%s: its block size changes while it runs; only the first is indexed", self._stream.name)
                self._applier.accept_block_sizes()
                halt = await self._applier.apply(halt.frames)
            if halt is not None:  # the index has another position now; the next request starts there
                break
        self._telemetry.replayed(self._stream, batches=max(self._applier.position.last_seq - before, 0))

    def _note_answer(self, answered: bool) -> None:
        if not answered and not self.is_silent:
            log.error("%s: the replay socket does not answer; relying on live batches alone", self._stream.name)
        self.is_silent = not answered


def _judge(asked: StreamPosition, answer: ReplayAnswer) -> Probe:
    """Judge the answer to a probe by the stream's position at the time of the request."""
    first = answer.frames[0] if answer.frames else None
    return judge_probe(
        last_seq=asked.last_seq,
        last_crc=asked.last_crc,
        first_seq=first.seq if first else None,
        first_crc=crc32(first.payload) if first else None,
    )


def _says_something(answer: ReplayAnswer) -> bool:
    return answer.ended or bool(answer.frames) or answer.next_seq is not None
