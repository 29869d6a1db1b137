"""A publisher's replay socket: implements `ports.ReplaySource` over ZMQ DEALER. Used by the service, one a stream.

vLLM's ROUTER drops batches, the end marker included, when the reader lags (no high-water mark is set on it). So each
request has a socket of its own, only receives, and what has come through is kept while the rest is asked for again.
"""

import asyncio
from collections.abc import Callable

import zmq

from kv_indexer.events.zmq_frames import Frame, ReplayAnswer, is_replay_end, parse_replay, replay_request
from kv_indexer.events.zmq_signals import SocketSignals

BATCH_LIMIT = 4096  # of one answer: what is not yet decoded must not fill the memory
BYTE_LIMIT = 64 << 20
MESSAGE_LIMIT = 32 << 20  # bytes of one message; a step of 8,192 tokens has 40 kB
ROUNDS_WITHOUT_PROGRESS = 2
PATIENCE_LIMIT = 4  # times the usual silence, for a publisher that is slow to answer
YIELD_EVERY = 256  # messages, so that other streams get their turn


class History:
    """What came through of one replay, in whatever order and however often; holds no sockets.

    Batches behind a hole are kept until it is filled: where each message is dropped with some probability, those in
    front of the first hole alone would hardly ever grow.
    """

    def __init__(self, start_seq: int) -> None:
        self.next_seq = start_seq  # the first that is missing
        self.ended = False
        self.contradicts_itself = False  # two different batches under one number: another process has answered
        self._frames: list[Frame] = []
        self._behind: dict[int, Frame] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._frames) + len(self._behind)

    @property
    def is_full(self) -> bool:
        """Whether the caller should take what there is before more is asked for."""
        return len(self) >= BATCH_LIMIT or self._bytes >= BYTE_LIMIT

    @property
    def is_complete(self) -> bool:
        """Whether the publisher has said that this is all, and there is no hole in it."""
        return self.ended and not self._behind

    def last_hole(self) -> int | None:
        """Return the last batch that is missing; None if the end is not known."""
        if not self.ended:
            return None
        seq = max(self._behind, default=self.next_seq)
        while seq in self._behind:
            seq -= 1
        return seq

    def add(self, frame: Frame) -> bool:
        """Take a batch; False if it brings nothing."""
        known = self._behind.get(frame.seq)
        if known is not None:
            self.contradicts_itself = self.contradicts_itself or known.payload != frame.payload
            return False
        if frame.seq < self.next_seq:
            return False
        self._behind[frame.seq] = frame
        self._bytes += len(frame.payload)
        while self.next_seq in self._behind:
            self._frames.append(self._behind.pop(self.next_seq))
            self.next_seq += 1
        return True

    def answer(self) -> ReplayAnswer:
        """Return what is in front of the first hole."""
        if self.contradicts_itself:
            return ReplayAnswer(frames=(), ended=False)
        return ReplayAnswer(
            frames=tuple(self._frames), ended=self.is_complete, next_seq=min(self._behind, default=None)
        )


class ZmqReplaySource:
    """Asks one publisher for its past."""

    def __init__(
        self,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        on_malformed: Callable[[], None],
        first_answer_seconds: float = 2.0,
        silence_seconds: float = 0.5,
    ) -> None:
        self._context = context
        self._address = address
        self._on_malformed = on_malformed
        self._first_answer_seconds = first_answer_seconds
        self._silence_seconds = silence_seconds
        self._patience = 1

    async def replay(self, start_seq: int) -> ReplayAnswer:
        """See `ports.ReplaySource`; asks again for what was dropped, as long as each round brings something."""
        history = History(start_seq)
        fruitless = 0
        while fruitless < ROUNDS_WITHOUT_PROGRESS and not history.is_full and not history.contradicts_itself:
            before = len(history)
            is_answered = await self._round(history)
            if history.is_complete or not is_answered:
                break
            fruitless = 0 if len(history) > before else fruitless + 1
        # a slow publisher must not be asked again and again for what it is still about to send
        self._patience = 1 if history.ended else min(self._patience * 2, PATIENCE_LIMIT)
        return history.answer()

    async def _round(self, history: History) -> bool:
        """Ask once from the first hole on; tell whether anything was answered."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.rcvhwm = BATCH_LIMIT
            socket.maxmsgsize = MESSAGE_LIMIT
            socket.ipv6 = True
            socket.reconnect_ivl = -1  # one request, one connection, one process
            socket.connect(self._address)
            socket.send_multipart(replay_request(history.next_seq), zmq.NOBLOCK)
            signals = SocketSignals(socket)
            try:
                return await self._receive(socket, signals, history)
            finally:
                signals.close()
        except zmq.ZMQError:
            return False
        finally:
            socket.close(linger=0)

    async def _receive(self, socket: "zmq.Socket[bytes]", signals: SocketSignals, history: History) -> bool:
        clock = asyncio.get_running_loop().time
        deadline = clock() + self._first_answer_seconds * self._patience
        received, last_hole = 0, history.last_hole()
        while not history.is_full and not history.contradicts_itself and received < 2 * BATCH_LIMIT:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # what brings nothing does not put the deadline off, however much of it there is
                left = deadline - clock()
                if left <= 0:
                    break
                await signals.wait(timeout_seconds=left)
                continue
            received += 1
            if received % YIELD_EVERY == 0:
                await asyncio.sleep(0)
            if is_replay_end(parts):
                history.ended = True
                break
            frame = parse_replay(parts)
            if frame is None:
                self._on_malformed()
                continue
            if history.add(frame):
                deadline = clock() + self._silence_seconds * self._patience
            if last_hole is not None and frame.seq > last_hole:
                break
        return received > 0
