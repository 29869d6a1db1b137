"""One gRPC call on one HTTP/2 stream: messages in, answers out, and one end, however it comes.

A `Call` is what it serves. Answers go through the connection's `Outbound`, so that one write carries all that one read
has led to.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from extproc.http2 import frames as http2
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcError, GrpcStatus, MessageReader, trailers
from extproc.http2.outbound import Outbound, ReceiveWindow, SendQueue

log = logging.getLogger(__name__)


class Call(Protocol):
    """What serves one stream. Nothing here waits: what takes time runs in a task of the call's own."""

    def message(self, data: bytes) -> None:
        """Take one message; raise GrpcError to end the stream with its status."""

    def partial(self, size: int) -> None:
        """Take note that `size` bytes of a message have come and more are to come. May end the stream."""

    def half_closed(self) -> None:
        """Take note that the client sends no more."""

    def ended(self) -> None:
        """Let go of everything: the stream is over. Called exactly once, whatever ended it."""


Methods = Mapping[bytes, Callable[["GrpcStream"], Call]]  # path -> what serves a stream to it


class GrpcStream:
    """The stream's state, and what its call may do with it."""

    __slots__ = (
        *("_call", "_connection_window", "_deadline", "_held", "_outbound", "_reader", "ended", "half_closed", "id"),
        *("authority", "pool", "send_queue", "started", "unconsumed", "window"),
    )

    def __init__(
        self,
        stream_id: int,
        outbound: Outbound,
        *,
        connection_window: ReceiveWindow,
        window_bytes: int,
        max_message_bytes: int,
    ) -> None:
        self.id = stream_id
        self.send_queue = SendQueue(stream_id)
        self.pool = ""  # which pool the call's metadata names
        self.authority = ""  # the name by which the client calls us
        self.window = ReceiveWindow(stream_id, window_bytes, outbound.frames)
        self.unconsumed = 0  # bytes received that the call has not taken
        self.half_closed = False  # by the client
        self.started = False  # the response's headers are out
        self.ended = False  # by the call, the client or the connection; the call knows
        self._held = False
        self._outbound = outbound
        self._connection_window = connection_window
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
        if not (self._held or self.ended):
            self._deliver()

    def cut(self) -> None:
        """End without an answer: the peer has reset the stream, or the connection is gone."""
        if not self.ended:
            self._end_call()
        self._outbound.drop(self.send_queue)

    # --- what the call does ------------------------------------------------------------------------------------

    def send(self, message: bytes, body: bytes = b"") -> None:
        """Send one message, whose end may be given for itself; nothing happens once the stream has ended."""
        if self.ended:
            return
        if not self.started:
            self.started = True
            self._outbound.frames.append(http2.frame(http2.HEADERS, http2.END_HEADERS, self.id, RESPONSE_HEADERS))
        self._outbound.message(self.send_queue, message, body)

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
        self._outbound.end(self.send_queue, frames)

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
        self._outbound.flush()

    # -------------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Hand the messages that are complete to the call, then the client's end."""
        call, reader = self._call, self._reader
        if call is None:
            return  # it has ended
        try:
            while not (self._held or self.ended) and (message := reader.next_message()) is not None:
                call.message(message)
            if self._held or self.ended:
                return
            self._widen()
            if rest := reader.rest_bytes:
                call.partial(rest)
            if self.half_closed and not self.ended:
                if reader.rest_bytes:
                    raise GrpcError(GrpcStatus.INTERNAL, "the client ended in the middle of a message")
                call.half_closed()
        except GrpcError as error:
            self.finish(error.status, error.reason)
        except Exception:
            log.exception("a stream failed; the others go on")
            self.finish(GrpcStatus.INTERNAL, "the server failed; its log says why")

    def _widen(self) -> None:
        """Let the peer send as much again as was delivered."""
        if self.unconsumed:
            self._connection_window.give_back(self.unconsumed)
            if not self.half_closed:
                self.window.give_back(self.unconsumed)
            self.unconsumed = 0

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
            # the call has the stream and the body: what refers to it must not keep them until the collector comes
            self._call = None
        self._reader.clear()


class UnaryCall(Call):
    """One short request, one answer."""

    def __init__(self, stream: GrpcStream, answer: Callable[[bytes], bytes], *, most_bytes: int) -> None:
        """`answer` may raise GrpcError, with which the call then ends."""
        self._stream = stream
        self._answer = answer
        self._most_bytes = most_bytes

    def message(self, data: bytes) -> None:
        """Answer the request, and end the stream."""
        self._stream.send(self._answer(data))
        self._stream.finish()

    def partial(self, size: int) -> None:
        """Refuse what is too long before all of it has come."""
        refuse_longer(size, most_bytes=self._most_bytes)

    def half_closed(self) -> None:
        """Refuse a client that ends without a request."""
        raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        """Let go of nothing: all is done."""


def refuse_longer(size: int, *, most_bytes: int) -> None:
    """Raise GrpcError where this much of a request has come, and no request is so long."""
    if size > most_bytes:
        raise GrpcError(GrpcStatus.RESOURCE_EXHAUSTED, f"no request here is longer than {most_bytes} bytes")
