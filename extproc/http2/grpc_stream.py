"""One gRPC call on one stream: messages in, answers out, and exactly one end.

A `Call` serves the stream. On our own HTTP/2, answers go through the connection's `Outbound`, so that all output caused
by one read goes out in one write.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Protocol

from extproc.http2 import frames as http2
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcError, GrpcStatus, MessageReader, trailers
from extproc.http2.outbound import Outbound, ReceiveWindow, SendQueue

log = logging.getLogger(__name__)


class Call(Protocol):
    """Serves one stream. No method waits: long work runs in the call's own task."""

    def message(self, data: bytes) -> None:
        """Take one message; raise GrpcError to end the stream with its status."""

    def partial(self, size: int) -> None:
        """Account for `size` received bytes of an incomplete message. May end the stream."""

    def half_closed(self) -> None:
        """Handle the client's end of sending."""

    def ended(self) -> None:
        """Release everything: the stream is over. Called exactly once, for any end."""


Methods = Mapping[bytes, Callable[["GrpcStream"], Call]]  # path -> handler


class GrpcStream(ABC):
    """The operations of a stream for its call, on any transport."""

    __slots__ = ("_call", "authority", "ended", "pool")

    def __init__(self, *, pool: str = "", authority: str = "") -> None:
        self.pool = pool  # from the call's metadata
        self.authority = authority  # the client's `:authority`, if the transport knows it
        self.ended = False  # by the call, the client or the connection; `Call.ended` has been called
        self._call: Call | None = None

    @abstractmethod
    def send(self, message: bytes, body: bytes = b"") -> None:
        """Send one message (`message` + `body`). Does nothing once the stream has ended."""

    @abstractmethod
    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """End the stream with a status, after all sent messages. Does nothing if it has ended."""

    @abstractmethod
    def hold(self) -> None:
        """Deliver nothing until `release`; input waits meanwhile, bounded by the stream's window."""

    @abstractmethod
    def release(self) -> None:
        """Deliver the waiting input."""

    @abstractmethod
    def flush(self) -> None:
        """Write the ready output, for calls not woken by the connection."""

    def begin(self, serve: Callable[["GrpcStream"], Call]) -> None:
        """Start the call."""
        try:
            self._call = serve(self)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        if isinstance(error, GrpcError):
            self.finish(error.status, error.reason)
        else:
            log.error("a stream failed; the others go on", exc_info=error)
            self.finish(GrpcStatus.INTERNAL, "the server failed; its log says why")

    def _end_call(self) -> None:
        self.ended = True
        if self._call is not None:
            try:
                self._call.ended()
            except Exception:
                log.exception("a stream's end failed; the others go on")
            # breaks the cycle (call, stream), which would keep the body until the next garbage collection
            self._call = None


class Http2Stream(GrpcStream):
    """A stream of our own HTTP/2: its state, and its operations for the connection."""

    __slots__ = (
        *("_connection_window", "_deadline", "_held", "_outbound", "_reader", "half_closed", "id"),
        *("send_queue", "started", "unconsumed", "window"),
    )

    def __init__(
        self,
        stream_id: int,
        outbound: Outbound,
        *,
        pool: str = "",
        authority: str = "",
        connection_window: ReceiveWindow,
        window_bytes: int,
        max_message_bytes: int,
    ) -> None:
        super().__init__(pool=pool, authority=authority)
        self.id = stream_id
        self.send_queue = SendQueue(stream_id)
        self.window = ReceiveWindow(stream_id, window_bytes, outbound.frames)
        self.unconsumed = 0  # bytes received, but not taken by the call
        self.half_closed = False  # by the client
        self.started = False  # the response's headers are sent
        self._held = False
        self._outbound = outbound
        self._connection_window = connection_window
        self._reader = MessageReader(max_message_bytes=max_message_bytes)
        self._deadline: asyncio.TimerHandle | None = None

    def open(self, serve: Callable[[GrpcStream], Call], *, timeout_seconds: float | None) -> None:
        """Start the call, and end it with DEADLINE_EXCEEDED after the client's timeout."""
        if timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(timeout_seconds, self._deadline_passed)
        self.begin(serve)

    # --- for the connection ------------------------------------------------------------------------------------

    def received(self, content: bytes, size: int) -> None:
        """Take a DATA frame's content; `size` includes its padding, as counted by the windows."""
        self.unconsumed += size
        self._reader.feed(content)
        if not self._held:
            self._deliver()

    def client_ended(self) -> None:
        """Handle the client's end of sending; the call learns of it after the waiting messages."""
        self.half_closed = True
        if not (self._held or self.ended):
            self._deliver()

    def cut(self) -> None:
        """End without an answer: the peer has reset or broken the stream, or the connection is gone."""
        if not self.ended:
            self._end_call()
        self._outbound.drop(self.send_queue)

    # --- for the call ------------------------------------------------------------------------------------------

    def send(self, message: bytes, body: bytes = b"") -> None:
        """See `GrpcStream`."""
        if self.ended:
            return
        if not self.started:
            self.started = True
            self._outbound.frames.append(http2.frame(http2.HEADERS, http2.END_HEADERS, self.id, RESPONSE_HEADERS))
        self._outbound.message(self.send_queue, message, body)

    def finish(self, status: GrpcStatus = GrpcStatus.OK, text: str = "") -> None:
        """See `GrpcStream`."""
        block = trailers(status, text)
        self.end_with(block if self.started else RESPONSE_HEADERS + block)

    def end_with(self, block: bytes) -> None:
        """End the stream with this header block."""
        if self.ended:
            return
        frames = http2.frame(http2.HEADERS, http2.END_HEADERS | http2.END_STREAM, self.id, block)
        if not self.half_closed:
            # the answer is complete: the client need not send the rest (RFC 9113, section 8.1)
            frames += http2.reset_frame(self.id, http2.ErrorCode.NO_ERROR)
        self._end_call()
        self._outbound.end(self.send_queue, frames)

    def hold(self) -> None:
        """See `GrpcStream`."""
        self._held = True

    def release(self) -> None:
        """See `GrpcStream`."""
        self._held = False
        if not self.ended:
            self._deliver()

    def flush(self) -> None:
        """See `GrpcStream`."""
        self._outbound.flush()

    # -------------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        call, reader = self._call, self._reader
        if call is None:
            return  # it has ended
        try:
            while reader.rest_bytes and (message := reader.next_message()) is not None:
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
        except Exception as error:
            self._fail(error)

    def _widen(self) -> None:
        if self.unconsumed:
            self._connection_window.give_back(self.unconsumed)
            if not self.half_closed:
                self.window.give_back(self.unconsumed)
            self.unconsumed = 0

    def _deadline_passed(self) -> None:
        self.finish(GrpcStatus.DEADLINE_EXCEEDED, "the client's grpc-timeout has passed")
        self.flush()

    def _end_call(self) -> None:
        super()._end_call()
        if self._deadline is not None:
            self._deadline.cancel()
        self._reader.clear()


class UnaryCall(Call):
    """One short request, one answer."""

    def __init__(self, stream: GrpcStream, answer: Callable[[bytes], bytes], *, most_bytes: int) -> None:
        """`answer` may raise GrpcError to end the call with its status."""
        self._stream = stream
        self._answer = answer
        self._most_bytes = most_bytes

    def message(self, data: bytes) -> None:
        """Answer the request, and end the stream."""
        self._stream.send(self._answer(data))
        self._stream.finish()

    def partial(self, size: int) -> None:
        """Refuse a too long request before it is complete."""
        refuse_longer(size, most_bytes=self._most_bytes)

    def half_closed(self) -> None:
        """Raise GrpcError: the client ended without a request."""
        raise GrpcError(GrpcStatus.INTERNAL, "the client ended without a request")

    def ended(self) -> None:
        """Do nothing: there is nothing to release."""


def refuse_longer(size: int, *, most_bytes: int) -> None:
    """Raise GrpcError if the received part of a request is longer than `most_bytes`."""
    if size > most_bytes:
        raise GrpcError(GrpcStatus.RESOURCE_EXHAUSTED, f"no request here is longer than {most_bytes} bytes")
