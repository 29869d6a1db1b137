"""A publisher's replay socket: implements `ports.ReplaySource` over ZMQ DEALER. Used by the service, one a stream.

vLLM's ROUTER drops batches, the end marker included, when the reader lags (no high-water mark is set on it). So each
attempt uses a socket of its own, only receives, and is cut at the first hole; the caller asks again from there.
"""

from collections.abc import Callable

import zmq
import zmq.asyncio

from kv_indexer.ports import ReplayAnswer
from kv_indexer.wire.zmq_frames import Frame, is_replay_end, parse_replay, replay_request

BATCH_LIMIT = 4096  # of one attempt: what is not yet decoded must not fill the memory
BYTE_LIMIT = 64 << 20


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
        self._first_answer_ms = int(first_answer_seconds * 1000)
        self._silence_ms = int(silence_seconds * 1000)

    async def replay(self, start_seq: int) -> ReplayAnswer:
        """See `ports.ReplaySource`."""
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger = 0
            socket.rcvhwm = BATCH_LIMIT
            socket.ipv6 = True
            socket.connect(self._address)
            socket.send_multipart(replay_request(start_seq), zmq.NOBLOCK)
            return await self._receive(socket, start_seq)
        except zmq.ZMQError:
            return ReplayAnswer(frames=(), ended=False)
        finally:
            socket.close(linger=0)

    async def _receive(self, socket: "zmq.Socket[bytes]", start_seq: int) -> ReplayAnswer:
        poller = zmq.asyncio.Poller()
        poller.register(socket, zmq.POLLIN)
        frames: list[Frame] = []
        size = 0
        while len(frames) < BATCH_LIMIT and size < BYTE_LIMIT:
            try:
                parts = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if not await poller.poll(self._silence_ms if frames else self._first_answer_ms):
                    break
                continue
            if is_replay_end(parts):
                return ReplayAnswer(frames=tuple(frames), ended=True)
            frame = parse_replay(parts)
            if frame is None:
                self._on_malformed()
            elif frame.seq > start_seq + len(frames):
                return ReplayAnswer(frames=tuple(frames), ended=False, next_seq=frame.seq)
            elif frame.seq == start_seq + len(frames):
                frames.append(frame)
                size += len(frame.payload)
        return ReplayAnswer(frames=tuple(frames), ended=False)
