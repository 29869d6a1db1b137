"""Handles the frames of one HTTP/2 connection: their effect on streams and windows, and their limits.

The server side of RFC 9113, without I/O. Not implemented: push, priorities (ignored, as the RFC now says), CONNECT.
"""

import logging
from collections.abc import Callable

from extproc.http2 import frames as http2
from extproc.http2.frames import ErrorCode, Http2ConnectionError, Http2StreamError, Setting
from extproc.http2.grpc_messages import RESPONSE_HEADERS, GrpcStatus, trailers
from extproc.http2.grpc_stream import Http2Stream, Methods
from extproc.http2.headers import HeaderBlocks
from extproc.http2.limits import Allowance, Http2Limits
from extproc.http2.outbound import Outbound, ReceiveWindow

log = logging.getLogger(__name__)

DRAIN_PING = b"kvmdrain"
FRAMES_PER_LOOK = 64  # frames without headers between two looks at the clock
_UNKNOWN_METHOD = RESPONSE_HEADERS + trailers(GrpcStatus.UNIMPLEMENTED, "no such method")
_SETTINGS_ACK = http2.frame(http2.SETTINGS, http2.ACK, 0)


class Http2Session:
    """Streams, windows and limits of one connection. Raises Http2ConnectionError if the connection must end."""

    def __init__(
        self,
        *,
        methods: Methods,
        limits: Http2Limits,
        max_message_bytes: int,
        flush: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.outbound = Outbound(clock=clock, flush=flush)
        self.streams: dict[int, Http2Stream] = {}
        self.settled = False  # the peer's preface and SETTINGS have arrived
        self.retiring = False  # our GOAWAY is sent: open streams go on, new ones are ignored
        self.has_more = False  # the turn ended with frames left; `receive(b"")` continues
        self.block_since: float | None = None  # when an incomplete header block began
        self._methods = methods
        self._limits = limits
        self._max_message_bytes = max_message_bytes
        self._clock = clock
        self._headers = HeaderBlocks(max_list_bytes=limits.max_header_list_bytes)
        self._preface_seen = False
        self._rest = b""  # received but not handled: the start of a frame, or the rest of a turn
        self._block: bytearray | None = None  # a header block, to be continued in CONTINUATION frames
        self._block_stream_id = self._block_flags = self._continuations = 0
        self._last_stream_id = 0
        self._last_served_id = http2.LAST_STREAM_ID  # as in our GOAWAY
        self._late_streams = 0
        self._window = ReceiveWindow(0, limits.connection_window_bytes, self.outbound.frames)
        now = clock()
        self._resets = Allowance(capacity=limits.resets, per_second=limits.resets_per_second, now=now)
        self._idle = Allowance(capacity=limits.idle_frames, per_second=limits.idle_frames_per_second, now=now)
        self.outbound.frames += (
            http2.settings_frame(
                {
                    Setting.MAX_CONCURRENT_STREAMS: limits.max_concurrent_streams,
                    Setting.INITIAL_WINDOW_SIZE: limits.stream_window_bytes,
                    Setting.MAX_HEADER_LIST_SIZE: limits.max_header_list_bytes,
                }
            ),
            http2.window_frame(0, limits.connection_window_bytes - http2.DEFAULT_WINDOW_BYTES),
        )

    # --- for the connection ---------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> None:
        """Handle the complete frames and keep the rest."""
        if self._rest:
            data = self._rest + data
        position, end = 0, len(data)
        self.has_more = False
        if not self._preface_seen:
            preface = http2.PREFACE
            if data[: len(preface)] != preface[:end]:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "this port speaks HTTP/2 (gRPC) only")
            if end < len(preface):
                self._rest = data
                return
            self._preface_seen = True
            position = len(preface)
        unpack = http2.FRAME_HEADER.unpack_from
        turn_ends = self._last_stream_id + 2 * self._limits.streams_per_turn - 1
        turn_over_at, frames = self._clock() + self._limits.turn_seconds, 0
        while end - position >= http2.FRAME_HEADER_BYTES:
            high, low, kind, flags, stream_id = unpack(data, position)
            length = high << 16 | low
            if length > http2.MAX_FRAME_BYTES:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a frame is larger than MAX_FRAME_SIZE")
            start = position + http2.FRAME_HEADER_BYTES
            if end - start < length:
                break
            position = start + length
            # the highest bit of a stream's number is reserved
            self._frame(kind, flags, stream_id & http2.LAST_STREAM_ID, data[start:position])
            frames += 1
            is_late = (kind == http2.HEADERS or not frames % FRAMES_PER_LOOK) and self._clock() >= turn_over_at
            if (is_late or self._last_stream_id >= turn_ends) and position < end:
                self.has_more = True
                break
        self._rest = data[position:]

    def announce_drain(self) -> None:
        """Announce the end, but still serve streams that the peer opens before it has read the announcement.

        Send a GOAWAY with the highest possible stream id, then a PING; the PING's answer retires the connection.
        """
        self.outbound.frames.append(http2.goaway_frame(http2.LAST_STREAM_ID, ErrorCode.NO_ERROR, "stopping"))
        self.outbound.frames.append(http2.frame(http2.PING, 0, 0, DRAIN_PING))

    def retire(self, code: ErrorCode, reason: str) -> None:
        """Serve the open streams, and accept no others."""
        if not self.retiring:
            self.retiring = True
            self._last_served_id = self._last_stream_id
            self.outbound.frames.append(http2.goaway_frame(self._last_served_id, code, reason))

    def fail(self, code: ErrorCode, reason: str) -> None:
        """End all streams; the caller closes the connection."""
        self.cut_streams()
        self.outbound.frames.append(http2.goaway_frame(min(self._last_stream_id, self._last_served_id), code, reason))

    def cut_streams(self) -> None:
        """End every stream without an answer."""
        for stream in list(self.streams.values()):
            stream.cut()
        self.forget_finished()

    def reset(self, stream_id: int, code: ErrorCode) -> None:
        """Refuse or end one stream."""
        if (stream := self.streams.get(stream_id)) is not None:
            stream.cut()
            self.forget_finished()
        self.outbound.frames.append(http2.reset_frame(stream_id, code))

    def forget_finished(self) -> None:
        """Forget the streams with nothing left to write."""
        for stream_id in self.outbound.finished:
            stream = self.streams.pop(stream_id, None)
            if stream is not None:
                if stream.started:
                    self._resets.earn(1)
                if stream.unconsumed:
                    self._window.give_back(stream.unconsumed)
        self.outbound.finished.clear()

    # --- frames, one method per kind ----------------------------------------------------------------------------------

    def _frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if self.outbound.finished:
            self.forget_finished()
        if self._block is not None and (kind != http2.CONTINUATION or stream_id != self._block_stream_id):
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a header block is interrupted")
        if not self.settled:
            if kind != http2.SETTINGS or flags & http2.ACK:
                raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS must come first")
            self.settled = True
        if kind > http2.CONTINUATION:
            self._idle_frame()  # unknown kinds are ignored (RFC 9113, section 5.5)
            return
        try:
            _HANDLERS[kind](self, flags, stream_id, payload)
        except Http2StreamError as error:
            log.debug("an HTTP/2 peer broke a rule; its stream ends", extra={"stream": stream_id, "why": error.reason})
            self.reset(stream_id, error.code)
            self._count_reset()

    def _data(self, flags: int, stream_id: int, payload: bytes) -> None:
        size = len(payload)
        if not self._window.take(size):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the connection's window")
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            self._check_not_idle(stream_id)
            self._window.give_back(size)  # it was in flight when the stream ended
            if not payload:
                self._idle_frame()
            return
        if stream.half_closed:
            self._window.give_back(size)
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "DATA after the end")
        if not stream.window.take(size):
            self._window.give_back(size)
            raise Http2StreamError(ErrorCode.FLOW_CONTROL_ERROR, "more DATA than the stream's window")
        if flags & http2.PADDED:
            payload = http2.unpadded(payload, flags)
        if flags & http2.END_STREAM:
            stream.half_closed = True
        elif not payload:
            self._idle_frame()
        stream.received(payload, size)

    def _headers_frame(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id % 2 == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "HEADERS on a stream that no client opens")
        fragment = http2.header_fragment(payload, flags)
        if flags & http2.END_HEADERS:
            self._header_block(flags, stream_id, fragment)
            return
        self._block = bytearray(fragment)
        self._block_stream_id, self._block_flags, self._continuations = stream_id, flags, 0
        self.block_since = self._clock()

    def _continuation(self, flags: int, stream_id: int, payload: bytes) -> None:
        block = self._block
        if block is None:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        block += payload
        self._continuations += 1
        if self._continuations > self._limits.max_continuations or len(block) > self._limits.max_header_list_bytes:
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "a header block is too long")
        if flags & http2.END_HEADERS:
            self._block = self.block_since = None
            self._header_block(self._block_flags, stream_id, bytes(block))

    def _header_block(self, flags: int, stream_id: int, block: bytes) -> None:
        if stream_id > self._last_stream_id:
            self._open_stream(flags, stream_id, block)
            return
        self._headers.fields(block)  # even an ignored block may change the table
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            self._idle_frame()  # trailers that crossed our end of the stream
        elif stream.half_closed:
            raise Http2StreamError(ErrorCode.STREAM_CLOSED, "HEADERS after the end")
        elif not flags & http2.END_STREAM:
            raise Http2StreamError(ErrorCode.PROTOCOL_ERROR, "trailers that do not end the stream")
        else:
            stream.client_ended()

    def _open_stream(self, flags: int, stream_id: int, block: bytes) -> None:
        self._last_stream_id = stream_id
        limits = self._limits
        if stream_id > self._last_served_id:
            self._headers.fields(block)
            self._late_streams += 1
            if self._late_streams > limits.streams_after_goaway:
                raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many streams after GOAWAY")
            return
        request = self._headers.request(block)
        if len(self.streams) >= limits.most_streams:
            raise Http2StreamError(ErrorCode.REFUSED_STREAM, "too many streams")
        stream = Http2Stream(
            stream_id,
            self.outbound,
            pool=request.pool,
            authority=request.authority,
            connection_window=self._window,
            window_bytes=limits.stream_window_bytes,
            max_message_bytes=self._max_message_bytes,
        )
        stream.half_closed = bool(flags & http2.END_STREAM)
        self.streams[stream_id] = stream
        serve = self._methods.get(request.path)
        if request.refusal is not None or serve is None:
            stream.end_with(request.refusal or _UNKNOWN_METHOD)
            return
        stream.open(serve, timeout_seconds=request.timeout_seconds)
        if stream.half_closed:
            stream.client_ended()

    def _priority(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PRIORITY on stream 0")
        if len(payload) != 5:
            raise Http2StreamError(ErrorCode.FRAME_SIZE_ERROR, "PRIORITY of a wrong length")
        self._idle_frame()

    def _rst_stream(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "RST_STREAM of a wrong length")
        self._check_not_idle(stream_id)
        stream = self.streams.get(stream_id)
        if stream is None:
            self._idle_frame()
            return
        stream.cut()
        self.forget_finished()
        if not stream.started:
            self._count_reset()

    def _settings(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & http2.ACK:
            if payload:
                raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with content")
            self._idle_frame()
            return
        # each value costs as much as a frame, and a new window is checked against every stream's
        self._idle_frame(1 + len(payload) // 6 + len(self.streams) // 64)
        values = http2.parse_settings(payload)
        window = values.get(Setting.INITIAL_WINDOW_SIZE, 0)
        if any(stream.send_queue.credit + window > http2.MAX_WINDOW_BYTES for stream in self.streams.values()):
            raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE makes a window too large")
        # acknowledge first: DATA under the new window before it would violate the old one (grpc's clients check)
        self.outbound.frames.append(_SETTINGS_ACK)
        self.outbound.take_settings(
            initial_window=values.get(Setting.INITIAL_WINDOW_SIZE), max_frame=values.get(Setting.MAX_FRAME_SIZE)
        )

    def _push_promise(self, _flags: int, _stream_id: int, _payload: bytes) -> None:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "clients do not push")

    def _ping(self, flags: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "PING of a wrong length")
        self._idle_frame()
        if not flags & http2.ACK:
            self.outbound.frames.append(http2.frame(http2.PING, http2.ACK, 0, payload))
        elif payload == DRAIN_PING:
            self.retire(ErrorCode.NO_ERROR, "the server is stopping")

    def _goaway(self, _: int, stream_id: int, payload: bytes) -> None:
        if stream_id:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "GOAWAY of a wrong length")
        self._idle_frame()  # nothing to do: the peer opens no more streams and closes when it is done

    def _window_update(self, _: int, stream_id: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "WINDOW_UPDATE of a wrong length")
        self._idle_frame()
        increment = int.from_bytes(payload, "big") & http2.MAX_WINDOW_BYTES
        if stream_id == 0:
            self.outbound.widen(None, increment)
            return
        self._check_not_idle(stream_id)
        if (stream := self.streams.get(stream_id)) is not None:
            self.outbound.widen(stream.send_queue, increment)

    # --- limits -----------------------------------------------------------------------------------------------------

    def _check_not_idle(self, stream_id: int) -> None:
        if stream_id > self._last_stream_id or stream_id % 2 == 0:
            raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "a frame on a stream that was never opened")

    def _idle_frame(self, cost: int = 1) -> None:
        """Count a frame without content for us. Each answer allows some more of them, for the peer's window updates."""
        self._idle.earn(self.outbound.answers * self._limits.idle_frames_per_answer)
        self.outbound.answers = 0
        if not self._idle.spend(cost, now=self._clock()):
            raise Http2ConnectionError(ErrorCode.ENHANCE_YOUR_CALM, "too many frames without content")

    def _count_reset(self) -> None:
        """Count a stream that failed by the peer's reset or error."""
        if not self._resets.spend(1, now=self._clock()) and not self.retiring:
            log.warning("too many streams of one HTTP/2 connection are reset; it may finish what is in flight")
            self.retire(ErrorCode.ENHANCE_YOUR_CALM, "too many streams are reset")


_HANDLERS: tuple[Callable[[Http2Session, int, int, bytes], None], ...] = (  # by kind
    Http2Session._data,
    Http2Session._headers_frame,
    Http2Session._priority,
    Http2Session._rst_stream,
    Http2Session._settings,
    Http2Session._push_promise,
    Http2Session._ping,
    Http2Session._goaway,
    Http2Session._window_update,
    Http2Session._continuation,
)
