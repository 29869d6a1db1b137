"""Reads one HTTP/1.1 response (RFC 9112) from bytes as they arrive. Pure.

Sufficient for a plain request over a kept connection: no encoding but identity, and trailers end the connection. A
server may answer anything: input beyond the limits is refused, and each byte is read once.
"""

import re
from collections.abc import Generator

import msgspec

MAX_HEAD_BYTES = 16 << 10
MAX_HEAD_LINES = 128
MAX_INTERIM_RESPONSES = 8  # 1xx, before the answer
MAX_SIZE_LINE_BYTES = 1 << 10  # of a chunk: its size in hex, and perhaps extensions, which are ignored
MAX_CHUNKS = 1024  # plus one for each KiB: servers send their data in chunks as it comes, or a few KiB at a time
BYTES_A_CHUNK = 1 << 10
LINE_END = b"\r\n"

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: .*)?")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_LENGTH = re.compile(rb"[0-9]{1,15}")

_Parser = Generator[None, None, "HttpResponse"]  # waits for more bytes at each yield


class HttpResponseError(ValueError):
    """The received bytes are not a readable response."""


class HttpResponse(msgspec.Struct, frozen=True, kw_only=True):
    """One whole response."""

    status: int
    body: bytes
    keep_alive: bool  # another request may follow on the connection
    date: bytes = b""  # the server's clock, as written


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    keep_alive: bool
    chunked: bool
    date: bytes
    length: int | None  # of the body in bytes; None if it ends with the connection, or is chunked


class ResponseReader:
    """Reads one response; make a new one for the next."""

    def __init__(self, *, max_body_bytes: int) -> None:
        self._max_body_bytes = max_body_bytes
        self._buffer = bytearray()  # received, not yet taken
        self._searched = 0  # of these, without a mark
        self._ended = False
        self._parser = self._response()
        self.began = False  # some bytes were received

    def feed(self, data: bytes) -> HttpResponse | None:
        """Process received bytes; return the response once it is complete. Raise HttpResponseError."""
        self.began = True
        self._buffer += data
        return self._resume()

    def end(self) -> HttpResponse | None:
        """Note that the connection has ended, which is how some bodies end. Raise HttpResponseError."""
        self._ended = True
        return self._resume()

    def _resume(self) -> HttpResponse | None:
        try:
            next(self._parser)
        except StopIteration as done:
            response: HttpResponse = done.value
            return response
        return None

    def _response(self) -> _Parser:
        for _ in range(1 + MAX_INTERIM_RESPONSES):
            head = _read_head((yield from self._until(LINE_END * 2, limit=MAX_HEAD_BYTES)))
            if head.status >= 200:  # interim responses are ignored
                break
        else:
            raise HttpResponseError(f"more than {MAX_INTERIM_RESPONSES} interim responses came before the answer")
        if head.chunked:
            body = yield from self._chunks()
        elif head.length is not None:
            self._require_small(head.length)
            body = yield from self._exactly(head.length)
        else:
            body = yield from self._rest()
        # further bytes belong to no request of ours
        keep_alive = head.keep_alive and not self._buffer and not self._ended
        return HttpResponse(status=head.status, body=body, keep_alive=keep_alive, date=head.date)

    def _chunks(self) -> Generator[None, None, bytes]:
        body = bytearray()
        count = 0
        while size := _chunk_size((yield from self._until(LINE_END, limit=MAX_SIZE_LINE_BYTES))):
            count += 1
            if count > MAX_CHUNKS + len(body) // BYTES_A_CHUNK:
                raise HttpResponseError(f"the page comes in chunks of much less than {BYTES_A_CHUNK} bytes")
            self._require_small(len(body) + size)
            body += yield from self._exactly(size)
            if (yield from self._exactly(len(LINE_END))) != LINE_END:
                raise HttpResponseError("a chunk is longer than its size says")
        while len(self._buffer) < len(LINE_END):
            yield from self._more()
        if self._buffer.startswith(LINE_END):  # else trailers follow: they stay, and the connection is not used again
            del self._buffer[: len(LINE_END)]
        return bytes(body)

    def _rest(self) -> Generator[None, None, bytes]:
        while not self._ended:
            self._require_small(len(self._buffer))
            yield
        return self._take(len(self._buffer))

    def _until(self, mark: bytes, *, limit: int) -> Generator[None, None, bytes]:
        while (end := self._buffer.find(mark, self._searched, limit)) < 0:
            if len(self._buffer) >= limit:
                raise HttpResponseError(f"no end of a line or of the headers within {limit} bytes")
            self._searched = max(len(self._buffer) - len(mark) + 1, 0)
            yield from self._more()
        self._searched = 0
        taken = self._take(end)
        del self._buffer[: len(mark)]
        return taken

    def _exactly(self, count: int) -> Generator[None, None, bytes]:
        while len(self._buffer) < count:
            yield from self._more()
        return self._take(count)

    def _more(self) -> Generator[None, None, None]:
        if self._ended:
            raise HttpResponseError("the connection ended before the response did")
        yield

    def _take(self, count: int) -> bytes:
        with memoryview(self._buffer) as view:  # a slice of the buffer itself would copy the page once more
            taken = bytes(view[:count])
        del self._buffer[:count]
        return taken

    def _require_small(self, size: int) -> None:
        if size > self._max_body_bytes:
            raise HttpResponseError(f"the page is larger than {self._max_body_bytes} bytes")


def _read_head(head: bytes) -> _Head:
    first, *lines = head.split(LINE_END, MAX_HEAD_LINES)
    if len(lines) == MAX_HEAD_LINES:
        raise HttpResponseError(f"the answer has {MAX_HEAD_LINES} header lines or more")
    status_line = _STATUS_LINE.fullmatch(first)
    if status_line is None:
        raise HttpResponseError("the answer is not HTTP/1")
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        fields.setdefault(name.lower(), []).append(value.strip().lower())
    codings = fields.get(b"transfer-encoding", [])
    if codings not in ([], [b"chunked"]) or fields.get(b"content-encoding", [b"identity"]) != [b"identity"]:
        raise HttpResponseError("the answer is encoded, though this was not asked for")
    status, connection = int(status_line[2]), b",".join(fields.get(b"connection", []))
    kept = b"keep-alive" in connection if status_line[1] == b"0" else b"close" not in connection
    return _Head(
        status=status,
        keep_alive=kept,
        chunked=bool(codings),
        length=_length(status, fields),
        date=fields.get(b"date", [b""])[0],
    )


def _length(status: int, fields: dict[bytes, list[bytes]]) -> int | None:
    if status in (204, 304):
        return 0
    lengths = set(fields.get(b"content-length", ()))
    if len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise HttpResponseError("the answer's content-length is no number")
    return int(lengths.pop()) if lengths else None


def _chunk_size(line: bytes) -> int:
    size = _SIZE.fullmatch(line)
    if size is None:
        raise HttpResponseError("a chunk has no size")
    return int(size[1], 16)
