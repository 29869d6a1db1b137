"""HTTP/2 frames as bytes (RFC 9113): constants, encoding of a server's frames, validation of received ones. Pure.

Stream states, windows and header compression are not here.
"""

import struct
from enum import IntEnum

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
FRAME_HEADER = struct.Struct(">BHBBL")  # length (8 high bits, 16 low), kind, flags, stream
# the largest frame that a peer may send unless our SETTINGS allow more, and that every peer must accept
MAX_FRAME_BYTES = 16_384
MAX_FRAME_BYTES_OF_ANY_PEER = (1 << 24) - 1
MAX_WINDOW_BYTES = (1 << 31) - 1
DEFAULT_WINDOW_BYTES = 65_535
LAST_STREAM_ID = (1 << 31) - 1

# Plain integers, not an IntEnum: they are compared at least once per frame.
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM = ACK = 0x1
END_HEADERS = 0x4
PADDED = 0x8
HAS_PRIORITY = 0x20

_SETTING = struct.Struct(">HL")
_PRIORITY_BYTES = 5


class ErrorCode(IntEnum):
    """RFC 9113, section 7."""

    NO_ERROR = 0x0
    PROTOCOL_ERROR = 0x1
    INTERNAL_ERROR = 0x2
    FLOW_CONTROL_ERROR = 0x3
    SETTINGS_TIMEOUT = 0x4
    STREAM_CLOSED = 0x5
    FRAME_SIZE_ERROR = 0x6
    REFUSED_STREAM = 0x7
    CANCEL = 0x8
    COMPRESSION_ERROR = 0x9
    CONNECT_ERROR = 0xA
    ENHANCE_YOUR_CALM = 0xB
    INADEQUATE_SECURITY = 0xC
    HTTP_1_1_REQUIRED = 0xD


class Setting(IntEnum):
    """RFC 9113, section 6.5.2."""

    HEADER_TABLE_SIZE = 0x1
    ENABLE_PUSH = 0x2
    MAX_CONCURRENT_STREAMS = 0x3
    INITIAL_WINDOW_SIZE = 0x4
    MAX_FRAME_SIZE = 0x5
    MAX_HEADER_LIST_SIZE = 0x6


class Http2Error(Exception):
    """The peer broke a rule."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason


class Http2ConnectionError(Http2Error):
    """An error that ends the connection: GOAWAY with `code`, and `reason` as its debug data."""


class Http2StreamError(Http2Error):
    """An error that ends a stream: RST_STREAM with `code`."""


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """Return one frame; the caller respects the peer's MAX_FRAME_SIZE."""
    size = len(payload)
    return FRAME_HEADER.pack(size >> 16, size & 0xFFFF, kind, flags, stream_id) + payload


def settings_frame(values: dict[Setting, int]) -> bytes:
    """Return a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(name, value) for name, value in values.items()))


def reset_frame(stream_id: int, code: ErrorCode) -> bytes:
    """Return an RST_STREAM frame."""
    return frame(RST_STREAM, 0, stream_id, code.to_bytes(4, "big"))


def window_frame(stream_id: int, increment: int) -> bytes:
    """Return a WINDOW_UPDATE frame; stream 0 is the connection."""
    return frame(WINDOW_UPDATE, 0, stream_id, increment.to_bytes(4, "big"))


def goaway_frame(last_stream_id: int, code: ErrorCode, reason: str = "") -> bytes:
    """Return a GOAWAY frame with the reason as debug data."""
    payload = last_stream_id.to_bytes(4, "big") + code.to_bytes(4, "big") + reason.encode("ascii", "replace")
    return frame(GOAWAY, 0, 0, payload)


def parse_settings(payload: bytes) -> dict[int, int]:
    """Return a SETTINGS frame's values, or raise Http2ConnectionError. Of duplicates the last counts."""
    if len(payload) % _SETTING.size:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
    values: dict[int, int] = dict(_SETTING.iter_unpack(payload))
    if values.get(Setting.ENABLE_PUSH, 0) > 1:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
    if values.get(Setting.INITIAL_WINDOW_SIZE, 0) > MAX_WINDOW_BYTES:
        raise Http2ConnectionError(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is too large")
    if not MAX_FRAME_BYTES <= values.get(Setting.MAX_FRAME_SIZE, MAX_FRAME_BYTES) <= MAX_FRAME_BYTES_OF_ANY_PEER:
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
    return values


def unpadded(payload: bytes, flags: int) -> bytes:
    """Return a DATA frame's content without its padding, or raise Http2ConnectionError."""
    if not flags & PADDED:
        return payload
    if not payload:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "a padded frame without the length of its padding")
    padding = payload[0]
    if padding >= len(payload):
        raise Http2ConnectionError(ErrorCode.PROTOCOL_ERROR, "more padding than frame")
    return payload[1 : len(payload) - padding]


def header_fragment(payload: bytes, flags: int) -> bytes:
    """Return a HEADERS frame's part of the header block, or raise Http2ConnectionError. Priorities are ignored."""
    fragment = unpadded(payload, flags)
    if not flags & HAS_PRIORITY:
        return fragment
    if len(fragment) < _PRIORITY_BYTES:
        raise Http2ConnectionError(ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for their priority")
    return fragment[_PRIORITY_BYTES:]


def literal(name: bytes, value: bytes) -> bytes:
    """Return one header field as a literal with a literal name, without indexing (RFC 7541, section 6.2.2)."""
    return b"\x00" + _string(name) + _string(value)


def _string(text: bytes) -> bytes:
    """Return a string literal without Huffman coding: its length with a prefix of 7 bits, then the bytes."""
    length = len(text)
    if length < 0x7F:
        return bytes((length,)) + text
    prefix = bytearray(b"\x7f")
    length -= 0x7F
    while length >= 0x80:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + text
