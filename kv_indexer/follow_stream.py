"""Use case: keep one stream of one pod true in the index, for as long as it is configured.

Subscribe first, then replay, then live, so that nothing falls between the two. Every way a stream can go wrong leads
back to one of three steps: replay from the first missing batch, a new epoch, or a new session.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from kv_indexer.apply_events import EventApplier
from kv_indexer.core.sequence import Probe, Verdict, judge_probe
from kv_indexer.core.source import SourceState, Stream
from kv_indexer.errors import FeedLostError, IndexUnavailableError, StreamForgottenError
from kv_indexer.ports import IndexerTelemetry, IndexWriter, LiveEvents, ReplayAnswer, ReplaySource
from kv_indexer.wire.zmq_frames import Frame

log = logging.getLogger(__name__)

NO_REPLAY = "no-replay-endpoint"
UNANSWERED = "replay-unanswered"
TRUNCATED = "history-truncated"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPolicy:
    """How hard to try."""

    attempts_without_progress: int = 3  # replays that bring nothing new, before a batch counts as lost for good
    batches_per_change: int = 64  # applied in one atomic step, at most
    idle_seconds: float = 1.0  # without a batch; then the stored position is checked
    idle_probes: int = 10  # idle spells before the publisher itself is asked for what we may have missed
    retry_seconds: float = 0.25  # after a lost pod; doubles up to the limit
    retry_limit_seconds: float = 2.0


class StreamFollower:
    """Follows one stream; `run` ends only by cancellation."""

    def __init__(
        self,
        *,
        stream: Stream,
        live: LiveEvents,
        replay: ReplaySource | None,
        applier: EventApplier,
        writer: IndexWriter,
        telemetry: IndexerTelemetry,
        policy: RecoveryPolicy,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._stream = stream
        self._live = live
        self._replay = replay
        self._applier = applier
        self._writer = writer
        self._telemetry = telemetry
        self._policy = policy
        self._sleep = sleep
        self._shown: tuple[int, SourceState, str] | None = None
        self._replay_is_silent = False
        self._delay = policy.retry_seconds

    async def run(self) -> None:
        """Follow the stream through every failure."""
        while True:
            try:
                await self._session()
            except StreamForgottenError as error:
                log.error("%s; rebuilding by replay", error)
            except IndexUnavailableError as error:
                # what the pod says meanwhile is replayed afterwards
                await self._lost(f"cannot write the index, waiting: {error}", error.reason)
            except FeedLostError as error:
                await self._lost(str(error), error.reason)
            except Exception:  # a defect must not end the other streams
                log.exception("following %s failed; starting over", self._stream.name)
                await self._lost("a defect, see the traceback", "internal-error")
            await self._sleep(self._delay)
            self._delay = min(self._delay * 2, self._policy.retry_limit_seconds)

    async def _session(self) -> None:
        try:
            await self._applier.resume()
            await self._live.connect()
            await self._show(SourceState.REPLAYING)
            await self._catch_up(probe=True)
            await self._show_caught_up()
            self._delay = self._policy.retry_seconds
            idle = 0
            while True:
                frames = await self._live.receive(timeout_seconds=self._policy.idle_seconds)
                idle = 0 if frames else idle + 1
                if frames:
                    await self._advance(frames)
                elif not await self._applier.is_in_step() or idle % self._policy.idle_probes == 0:
                    # a lost last batch has no follower that would show the gap
                    await self._catch_up(probe=True)
                await self._show_caught_up()
        finally:
            self._live.close()

    async def _advance(self, frames: Sequence[Frame]) -> None:
        while frames:
            halt = await self._applier.apply(frames)
            if halt is None:
                return
            frames = halt.frames
            if halt.verdict is Verdict.RESTART:
                await self._restart("an old number with a later time")
            else:
                await self._close_gap(frames[0].seq)

    async def _close_gap(self, seq: int) -> None:
        position = self._applier.position
        self._telemetry.gap(self._stream)
        log.warning("%s: batches %d to %d are missing", self._stream.name, position.last_seq + 1, seq - 1)
        await self._catch_up(probe=False)
        if self._applier.position.last_seq < seq - 1:
            await self._give_up_before(seq, NO_REPLAY if self._replay is None else UNANSWERED)

    async def _restart(self, sign: str) -> None:
        log.warning("%s: the publisher has restarted (%s); its old blocks are void", self._stream.name, sign)
        await self._applier.begin_epoch()
        await self._show(SourceState.REPLAYING)
        await self._catch_up(probe=False)

    async def _give_up_before(self, seq: int, reason: str) -> None:
        """Batches before `seq` are lost, and with them the proof that older blocks are still there."""
        log.error(
            "%s: batch %d and all before it are lost for good (%s); keeping only what follows",
            self._stream.name,
            seq - 1,
            reason,
        )
        await self._applier.begin_epoch(last_seq=seq - 1, degraded=reason)

    async def _catch_up(self, *, probe: bool) -> None:
        """Replay until the publisher has no more. A probe starts at our own last batch to see who is there."""
        if self._replay is None:
            return
        probe = probe and self._applier.position.last_seq >= 0
        fruitless = 0
        while fruitless < self._policy.attempts_without_progress:
            last_seq = self._applier.position.last_seq
            answer = await self._replay.replay(last_seq if probe else last_seq + 1)
            if probe and (answer.ended or answer.frames):
                probe = False
                if self._is_restart(answer):
                    await self._restart("its replay does not continue ours")
                    return
            await self._apply_replay(answer.frames)
            self._replay_is_silent = False
            if answer.ended:
                return
            fruitless = 0 if self._applier.position.last_seq > last_seq else fruitless + 1
            if fruitless == self._policy.attempts_without_progress and answer.next_seq is not None:
                await self._give_up_before(answer.next_seq, TRUNCATED)
                fruitless, probe = 0, False
        if not self._replay_is_silent:
            log.error("%s: the replay socket does not answer; relying on live batches alone", self._stream.name)
        self._replay_is_silent = True

    def _is_restart(self, answer: ReplayAnswer) -> bool:
        position = self._applier.position
        first = answer.frames[0] if answer.frames else None
        verdict = judge_probe(
            last_seq=position.last_seq,
            last_crc=position.last_crc,
            first_seq=first.seq if first else None,
            first_crc=crc32(first.payload) if first else None,
        )
        return verdict is Probe.RESTARTED

    async def _apply_replay(self, frames: Sequence[Frame]) -> None:
        step = self._policy.batches_per_change
        before = self._applier.position.last_seq
        for first in range(0, len(frames), step):
            halt = await self._applier.apply(frames[first : first + step])
            if halt is not None:  # the publisher restarted between two answers, or another indexer moved on
                return
        self._telemetry.replayed(self._stream, batches=max(self._applier.position.last_seq - before, 0))

    async def _show_caught_up(self) -> None:
        degraded = self._applier.position.degraded
        if self._replay is None:
            degraded = degraded or NO_REPLAY
        elif self._replay_is_silent:
            degraded = degraded or UNANSWERED
        await self._show(SourceState.DEGRADED if degraded else SourceState.LIVE, degraded)

    async def _show(self, state: SourceState, reason: str = "") -> None:
        epoch = self._applier.position.epoch
        if self._shown == (epoch, state, reason):
            return
        await self._writer.set_state(self._stream, epoch=epoch, state=state, reason=reason)
        self._shown = (epoch, state, reason)
        self._telemetry.state(self._stream, state=state, reason=reason)
        level = logging.WARNING if state is SourceState.DEGRADED else logging.INFO
        log.log(level, "%s is %s", self._stream.name, f"{state} ({reason})" if reason else state)

    async def _lost(self, message: str, reason: str) -> None:
        shown = (self._applier.position.epoch, SourceState.LOST, reason)
        if self._shown == shown:
            return  # said once; the retries are silent
        log.error("%s is lost: %s", self._stream.name, message)
        self._telemetry.state(self._stream, state=SourceState.LOST, reason=reason)
        self._shown = shown
        try:
            await self._writer.set_state(self._stream, epoch=shown[0], state=SourceState.LOST, reason=reason)
        except IndexUnavailableError as error:
            log.debug("cannot record that %s is lost: %s", self._stream.name, error)
