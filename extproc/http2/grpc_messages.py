"""gRPC over HTTP/2: messages with their five-byte prefix, and statuses as complete header blocks. Pure.

Format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from enum import IntEnum
from functools import lru_cache
from urllib.parse import quote

from extproc.http2.frames import literal

PREFIX_BYTES = 5
MOST_PIECES = 64  # of an incomplete message, before they are joined: 1 MiB in frames of 16 KiB
MAX_STATUS_TEXT = 512  # characters; peers limit the size of trailers
# all printable characters except the escape itself stay (the specification's grammar of Status-Message)
_UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class GrpcStatus(IntEnum):
    """The status codes that our server sends (https://grpc.io/docs/guides/status-codes/)."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GrpcError(Exception):
    """Ends a stream with a status other than OK; `reason` is its text."""

    def __init__(self, status: GrpcStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


# `:status: 200` is entry 8 of the static table
RESPONSE_HEADERS = b"\x88" + literal(b"content-type", b"application/grpc")


@lru_cache(maxsize=256)  # nearly always status 0; the texts are ours
def trailers(status: GrpcStatus, text: str = "") -> bytes:
    """Return the header block that ends a stream."""
    block = literal(b"grpc-status", str(int(status)).encode())
    if text:
        block += literal(b"grpc-message", quote(text[:MAX_STATUS_TEXT], safe=_UNESCAPED).encode())
    return block


class MessageReader:
    """Cuts one stream's bytes into messages. The caller bounds the bytes fed but not yet taken."""

    __slots__ = ("_buffer", "_following", "_max_message_bytes", "_missing", "_position", "rest_bytes")

    def __init__(self, *, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._buffer = b""
        self._position = 0
        # bytes after the buffer, joined with it once a message is complete: a body of several frames is copied once
        # instead of at each frame
        self._following: list[bytes | bytearray] = []
        self._missing = 0  # bytes still needed before another look is useful
        self.rest_bytes = 0  # fed, but not taken as a message

    def clear(self) -> None:
        """Drop the bytes not taken as a message."""
        self._buffer = b""
        self._following = []
        self._position = self.rest_bytes = 0

    def feed(self, data: bytes) -> None:
        """Add the next bytes. A frame of whole messages, the usual case, is not copied."""
        following = self._following
        if not self.rest_bytes:
            self._buffer = data
            self._position = self._missing = 0
            self.rest_bytes = len(data)
            return
        self.rest_bytes += len(data)
        following.append(data)
        self._missing -= len(data)
        if len(following) > MOST_PIECES:  # each piece is an object, even if it has only a few bytes
            joined = bytearray(following[0]) if isinstance(following[0], bytes) else following[0]
            joined += b"".join(following[1:])
            self._following = [joined]

    def next_message(self) -> bytes | None:
        """Return the next complete message, or None if there is none yet; raise GrpcError for an invalid one."""
        if self._following:
            if self._missing > 0:
                return None
            self._buffer = b"".join((self._buffer[self._position :], *self._following))
            self._following = []
            self._position = 0
        buffer = self._buffer
        start = self._position + PREFIX_BYTES
        if len(buffer) < start:
            self._missing = start - len(buffer)
            return None
        size = int.from_bytes(buffer[start - 4 : start], "big")
        if buffer[self._position]:
            raise GrpcError(GrpcStatus.UNIMPLEMENTED, "compressed messages are not supported")
        if size > self._max_message_bytes:
            raise GrpcError(
                GrpcStatus.RESOURCE_EXHAUSTED,
                f"a message of {size} bytes is over the limit of {self._max_message_bytes} bytes",
            )
        end = start + size
        if len(buffer) < end:
            self._missing = end - len(buffer)
            return None
        message = buffer[start:end]
        self.rest_bytes -= PREFIX_BYTES + size
        if end == len(buffer):
            self._buffer = b""  # a large message must not stay until the next one
            self._position = 0
        else:
            self._position = end
        return message
