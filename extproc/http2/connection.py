"""One HTTP/2 connection of a gRPC server as an asyncio.Protocol: reads and writes, time limits, and its end.

The session knows the frames. There is no task here, and one write carries all that one read has led to.
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


class Turns:
    """The connections that had more to be done than one turn allows: one turn of one of them, then whatever else waits.

    Without it fifty hostile connections would take fifty turns between two events of an innocent one.
    """

    def __init__(self) -> None:
        self._waiting: deque[Http2Connection] = deque()
        self._is_due = False

    def wait(self, connection: "Http2Connection") -> None:
        """Give the connection another turn, behind those that wait already."""
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
        """`connections` has this connection in it for as long as it lives; it shares `turns` with all of them."""
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
        self._over = False  # our last byte is written; what still comes is dropped
        self._opened_at = self._received_at = self._loop.time()
        self._pinged_at: float | None = None
        self._paused_at: float | None = None
        self._turns = turns
        self._awaits_turn = False  # for the rest of a read that brought much
        self._timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what we take, before the peer has said anything."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        self._connections.add(self)
        self._timer = self._loop.call_later(self._limits.check_every_seconds, self._check)
        self.flush()

    def data_received(self, data: bytes) -> None:
        """Handle all frames that are complete, then write all that they led to."""
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
        """Read no more while the peer does not: what it sends would lead to more answers."""
        self._paused_at = self._loop.time()
        self.session.outbound.paused = True
        self._read_or_not()

    def resume_writing(self) -> None:
        """Go on."""
        self._paused_at = None
        self.session.outbound.paused = False
        self._read_or_not()
        self.session.outbound.send_waiting()
        self.flush()

    # --- for streams and the server ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what is ready, as long as the transport takes it; hang up when all is done.

        Called once for each read and once for each pick: two fifths of the server's CPU are these writes. Gathering the
        picks of one turn of the event loop (`call_soon`) was no cheaper and made single requests wait for a turn.
        """
        session, transport = self.session, self._transport
        outbound = session.outbound
        if self._over or transport is None or transport.is_closing():
            outbound.frames.clear()
            session.forget_finished()
            return
        while True:
            if outbound.finished:
                session.forget_finished()  # first: the peer may get some of the connection's window back
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
        """Ask for no more streams, and close when those in flight have ended."""
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
            stream.finish(GrpcStatus.UNAVAILABLE, "the server has stopped")
        self._fail(ErrorCode.NO_ERROR, "the server has stopped")

    def abort(self) -> None:
        """Close without another byte."""
        if self._transport is not None:
            self._transport.abort()

    def go_on(self) -> None:
        """Take the next turn."""
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
                # others first; meanwhile nothing is read
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
        """End all streams, send the reason, hang up."""
        if self._over:
            return
        self.session.fail(code, reason)
        self.flush()
        self._hang_up()

    def _hang_up(self) -> None:
        """Close; the peer gets a moment to read what we said last, which a reset of the connection could lose."""
        transport = self._transport
        if self._over or transport is None:
            return
        self._over = True
        try:
            if not transport.is_closing() and transport.can_write_eof():
                transport.write_eof()
                self._loop.call_later(self._limits.linger_seconds, transport.abort)
                return
        except OSError:  # the peer was faster
            pass
        transport.close()

    def _check(self) -> None:
        """Keep the time limits."""
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
        """Ask a silent peer whether it is still there; anything that it sends is an answer."""
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
