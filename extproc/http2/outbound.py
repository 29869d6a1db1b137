"""Flow control of one connection: our writes within the peer's windows, and the peer's writes within ours. Pure.

Sending is fair between streams and in order within each. There is no separate bound: bounded requests bound the
answers, and a queue that does not move for long is `stalled`.
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
    window_frame,
)
from extproc.http2.grpc_messages import PREFIX_BYTES

MAX_OWN_FRAME_BYTES = 1 << 16  # even if the peer accepts larger frames: other streams wait for each frame
TURN_BYTES = 1 << 18  # given to the transport before checking whether it can take more
# of a message sent as a whole while other streams wait; a part of a request's body is never longer
MOST_AT_ONCE_BYTES = 1 << 16
_PREFIX = struct.Struct(">BL")  # not compressed, the message's length
_FRAME_AND_PREFIX = struct.Struct(FRAME_HEADER.format + "BL")


class SendQueue:
    """The unsent bytes of one stream."""

    __slots__ = ("credit", "end", "messages", "moved_at", "stream_id")

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        # The window minus the initial one, so that a new INITIAL_WINDOW_SIZE need not visit every stream; may be < 0.
        self.credit = 0
        self.messages: deque[memoryview] | None = None  # waiting messages; None is cheaper than empty
        self.end: bytes | None = None  # the frames that end the stream, after the messages
        self.moved_at = 0.0  # when it last sent something, or began to wait


class ReceiveWindow:
    """The bytes that the peer may still send, on one stream or (id 0) on the connection."""

    __slots__ = ("_frames", "_left", "_size", "_stream_id", "_unannounced")

    def __init__(self, stream_id: int, size: int, frames: "list[bytes | memoryview]") -> None:
        """`frames` is the list to write, which takes the WINDOW_UPDATE frames."""
        self._stream_id = stream_id
        self._size = self._left = size
        self._unannounced = 0  # bytes consumed, but not announced to the peer yet
        self._frames = frames

    def take(self, size: int) -> bool:
        """Count received bytes; return False if the peer has exceeded its window."""
        self._left -= size
        return self._left >= 0

    def give_back(self, size: int) -> None:
        """Allow this many bytes again; announce them once they make up half a window."""
        self._unannounced += size
        if self._unannounced * 2 >= self._size:
            self._left += self._unannounced
            self._frames.append(window_frame(self._stream_id, self._unannounced))
            self._unannounced = 0


class Outbound:
    """Frames to write, and queues that wait for a window or for the transport."""

    def __init__(self, *, clock: Callable[[], float], flush: Callable[[], None]) -> None:
        """`clock` returns seconds, and is read only if something has to wait. `flush` writes `frames`."""
        self._clock = clock
        self.flush = flush
        self.frames: list[bytes | memoryview] = []
        self.finished: list[int] = []  # streams with nothing left to send
        self.answers = 0  # messages since the last reset; its reader resets it
        self.paused = False  # the transport's buffer is full
        self._window = DEFAULT_WINDOW_BYTES
        self._initial = DEFAULT_WINDOW_BYTES
        self._max_frame = MAX_FRAME_BYTES
        self._ready: deque[SendQueue] = deque()  # queues waiting for the connection's window or the transport, in turn
        self._blocked: dict[int, SendQueue] = {}  # queues waiting for their stream's window

    def message(self, queue: SendQueue, message: bytes, body: bytes = b"") -> None:
        """Send one gRPC message (`message` + `body`), as far as the windows allow; the rest waits.

        `body` is not copied here unless it has to wait.
        """
        self.answers += 1
        size = PREFIX_BYTES + len(message) + len(body)
        first = self._max_frame - PREFIX_BYTES - len(message)  # bytes of the body in the first frame
        if (
            queue.messages is None
            and size <= MOST_AT_ONCE_BYTES
            and size <= self._window
            and size <= self._initial + queue.credit
            and first >= 0
            and not self._ready
            and not self.paused
        ):
            # the fast path of nearly every answer: pack the first frame's header and the message's prefix at once
            self._window -= size
            queue.credit -= size
            frame_size = min(size, self._max_frame)
            header = _FRAME_AND_PREFIX.pack(
                frame_size >> 16, frame_size & 0xFFFF, DATA, 0, queue.stream_id, 0, size - PREFIX_BYTES
            )
            self.frames += (header, message)
            if body:
                self._append_body(queue.stream_id, memoryview(body), first)
            return
        part = memoryview(b"".join((_PREFIX.pack(0, size - PREFIX_BYTES), message, body)))
        if queue.messages is None:
            queue.messages = deque((part,))
            queue.moved_at = self._clock()
            self._ready.append(queue)
            self.send_waiting()
        else:
            queue.messages.append(part)

    def end(self, queue: SendQueue, frames: bytes) -> None:
        """End the stream after its waiting messages."""
        if queue.messages is None:
            self._finish(queue, frames)
        else:
            queue.end = frames

    def drop(self, queue: SendQueue) -> None:
        """Discard the queue's unsent bytes: its stream is gone."""
        queue.messages = None  # `send_waiting` skips it if it is in `_ready`
        queue.end = None
        self._blocked.pop(queue.stream_id, None)
        self.finished.append(queue.stream_id)

    def widen(self, queue: SendQueue | None, increment: int) -> None:
        """Apply a WINDOW_UPDATE to a stream's queue, or to the connection if None."""
        if increment == 0:
            # a stream's is a stream error, the connection's a connection error (RFC 9113, section 6.9)
            error = Http2ConnectionError if queue is None else Http2StreamError
            raise error(ErrorCode.PROTOCOL_ERROR, "a window grows by nothing")
        if queue is None:
            self._window += increment
            if self._window > MAX_WINDOW_BYTES:
                raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "the connection's window is too large")
        else:
            queue.credit += increment
            if self._initial + queue.credit > MAX_WINDOW_BYTES:
                raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "the stream's window is too large")
            self._unblock(queue)
        if self._ready:
            self.send_waiting()

    def take_settings(self, *, initial_window: int | None, max_frame: int | None) -> None:
        """Apply the peer's SETTINGS; windows may become negative."""
        if max_frame is not None:
            self._max_frame = min(max_frame, MAX_OWN_FRAME_BYTES)
        if initial_window is not None:
            self._initial = initial_window
            for queue in list(self._blocked.values()):
                self._unblock(queue)
            self.send_waiting()

    def send_waiting(self) -> None:
        """Move waiting bytes to `frames`, one frame of each queue in turn, until TURN_BYTES are exceeded."""
        budget = TURN_BYTES
        now = self._clock()
        while self._ready and self._window > 0 and budget > 0 and not self.paused:
            queue = self._ready.popleft()
            if queue.messages is None:
                continue  # dropped
            sent = self._send_frame(queue)
            budget -= sent
            if sent:
                queue.moved_at = now
            if queue.messages:
                if self._initial + queue.credit > 0:
                    self._ready.append(queue)
                else:
                    self._blocked[queue.stream_id] = queue
                continue
            queue.messages = None
            if queue.end is not None:
                self._finish(queue, queue.end)

    @property
    def can_send(self) -> bool:
        """Whether some queue could send now and waits only for its turn."""
        return bool(self._ready) and self._window > 0 and not self.paused

    def stalled(self, *, before: float) -> list[int]:
        """Return the streams that wait and have sent nothing since `before`."""
        self._ready = deque(queue for queue in self._ready if queue.messages is not None)
        return [queue.stream_id for queue in chain(self._ready, self._blocked.values()) if queue.moved_at < before]

    def _unblock(self, queue: SendQueue) -> None:
        if self._initial + queue.credit > 0 and self._blocked.pop(queue.stream_id, None) is not None:
            self._ready.append(queue)

    def _finish(self, queue: SendQueue, frames: bytes) -> None:
        self.frames.append(frames)
        self.finished.append(queue.stream_id)

    def _append_body(self, stream_id: int, body: memoryview, first: int) -> None:
        """Append a message's body; its first `first` bytes belong to the frame already begun."""
        self.frames.append(body[:first])
        for start in range(first, len(body), self._max_frame):
            part = body[start : start + self._max_frame]
            self.frames += (FRAME_HEADER.pack(len(part) >> 16, len(part) & 0xFFFF, DATA, 0, stream_id), part)

    def _send_frame(self, queue: SendQueue) -> int:
        assert queue.messages, "a queue in turn has something to send"
        part = queue.messages[0]
        size = min(len(part), self._max_frame, self._window, self._initial + queue.credit)
        if size <= 0:
            return 0
        if size == len(part):
            queue.messages.popleft()
        else:
            queue.messages[0] = part[size:]
        self._window -= size
        queue.credit -= size
        self.frames.append(FRAME_HEADER.pack(size >> 16, size & 0xFFFF, DATA, 0, queue.stream_id))
        self.frames.append(part[:size])
        return size
