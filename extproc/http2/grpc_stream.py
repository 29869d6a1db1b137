"""One gRPC call on one HTTP/2 stream: messages in, answers out, and one end, however it comes.

`http2_session` feeds it; a `Call` is what it serves. Answers go through the connection's `Outbound`, so that one
write carries all that one read has led to.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from extproc.http2 import frames as http2
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcError, GrpcStatus, MessageReader, trailers
from extproc.http2.outbound import Outbound, SendLane

log = logging.getLogger(__name__)


class Call(Protocol):
    """What serves one stream. Nothing here waits: what takes time runs in a task of the call's own."""

    def message(self, data: bytes) -> None:
        """Take one message; raise GrpcError to end the stream with its status."""

    def half_closed(self) -> None:
        """Take note that the client sends no more."""

    def ended(self) -> None:
        """Let go of everything: the stream is over. Called exactly once, whatever ended it."""


class Connection(Protocol):
    """What a stream needs of the connection that it is on."""

    outbound: Outbound

    def credit(self, stream: "GrpcStream", size: int) -> None:
        """Give the peer this much of its windows back."""

    def answered(self) -> None:
        """Take note of work done for the peer: a message has been answered."""

    def forget(self, stream: "GrpcStream") -> None:
        """Take the stream off the list: nothing more is to be sent."""

    def flush(self) -> None:
        """Write what is ready to be written."""


Methods = Mapping[bytes, Callable[["GrpcStream"], Call]]  # path -> what serves a stream to it


class GrpcStream:
    """The stream's state, and what its call may do with it."""

    __slots__ = (
        "_call",
        "_connection",
        "_deadline",
        "_held",
        "_reader",
        "ended",
        "half_closed",
        "id",
        "lane",
        "pool",
        "started",
        "unconsumed",
        "uncredited",
        "window",
    )

    def __init__(self, stream_id: int, connection: Connection, *, window: int, max_message_bytes: int) -> None:
        self.id = stream_id
        self.lane = SendLane(stream_id)
        self.pool = ""  # which pool the call's metadata names
        self.window = window  # how much the peer may still send
        self.unconsumed = 0  # bytes received that the call has not taken
        self.uncredited = 0  # bytes taken by the call that the peer does not know of yet
        self.half_closed = False  # by the client
        self.started = False  # the response's headers are out
        self.ended = False  # by us or by what befell it; the call knows
        self._held = False
        self._connection = connection
        self._reader = MessageReader(max_message_bytes=max_message_bytes)
        self._deadline: asyncio.TimerHandle | None = None
        self._call: Call | None = None

    def open(self, serve: Callable[["GrpcStream"], Call], *, timeout_seconds: float | None) -> None:
        """Begin the call, to be ended with DEADLINE_EXCEEDED after the client's timeout."""
        if timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(timeout_seconds, self._deadline_passed)
        try:
            self._call = serve(self)
        except Exception:
            log.exception("a stream could not be opened; the others go on")
            self.finish(GrpcStatus.INTERNAL, "the server failed; its log says why")

    # --- what the connection does ------------------------------------------------------------------------------

    def received(self, content: bytes, size: int) -> None:
        """Take a DATA frame's content; `size` is what it took of the windows, with its padding."""
        self.unconsumed += size
        self._reader.feed(content)
        if not self._held:
            self._deliver()

    def client_ended(self) -> None:
        """Take note that the client sends no more; the call learns of it behind the messages that wait."""
        self.half_closed = True
        if not self._held:
            self._deliver()

    def cut(self) -> None:
        """End without an answer: the peer has reset the stream, or the connection is gone."""
        if not self.ended:
            self._end_call()
        self._connection.outbound.drop(self.lane)
        self._connection.forget(self)

    # --- what the call does ------------------------------------------------------------------------------------

    def send(self, message: bytes, body: bytes = b"") -> None:
        """Send one message, whose end may be given for itself; nothing happens once the stream has ended."""
        if self.ended:
            return
        connection = self._connection
        if not self.started:
            self.started = True
            connection.outbound.frames.append(http2.frame(http2.HEADERS, http2.END_HEADERS, self.id, RESPONSE_HEADERS))
        connection.outbound.message(self.lane, message, body)
        connection.answered()

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the stream with a status, behind what was sent; nothing happens if it has ended."""
        block = trailers(status, text)
        self.end_with(block if self.started else RESPONSE_HEADERS + block)

    def end_with(self, block: bytes) -> None:
        """End the stream with this header block."""
        if self.ended:
            return
        frames = http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, self.id, block)
        if not self.half_closed:
            # the whole answer is out: the client need not send the rest (RFC 9113, section 8.1)
            frames += http2.reset_frame(self.id, http2.ErrorCode.NO_ERROR)
        self._end_call()
        if self._connection.outbound.end(self.lane, frames):
            self._connection.forget(self)

    def hold(self) -> None:
        """Deliver nothing until `release`: what comes meanwhile waits, bounded by the stream's window."""
        self._held = True

    def release(self) -> None:
        """Deliver what has waited."""
        self._held = False
        if not self.ended:
            self._deliver()

    def flush(self) -> None:
        """Write what is ready; for calls that were not woken by the connection."""
        self._connection.flush()

    # -------------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Hand the messages that are complete to the call, then the client's end."""
        call, reader = self._call, self._reader
        assert call is not None, "opened before anything is received"
        try:
            while not (self._held or self.ended) and (message := reader.next_message()) is not None:
                call.message(message)
            if self._held or self.ended:
                return
            if self.unconsumed:
                size, self.unconsumed = self.unconsumed, 0
                self._connection.credit(self, size)
            if self.half_closed:
                if reader.has_rest:
                    raise GrpcError(GrpcStatus.INTERNAL, "the client ended in the middle of a message")
                call.half_closed()
        except GrpcError as error:
            self.finish(error.status, error.reason)
        except Exception:
            log.exception("a stream failed; the others go on")
            self.finish(GrpcStatus.INTERNAL, "the server failed; its log says why")

    def _deadline_passed(self) -> None:
        self.finish(GrpcStatus.DEADLINE_EXCEEDED, "the client's grpc-timeout has passed")
        self.flush()

    def _end_call(self) -> None:
        self.ended = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._call is not None:
            try:
                self._call.ended()
            except Exception:
                log.exception("a stream's end failed; the others go on")
