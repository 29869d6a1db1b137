"""A client's end of an HTTP/2 connection without sockets: frames as bytes for a session, and its answers read back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import (
    ContinuationFrame,
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from extproc.http2 import frames as http2
from extproc.http2.frames import Http2ConnectionError
from extproc.http2.grpc_messages import GrpcStatus
from extproc.http2.grpc_stream import GrpcStream
from extproc.http2.limits import Http2Limits
from extproc.http2.session import Http2Session

REQUEST = (
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/test/Echo"),
    (":authority", "picker"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
)


def framed(message: bytes) -> bytes:
    return b"\0" + len(message).to_bytes(4, "big") + message


@dataclass(eq=False)
class EchoCall:
    """Sends every message back; `hold` and `boom` are messages that do as they say."""

    stream: GrpcStream
    ends: int = 0
    half_closes: int = 0
    messages: list[bytes] = field(default_factory=list)
    partials: list[int] = field(default_factory=list)

    def message(self, data: bytes) -> None:
        self.messages.append(data)
        if data == b"hold":
            self.stream.hold()
        if data == b"boom":
            raise ZeroDivisionError
        self.stream.send(data)

    def partial(self, size: int) -> None:
        self.partials.append(size)

    def half_closed(self) -> None:
        self.half_closes += 1
        self.stream.finish()

    def ended(self) -> None:
        self.ends += 1
        if self.messages == [b"bad end"]:
            raise ZeroDivisionError


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Peer:
    """Client and session, back to back."""

    def __init__(
        self, *, limits: Http2Limits | None = None, max_message_bytes: int = 1 << 20, greet: bool = True
    ) -> None:
        self.clock = Clock()
        self.calls: list[EchoCall] = []
        self.flushes = 0
        self.session = Http2Session(
            methods={b"/test/Echo": self._serve},
            limits=limits or Http2Limits(),
            max_message_bytes=max_message_bytes,
            flush=self._flushed,
            clock=self.clock,
        )
        self.encoder, self.decoder = Encoder(), Decoder()
        if greet:
            self.session.receive(http2.PREFACE + SettingsFrame(0).serialize())
            assert [type(frame) for frame in self.answers()] == [SettingsFrame, WindowUpdateFrame, SettingsFrame]

    def _serve(self, stream: GrpcStream) -> EchoCall:
        self.calls.append(EchoCall(stream))
        return self.calls[-1]

    def _flushed(self) -> None:
        self.flushes += 1

    # --- frames to the session ----------------------------------------------------------------------------------

    def block(self, *changes: tuple[str, str]) -> bytes:
        fields: dict[str, str] = dict(REQUEST) | dict(changes)
        return self.encoder.encode(sorted(fields.items(), key=lambda part: part[0][:1] != ":"))

    def headers(self, stream_id: int, *changes: tuple[str, str], end: bool = False) -> bytes:
        frame = HeadersFrame(
            stream_id, data=self.block(*changes), flags=["END_HEADERS", *(["END_STREAM"] if end else [])]
        )
        return frame.serialize()

    def data(self, stream_id: int, content: bytes, *, end: bool = False) -> bytes:
        return DataFrame(stream_id, data=content, flags=["END_STREAM"] if end else []).serialize()

    def messages(self, stream_id: int, *messages: bytes, end: bool = False) -> bytes:
        return self.data(stream_id, b"".join(map(framed, messages)), end=end)

    def reset(self, stream_id: int) -> bytes:
        return RstStreamFrame(stream_id, error_code=8).serialize()

    def window(self, stream_id: int, increment: int) -> bytes:
        return http2.window_frame(stream_id, increment)

    def settings(self, **values: int) -> bytes:
        return http2.settings_frame({http2.Setting[name]: value for name, value in values.items()})

    def continuation(self, stream_id: int, block: bytes, *, end: bool) -> bytes:
        return ContinuationFrame(stream_id, data=block, flags=["END_HEADERS"] if end else []).serialize()

    # --- what came of it ------------------------------------------------------------------------------------------

    def send(self, *frames: bytes) -> list[Frame]:
        """Let the session receive the frames and return its answers."""
        self.session.receive(b"".join(frames))
        while self.session.has_more:
            self.session.receive(b"")
        return self.answers()

    def answers(self) -> list[Frame]:
        data = b"".join(self.session.outbound.frames)
        self.session.outbound.frames.clear()
        self.session.forget_finished()
        frames = []
        while data:
            frame, length = Frame.parse_frame_header(memoryview(data)[:9])
            frame.parse_body(memoryview(data)[9 : 9 + length])
            frames.append(frame)
            data = data[9 + length :]
        return frames

    def reply(self, *frames: bytes) -> list[Any]:
        """Let the session receive the frames and return its answers in short."""
        return [self.in_short(frame) for frame in self.send(*frames)]

    def in_short(self, frame: Frame) -> Any:
        if isinstance(frame, HeadersFrame):
            fields = {name.decode(): value.decode() for name, value in self.decoder.decode(frame.data, raw=True)}
            return (frame.stream_id, fields.get("grpc-status", fields.get(":status")), "END_STREAM" in frame.flags)
        if isinstance(frame, DataFrame):
            return (frame.stream_id, bytes(frame.data))
        if isinstance(frame, RstStreamFrame):
            return ("reset", frame.stream_id, http2.ErrorCode(frame.error_code).name)
        if isinstance(frame, WindowUpdateFrame):
            return ("window", frame.stream_id, frame.window_increment)
        if isinstance(frame, GoAwayFrame):
            return ("goaway", frame.last_stream_id, http2.ErrorCode(frame.error_code).name)
        if isinstance(frame, PingFrame):
            return ("ping", frame.opaque_data, "ACK" in frame.flags)
        assert isinstance(frame, SettingsFrame)
        return ("settings", "ACK" in frame.flags)

    def fault(self, *frames: bytes) -> http2.ErrorCode:
        """Let the session receive frames that end the connection and return the error's code."""
        try:
            self.send(*frames)
        except Http2ConnectionError as error:
            return error.code
        raise AssertionError("the connection lives on")


def answer_of(stream_id: int, *messages: bytes, status: int = GrpcStatus.OK, ended: bool = True) -> Sequence[Any]:
    """The answers to a stream whose client has ended it."""
    replies: list[Any] = [(stream_id, "200", False), *((stream_id, framed(message)) for message in messages)]
    return [*replies, (stream_id, str(int(status)), True)] if ended else replies
