"""Brings one stream up to date by replay, however badly the replay socket behaves.

It always ends, after a bounded number of requests without progress. What is missing then is lost for good; a new epoch
begins, because without the removals among the lost batches nothing older may be believed.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol
from zlib import crc32

from kv_indexer.apply.apply_events import OTHER_SIZE, EventApplier
from kv_indexer.events.sequence import BatchAction, Frame, Probe, ReplayAnswer, judge_probe
from kv_indexer.ports import IndexerTelemetry
from kvmesh.blocks.source import Stream

log = logging.getLogger(__name__)

NO_REPLAY = "no-replay-endpoint"
UNANSWERED = "replay-unanswered"
TRUNCATED = "history-truncated"


# asks once for all batches from a number on; a publisher that cannot be reached gives an empty answer
Replay = Callable[[int], Awaitable[ReplayAnswer]]


class LiveEvents(Protocol):
    """A publisher's live socket."""

    async def connect(self) -> None:
        """Connect again, dropping what an earlier connection still held; raise FeedLostError."""

    async def receive(self, *, timeout_seconds: float) -> Sequence[Frame]:
        """Return what has arrived, at most a few dozen batches; empty on timeout. Raise FeedLostError."""

    def interrupt(self) -> None:
        """Have a `receive` that waits return at once, with what has arrived or with nothing."""

    def check(self) -> None:
        """Raise FeedLostError if the connection has gone since `connect`: who is there now may be another process."""

    def close(self) -> None:
        """Close at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """How hard to try."""

    attempts_without_progress: int = 3  # replays that bring nothing new, before a batch counts as lost for good
    batches_per_change: int = 64  # applied in one atomic step, at most
    idle_seconds: float = 1.0  # without a batch; then the stored position is checked
    idle_probes: int = 10  # idle spells before the publisher itself is asked for what we may have missed
    quiet_probe_limit: int = 8  # times as long, where it had nothing new; doubles up to this
    retry_seconds: float = 0.25  # after a lost pod; doubles up to the limit
    retry_limit_seconds: float = 2.0
    identity_seconds: float = 5.0  # between questions for the publisher's start time
    orphan_seconds: float = 1.0  # between looks for lost parents on other pods; doubles up to the limit
    orphan_limit_seconds: float = 30.0
    heal_seconds: float = 15.0  # before a degraded source asks for the whole history again; doubles up to the limit
    heal_limit_seconds: float = 600.0
    free_restarts: int = 4  # new epochs that a publisher may cause before it has to wait
    free_gaps: int = 32  # likewise, gaps
    unstable_limit_seconds: float = 30.0  # longest wait for a publisher that keeps contradicting itself
    calm_seconds: float = 60.0  # after which that is forgiven


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
        on_epoch: Callable[[], Awaitable[None]],
    ) -> None:
        """Call `on_epoch` after the publisher has made us begin a new epoch; it may raise to end the session."""
        self._stream = stream
        self._live = live
        self._replay = replay
        self._applier = applier
        self._telemetry = telemetry
        self._policy = policy
        self._on_epoch = on_epoch
        self.is_silent = False  # the replay socket did not answer when last asked

    @property
    def trouble(self) -> str:
        """Why batches that are missed now could not be had again, or ""."""
        return NO_REPLAY if self._replay is None else UNANSWERED if self.is_silent else ""

    async def complete(self, *, probe: bool, goal: int = -1, same_process: bool = False) -> None:
        """Replay until the publisher says that there is no more, `goal` included.

        A probe starts at our own last batch to see who is there; `same_process` says that this is known already.
        """
        if self._replay is None:
            return
        probe = probe and self._applier.position.last_seq >= 0
        fruitless, answered = 0, False
        while fruitless < self._policy.attempts_without_progress:
            last_seq = self._applier.position.last_seq
            answer = await self._ask(self._replay, last_seq if probe else last_seq + 1)
            answered = answered or _says_something(answer)
            if probe and answer.ended | bool(answer.frames):
                verdict = self._judge(answer)
                # all of an answer but its end may have been dropped on the way: an empty one is asked for again
                is_sure = verdict is Probe.RESTARTED or fruitless + 1 == self._policy.attempts_without_progress
                if verdict is Probe.RESTARTED or (verdict is Probe.EMPTY and is_sure and not same_process):
                    await self.restart("its replay does not continue ours")
                    return
                probe = verdict is Probe.EMPTY
            await self._apply(answer.frames)
            position = self._applier.position
            if answer.ended and position.last_seq >= goal and not probe:
                break
            fruitless = 0 if position.last_seq > last_seq else fruitless + 1
            if answer.next_seq == last_seq + 1 and same_process:
                probe = False  # our last batch is just beyond its memory, the next is not
            elif fruitless == self._policy.attempts_without_progress and answer.next_seq is not None:
                await self.give_up_before(answer.next_seq, TRUNCATED)
                fruitless, probe = 0, False
        self._note_answer(answered)

    async def close_gap(self, seq: int) -> None:
        """Get what is missing before live batch `seq`, or give it up."""
        self._telemetry.gap(self._stream)
        missing = self._applier.position.last_seq + 1
        log.warning("%s: batches %d to %d are missing", self._stream.name, missing, seq - 1)
        await self.complete(probe=False, goal=seq - 1)
        if self._applier.position.last_seq < seq - 1:
            await self.give_up_before(seq, self.trouble or TRUNCATED)

    async def restart(self, sign: str) -> None:
        """Void what another process has published, and replay from the start."""
        log.warning("%s: the publisher has restarted (%s); its old blocks are void", self._stream.name, sign)
        await self._applier.begin_epoch()
        await self._on_epoch()
        await self.complete(probe=False)

    async def void(self, reason: str) -> None:
        """Void what may be another process's: the publisher cannot be identified."""
        log.warning("%s may be another process than before (%s); its old blocks are void", self._stream.name, reason)
        await self._applier.begin_epoch(degraded=reason)

    async def give_up_before(self, seq: int, reason: str) -> None:
        """Batches before `seq` are lost, and with them the proof that older blocks are still there."""
        log.error(
            "%s: batch %d and all before it are lost for good (%s); keeping only what follows",
            self._stream.name,
            seq - 1,
            reason,
        )
        await self._applier.begin_epoch(last_seq=seq - 1, degraded=reason)
        await self._on_epoch()

    async def heal(self) -> None:
        """Make a source exact again if the publisher can give its whole history after all, else change nothing."""
        if self._replay is None:
            return
        position = self._applier.position
        if position.degraded not in (TRUNCATED, UNANSWERED):
            await self.complete(probe=True, same_process=True)
            return
        seq, fruitless = 0, 0
        while seq <= position.last_seq and fruitless < self._policy.attempts_without_progress:
            answer = await self._ask(self._replay, seq)
            if _says_something(answer):
                self.is_silent = False
            seq += len(answer.frames)
            fruitless = 0 if answer.frames else fruitless + 1
        if seq > position.last_seq:
            log.warning("%s: the whole history can be had after all; beginning anew", self._stream.name)
            await self._applier.begin_epoch()
            await self.complete(probe=False)

    async def _ask(self, replay: Replay, start_seq: int) -> ReplayAnswer:
        answer = await replay(start_seq)
        # another process may answer on the same address; the live connection would not have survived that
        self._live.check()
        return answer

    def _judge(self, answer: ReplayAnswer) -> Probe:
        position = self._applier.position
        first = answer.frames[0] if answer.frames else None
        return judge_probe(
            last_seq=position.last_seq,
            last_crc=position.last_crc,
            first_seq=first.seq if first else None,
            first_crc=crc32(first.payload) if first else None,
        )

    async def _apply(self, frames: Sequence[Frame]) -> None:
        before = self._applier.position.last_seq
        step = self._policy.batches_per_change
        for first in range(0, len(frames), step):
            halt = await self._applier.apply(frames[first : first + step])
            if halt is not None and halt.action is BatchAction.RESTART and halt.sign == OTHER_SIZE:
                # one process's own history has both sizes
                log.error("%s: its block size changes while it runs; only the first is indexed", self._stream.name)
                self._applier.accept_block_sizes()
                halt = await self._applier.apply(halt.frames)
            if halt is not None:  # the index is elsewhere by now; the next request starts from there
                break
        self._telemetry.replayed(self._stream, batches=max(self._applier.position.last_seq - before, 0))

    def _note_answer(self, answered: bool) -> None:
        if not answered and not self.is_silent:
            log.error("%s: the replay socket does not answer; relying on live batches alone", self._stream.name)
        self.is_silent = not answered


def _says_something(answer: ReplayAnswer) -> bool:
    return answer.ended or bool(answer.frames) or answer.next_seq is not None
