"""One HTTP/2 connection of a gRPC server as an asyncio.Protocol: reads, writes, time limits, and closing.

The session handles the frames. There is no task here, and all output caused by one read goes out in one write.
"""

import asyncio
import logging
from collections import deque
from typing import cast

from extproc.http2 import frames as http2
from extproc.http2.frames import ErrorCode, Http2ConnectionError
from extproc.http2.grpc_messages import GrpcStatus
from extproc.http2.grpc_stream import Methods
from extproc.http2.limits import Http2Limits
from extproc.http2.session import Http2Session

log = logging.getLogger(__name__)

KEEPALIVE_PING = b"kvmalive"
STOPPED = "the server has stopped"  # the status text of streams cut by its end


class Turns:
    """Connections with more work than one turn allows: one of them gets a turn, then the loop's other events run.

    Without this, fifty hostile connections would take fifty turns between two events of an innocent one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Http2Connection] = deque()
        self._is_due = False

    def wait(self, connection: "Http2Connection") -> None:
        """Give the connection another turn, after the waiting ones."""
        self._waiting.append(connection)
        self._schedule()

    def _schedule(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        self._waiting.popleft().go_on()
        self._schedule()


class Http2Connection(asyncio.Protocol):
    """One connection. Time comes from the running loop."""

    def __init__(
        self,
        *,
        methods: Methods,
        limits: Http2Limits,
        max_message_bytes: int,
        connections: set["Http2Connection"],
        turns: Turns,
    ) -> None:
        """`connections` contains this connection while it is open; all of them share `turns`."""
        self._loop = asyncio.get_running_loop()
        self.session = Http2Session(
            methods=methods,
            limits=limits,
            max_message_bytes=max_message_bytes,
            flush=self.flush,
            clock=self._loop.time,
        )
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._limits = limits
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._over = False  # our last byte is written; further input is dropped
        self._opened_at = self._received_at = self._loop.time()
        self._pinged_at: float | None = None
        self._paused_at: float | None = None
        self._turns = turns
        self._awaits_turn = False  # to handle the rest of a large read
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send our SETTINGS, without waiting for the peer."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's class does not inherit from it
        self._connections.add(self)
        self._timer = self._loop.call_later(self._limits.check_every_seconds, self._check)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames, then write the output."""
        self._received_at = self._loop.time()
        self._receive(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  (whatever it was)
        """End every stream."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        self.session.cut_streams()
        self._connections.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)

    def pause_writing(self) -> None:
        """Stop reading while the peer does not read: its input would cause more output."""
        self._paused_at = self._loop.time()
        self.session.outbound.paused = True
        self._read_or_not()

    def resume_writing(self) -> None:
        """Resume reading, and send the waiting bytes."""
        self._paused_at = None
        self.session.outbound.paused = False
        self._read_or_not()
        self.session.outbound.send_waiting()
        self.flush()

    # --- for streams and the server ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write the ready frames while the transport accepts them; hang up a retiring connection without streams.

        Called once per read and once per pick: these writes are two fifths of the server's CPU time. Gathering all
        picks of one turn of the event loop (`call_soon`) was no cheaper, and made single requests wait for a turn.
        """
        session, transport = self.session, self._transport
        outbound = session.outbound
        if self._over or transport is None or transport.is_closing():
            outbound.frames.clear()
            session.forget_finished()
            return
        while True:
            if outbound.finished:
                session.forget_finished()  # before the write: may add a WINDOW_UPDATE for the connection
            if not (frames := outbound.frames):
                break
            whole = b"".join(frames)
            frames.clear()  # before the write: it may call `pause_writing`
            transport.write(whole)
            if outbound.can_send:
                outbound.send_waiting()
        if session.retiring and not session.streams:
            self._hang_up()

    def drain(self) -> None:
        """Accept no more streams, and close when the open ones have ended."""
        session = self.session
        if self._over or session.retiring:
            return
        if session.settled:
            session.announce_drain()
        else:
            session.retire(ErrorCode.NO_ERROR, "the server is stopping")
        self.flush()

    def close(self) -> None:
        """End the streams with UNAVAILABLE and close."""
        for stream in list(self.session.streams.values()):
            stream.finish(GrpcStatus.UNAVAILABLE, STOPPED)
        self._fail(ErrorCode.NO_ERROR, STOPPED)

    def abort(self) -> None:
        """Close without writing any more."""
        if self._transport is not None:
            self._transport.abort()

    def go_on(self) -> None:
        """Use this connection's turn."""
        self._awaits_turn = False
        self._receive(b"")
        if not self._awaits_turn:
            self._read_or_not()

    # ----------------------------------------------------------------------------------------------------------------

    def _receive(self, data: bytes) -> None:
        if self._over:
            return
        try:
            self.session.receive(data)
        except Http2ConnectionError as error:
            log.warning(
                "an HTTP/2 peer broke a rule; its connection ends",
                extra={"peer": self._peer(), "why": error.reason, "code": error.code.name},
            )
            self._fail(error.code, error.reason)
        except Exception:
            log.exception("an HTTP/2 connection failed and ends; the others go on", extra={"peer": self._peer()})
            self._fail(ErrorCode.INTERNAL_ERROR, "a defect of the server")
        else:
            if self.session.has_more:
                # other connections first; stop reading meanwhile
                self._awaits_turn = True
                self._turns.wait(self)
                self._read_or_not()
            self.flush()

    def _read_or_not(self) -> None:
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        if self._awaits_turn or self.session.outbound.paused:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def _fail(self, code: ErrorCode, reason: str) -> None:
        if self._over:
            return
        self.session.fail(code, reason)
        self.flush()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close, but give the peer a moment to read our last bytes: a TCP reset could lose them."""
        transport = self._transport
        if self._over or transport is None:
            return
        self._over = True
        try:
            if not transport.is_closing() and transport.can_write_eof():
                transport.write_eof()
                self._loop.call_later(self._limits.linger_seconds, transport.abort)
                return
        except OSError:  # the peer has closed already
            pass
        transport.close()

    def _check(self) -> None:
        limits, now, session = self._limits, self._loop.time(), self.session
        self._timer = self._loop.call_later(limits.check_every_seconds, self._check)
        if self._over:
            return
        block_since = session.block_since
        if not session.settled and now - self._opened_at >= limits.preface_seconds:
            self._fail(ErrorCode.PROTOCOL_ERROR, "no preface in time")
        elif block_since is not None and now - block_since >= limits.preface_seconds:
            self._fail(ErrorCode.ENHANCE_YOUR_CALM, "a header block does not end")
        elif self._paused_at is not None and now - self._paused_at >= limits.stall_seconds:
            log.warning("an HTTP/2 peer reads nothing; its connection ends", extra={"peer": self._peer()})
            self.abort()
        else:
            for stream_id in session.outbound.stalled(before=now - limits.stall_seconds):
                session.reset(stream_id, ErrorCode.ENHANCE_YOUR_CALM)
            self._keep_alive(now)
            self.flush()

    def _keep_alive(self, now: float) -> None:
        """Send a PING to a silent peer; anything it sends counts as an answer."""
        limits = self._limits
        if self._pinged_at is not None and self._received_at < self._pinged_at:
            if now - self._pinged_at >= limits.ping_timeout_seconds:
                log.warning("an HTTP/2 peer is gone without a goodbye", extra={"peer": self._peer()})
                self.abort()
        elif now - self._received_at >= limits.ping_after_seconds:
            self._pinged_at = now
            self.session.outbound.frames.append(http2.frame(http2.PING, 0, 0, KEEPALIVE_PING))

    def _peer(self) -> str:
        name = self._transport.get_extra_info("peername") if self._transport is not None else None
        return f"{name[0]}:{name[1]}" if isinstance(name, tuple) else "unknown"
