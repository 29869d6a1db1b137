"""What one connection has to write, within the peer's windows: fair between streams, in order within each. Pure.

`http2.connection` writes `frames` at once. Nothing here has a bound of its own: answers are
bounded because what they answer is, and a lane that does not move for long is `stalled`.
"""

import struct
from collections import deque
from collections.abc import Callable
from itertools import chain

from extproc.http2.frames import (
    DATA,
    DEFAULT_WINDOW_BYTES,
    FRAME_HEADER,
    MAX_FRAME_BYTES,
    MAX_WINDOW_BYTES,
    ErrorCode,
    Http2ConnectionError,
    Http2StreamError,
)
from extproc.http2.grpc_messages import PREFIX_BYTES

MAX_OWN_FRAME_BYTES = 1 << 16  # where the peer takes larger frames: other streams wait for each one of them
TURN_BYTES = 1 << 18  # handed to the transport before it is asked whether it can take more
# of a message that is handed over as a whole: other streams wait for it. A part of a request's body is no longer
MOST_AT_ONCE_BYTES = 1 << 16
_PREFIX = struct.Struct(">BL")  # not compressed, the message's length
_FRAME_AND_PREFIX = struct.Struct(FRAME_HEADER.format + "BL")


class SendLane:
    """One stream's way out."""

    __slots__ = ("credit", "end", "moved_at", "queue", "stream_id")

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        # The window less the initial one, so that a new INITIAL_WINDOW_SIZE need not visit every stream; may be < 0.
        self.credit = 0
        self.queue: deque[memoryview] | None = None  # messages that wait for a window; None is cheaper than empty
        self.end: bytes | None = None  # the frames that end the stream, behind the queue
        self.moved_at = 0.0  # when it began to wait, or sent something since


class Outbound:
    """Frames ready to be written, and lanes that wait for a window or for the transport."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock  # seconds; read only where something has to wait
        self.frames: list[bytes | memoryview] = []
        self.finished: list[int] = []  # streams whose end has been sent from the queue
        self.paused = False  # the transport takes no more for now
        self._window = DEFAULT_WINDOW_BYTES
        self._initial = DEFAULT_WINDOW_BYTES
        self._max_frame = MAX_FRAME_BYTES
        self._ready: deque[SendLane] = deque()  # wait for the connection's window or the transport, in turn
        self._blocked: dict[int, SendLane] = {}  # wait for their own window

    def message(self, lane: SendLane, message: bytes, body: bytes = b"") -> None:
        """Send one gRPC message, or as much of it as may be sent; the rest waits. `body`: what follows in it.

        A long body is not copied here, as long as it need not wait.
        """
        size = PREFIX_BYTES + len(message) + len(body)
        if (
            lane.queue is None
            and size <= MOST_AT_ONCE_BYTES
            and size <= self._window
            and size <= self._initial + lane.credit
            and not self._ready
            and not self.paused
        ):
            # nearly every answer: the first frame's header and the message's prefix are packed at once
            first = self._max_frame - PREFIX_BYTES - len(message)  # bytes of the body in the first frame
            if first >= len(body):
                self._window -= size
                lane.credit -= size
                header = _FRAME_AND_PREFIX.pack(
                    size >> 16, size & 0xFFFF, DATA, 0, lane.stream_id, 0, size - PREFIX_BYTES
                )
                self.frames += (header, message, body) if body else (header, message)
                return
            if first >= 0:
                self._window -= size
                lane.credit -= size
                self._cut(lane.stream_id, message, memoryview(body), first)
                return
        parts = (memoryview(b"".join((_PREFIX.pack(0, size - PREFIX_BYTES), message, body))),)
        if lane.queue is None:
            lane.queue = deque(parts)
            lane.moved_at = self._clock()
            self._ready.append(lane)
            self.send_waiting()
        else:
            lane.queue.extend(parts)

    def end(self, lane: SendLane, frames: bytes) -> bool:
        """End the stream behind what it still has to send; return whether that was at once."""
        if lane.queue is None:
            self.frames.append(frames)
            return True
        lane.end = frames
        return False

    def drop(self, lane: SendLane) -> None:
        """Forget what the lane still has to send: its stream is gone."""
        lane.queue = None  # where it stands in turn, it is passed over
        lane.end = None
        self._blocked.pop(lane.stream_id, None)

    def widen(self, lane: SendLane | None, increment: int) -> None:
        """Take a WINDOW_UPDATE, for a stream's lane or (None) for the connection."""
        if increment == 0:
            # a lane's is a stream error, the connection's a connection error (RFC 9113, section 6.9)
            error = Http2ConnectionError if lane is None else Http2StreamError
            raise error(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        if lane is None:
            self._window += increment
            if self._window > MAX_WINDOW_BYTES:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
        else:
            lane.credit += increment
            if self._initial + lane.credit > MAX_WINDOW_BYTES:
                raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large")
            self._unblock(lane)
        if self._ready:
            self.send_waiting()

    def take_settings(self, *, initial_window: int | None, max_frame: int | None) -> None:
        """Apply the peer's SETTINGS; windows may become negative."""
        if max_frame is not None:
            self._max_frame = min(max_frame, MAX_OWN_FRAME_BYTES)
        if initial_window is not None:
            self._initial = initial_window
            for lane in list(self._blocked.values()):
                self._unblock(lane)
            self.send_waiting()

    def send_waiting(self) -> None:
        """Move waiting bytes to `frames`, a frame a lane in turn, at most one turn's worth."""
        budget = TURN_BYTES
        now = self._clock()
        while self._ready and self._window > 0 and budget > 0 and not self.paused:
            lane = self._ready.popleft()
            if lane.queue is None:
                continue  # dropped
            sent = self._send_frame(lane)
            budget -= sent
            if sent:
                lane.moved_at = now
            if lane.queue:
                if self._initial + lane.credit > 0:
                    self._ready.append(lane)
                else:
                    self._blocked[lane.stream_id] = lane
                continue
            lane.queue = None
            if lane.end is not None:
                self.frames.append(lane.end)
                self.finished.append(lane.stream_id)

    @property
    def can_send(self) -> bool:
        """Whether lanes wait for nothing but their turn."""
        return bool(self._ready) and self._window > 0 and not self.paused

    def stalled(self, *, before: float) -> list[int]:
        """Return the streams that have waited without sending anything since then."""
        self._ready = deque(lane for lane in self._ready if lane.queue is not None)
        return [lane.stream_id for lane in chain(self._ready, self._blocked.values()) if lane.moved_at < before]

    def _unblock(self, lane: SendLane) -> None:
        if self._initial + lane.credit > 0 and self._blocked.pop(lane.stream_id, None) is not None:
            self._ready.append(lane)

    def _cut(self, stream_id: int, message: bytes, body: memoryview, first: int) -> None:
        """Append the frames of a message, whose first one takes `first` bytes of the body."""
        frames, size, length = self.frames, self._max_frame, len(message) + len(body)
        header = _FRAME_AND_PREFIX.pack(size >> 16, size & 0xFFFF, DATA, 0, stream_id, 0, length)
        frames += (header, message, body[:first])
        for start in range(first, len(body), size):
            part = body[start : start + size]
            frames += (FRAME_HEADER.pack(len(part) >> 16, len(part) & 0xFFFF, DATA, 0, stream_id), part)

    def _send_frame(self, lane: SendLane) -> int:
        """Send one frame of the lane's, as large as everything allows; return its size, 0 if its window is shut."""
        assert lane.queue, "a lane in turn has something to send"
        part = lane.queue[0]
        size = min(len(part), self._max_frame, self._window, self._initial + lane.credit)
        if size <= 0:
            return 0
        if size == len(part):
            lane.queue.popleft()
        else:
            lane.queue[0] = part[size:]
        self._window -= size
        lane.credit -= size
        self.frames.append(FRAME_HEADER.pack(size >> 16, size & 0xFFFF, DATA, 0, lane.stream_id))
        self.frames.append(part[:size])
        return size
