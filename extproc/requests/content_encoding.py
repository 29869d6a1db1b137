"""Undo `content-encoding` for reading: gzip and deflate, never beyond a limit. The pod gets the bytes as they came.

Called with what Envoy sent, before a body is parsed, rendered or changed. vLLM itself reads no coded bodies; a filter
between us and the pod may.
"""

import zlib

from extproc.errors import BodyTooLargeError, KvmeshError, MalformedRequestError
from extproc.requests.json_edit import may_be_object

GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib finds out which
RAW_DEFLATE = -zlib.MAX_WBITS  # what some clients send as "deflate"
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))
MAX_CODINGS = 2  # nobody has a reason for more
MAX_MEMBERS = 64  # gzip streams in one body: each costs a copy of all that follow


class UnknownContentEncodingError(KvmeshError):
    """The body has a coding that the picker does not read (br, zstd, …)."""


def decoded_body(body: bytes, *, content_encoding: str | None, max_bytes: int) -> bytes:
    """Return the body without its codings (the header's value, e.g. "gzip"); without any it is the same object.

    So is a JSON object under a header that is not true of it: vLLM does not look at the header and would serve it.

    Raise UnknownContentEncodingError (also for more than MAX_MEMBERS pieces), MalformedRequestError for damaged data,
    BodyTooLargeError as soon as more than `max_bytes` come out: the rest is never unpacked.
    """
    if not content_encoding:
        return body
    codings = [name for part in content_encoding.lower().split(",") if (name := part.strip()) not in ("", "identity")]
    if not CODINGS.issuperset(codings) or len(codings) > MAX_CODINGS:
        if may_be_object(body):
            return body
        raise UnknownContentEncodingError(f"the picker does not read the content-encoding {content_encoding[:40]!r}")
    plain = body
    try:
        for _ in codings:  # the last one was applied last, but all are told from the data itself
            plain = _unpacked(plain, max_bytes=max_bytes)
    except MalformedRequestError:
        if may_be_object(body):
            return body
        raise
    return plain


def _unpacked(body: bytes, *, max_bytes: int) -> bytes:
    try:
        return _members(body, GZIP_OR_ZLIB, max_bytes=max_bytes)
    except zlib.error as error:
        try:
            return _members(body, RAW_DEFLATE, max_bytes=max_bytes)
        except zlib.error:
            raise MalformedRequestError(f"The request body's content-encoding is damaged: {error}.") from error


def _members(body: bytes, window: int, *, max_bytes: int) -> bytes:
    """Unpack one stream after another (gzip allows several), at most `max_bytes` in all."""
    parts: list[bytes] = []
    room = max_bytes
    while body or not parts:
        if len(parts) == MAX_MEMBERS:
            raise UnknownContentEncodingError(f"the body is packed in more than {MAX_MEMBERS} pieces")
        stream = zlib.decompressobj(window)
        part = stream.decompress(body, room + 1)
        if len(part) > room:
            raise BodyTooLargeError(f"the request body unpacks to more than {max_bytes} bytes")
        if not stream.eof:
            raise zlib.error("the data ends too early")
        parts.append(part)
        room -= len(part)
        body = stream.unused_data
    return parts[0] if len(parts) == 1 else b"".join(parts)
