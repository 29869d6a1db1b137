"""gRPC over HTTP/2: messages with their prefix of five bytes, statuses as ready header blocks. Pure.

Format: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

from enum import IntEnum
from functools import lru_cache
from urllib.parse import quote

from extproc.http2.frames import literal

PREFIX_BYTES = 5
MOST_PIECES = 64  # of a message that is not complete: one of 1 MiB in frames of 16 KiB
MAX_STATUS_TEXT = 512  # characters; peers bound what they take as trailers
# everything printable but the escape itself stays (the specification's grammar of Status-Message)
_UNESCAPED = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


class GrpcStatus(IntEnum):
    """The codes that a server of ours answers (https://grpc.io/docs/guides/status-codes/)."""

    OK = 0
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class GrpcError(Exception):
    """A stream that ends with a status other than OK; `reason` is the text beside it."""

    def __init__(self, status: GrpcStatus, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


# `:status: 200` is entry 8 of the static table
RESPONSE_HEADERS = b"\x88" + literal(b"content-type", b"application/grpc")


@lru_cache(maxsize=256)  # nearly always status 0; texts are ours
def trailers(status: GrpcStatus, text: str = "") -> bytes:
    """Return the header block that ends a stream."""
    block = literal(b"grpc-status", str(int(status)).encode())
    if text:
        block += literal(b"grpc-message", quote(text[:MAX_STATUS_TEXT], safe=_UNESCAPED).encode())
    return block


class MessageReader:
    """Cuts one stream's bytes into messages. Holds what was fed and not yet taken; the caller bounds that."""

    __slots__ = ("_buffer", "_following", "_max_message_bytes", "_missing", "_position")

    def __init__(self, *, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes
        self._buffer = b""
        self._position = 0
        # what came after the buffer, joined with it once a message is there as a whole: a body of several frames is
        # copied once and not at each frame
        self._following: list[bytes | bytearray] = []
        self._missing = 0  # bytes that have to come before it is worth looking again

    @property
    def rest_bytes(self) -> int:
        """How many bytes were fed that no message has taken."""
        return len(self._buffer) - self._position + sum(map(len, self._following))

    def clear(self) -> None:
        """Forget what no message has taken."""
        self._buffer = b""
        self._following = []
        self._position = 0

    def feed(self, data: bytes) -> None:
        """Take the next bytes. A frame that brings whole messages, as most do, is not copied."""
        following = self._following
        if not following and self._position == len(self._buffer):
            self._buffer = data
            self._position = self._missing = 0
            return
        following.append(data)
        self._missing -= len(data)
        if len(following) > MOST_PIECES:  # each of them an object, however few bytes it has
            joined = bytearray(following[0]) if isinstance(following[0], bytes) else following[0]
            joined += b"".join(following[1:])
            self._following = [joined]

    def next_message(self) -> bytes | None:
        """Return the next whole message, None if there is none yet, or raise GrpcError."""
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
        if end == len(buffer):
            self._buffer = b""  # a large message must not stay until the next one
            self._position = 0
        else:
            self._position = end
        return message
