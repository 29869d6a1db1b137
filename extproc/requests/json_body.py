"""From a body's bytes to typed fields: undoes the content encoding and decodes the JSON as vLLM's own parser does.

The pod gets the original bytes; vLLM itself reads no coded bodies, but a filter between the picker and the pod may.
msgspec reads nearly all JSON. The rest (NaN, Infinity, halves of surrogate pairs, a byte order mark, UTF-16, numbers
beyond a float) goes to Python's parser, if the body is small.
"""

import json
import re
import zlib
from typing import TypeVar

import msgspec

from extproc.errors import BodyTooLargeError, KvmeshError, MalformedRequestError

_T = TypeVar("_T")

LONG_BODY_BYTES = 256 << 10  # a longer body may take milliseconds: read it in a thread, and count its parts first
# Decoding holds the GIL, and so delays every other request, even from a thread. At these limits about 20 ms each:
MAX_CONTAINERS = 100_000  # objects and lists
MAX_ELEMENTS = 600_000  # token ids and the like; more than are looked up for one request
MAX_LENIENT_BYTES = 1 << 20  # Python's parser is about ten times slower: about 10 ms
OUT_OF_RANGE = "Number out of range"
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib detects which
RAW_DEFLATE = -zlib.MAX_WBITS  # some clients send it as "deflate"
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))
MAX_CODINGS = 2  # there is no use for more
MAX_MEMBERS = 64  # gzip streams in one body: each one costs a copy of the rest
# Python's parser also reads UTF-16 and UTF-32: NULs and byte order marks may precede the bracket.
_ANY_START = re.compile(rb"\x00*+(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[ \t\r\n\x00]*+\{")


class MalformedFieldError(MalformedRequestError):
    """The body is JSON, but a field that the picker must read has the wrong type."""

    reason = "malformed-request"


class BodyNotReadError(Exception):
    """Reading the body would delay other requests; the text says why."""


class UnknownContentEncodingError(KvmeshError):
    """The body has a content coding that the picker does not read (br, zstd, …)."""


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Decode a body; of equal keys the last counts, as in vLLM.

    Raise MalformedRequestError if vLLM could not parse it either, BodyNotReadError if it would take too long.
    """
    if len(body) > LONG_BODY_BYTES and has_too_many_parts(body):
        raise BodyNotReadError("the body has too many parts to be read")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if str(error).startswith(OUT_OF_RANGE):
            return _decode_leniently(decoder, body)
        raise _field_error(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _decode_leniently(decoder, body)
    except RecursionError:
        raise MalformedRequestError("The request body is nested too deeply.") from None


def _decode_leniently(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    if len(body) > MAX_LENIENT_BYTES:
        raise BodyNotReadError("the body is large and has NaN, lone surrogates or the like, or is not JSON at all")
    try:
        value = json.loads(bytes(body))
    except ValueError as error:  # UnicodeDecodeError is one too
        raise MalformedRequestError(f"The request body is not a valid JSON object: {error}") from error
    except RecursionError:
        raise MalformedRequestError("The request body is nested too deeply.") from None
    try:
        return msgspec.convert(value, decoder.type)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # UnicodeEncodeError: half of a surrogate pair
        raise _field_error(error) from error


def _field_error(error: Exception) -> MalformedFieldError:
    return MalformedFieldError(f"The request body has a field of the wrong type: {error}")


def has_too_many_parts(body: bytes) -> bool:
    """Tell whether decoding could delay other requests: the decoder makes one object per part, holding the GIL.

    Counts brackets and commas, even inside strings, so a very large string full of them counts as well.
    """
    if len(body) <= LONG_BODY_BYTES:
        return False
    return body.count(b"{") + body.count(b"[") > MAX_CONTAINERS or body.count(b",") > MAX_ELEMENTS


def may_be_object(body: bytes) -> bool:
    """Tell whether a body begins as JSON objects do, in any encoding that Python's parser reads."""
    return _ANY_START.match(body) is not None


# --- content encodings: gzip and deflate, never beyond a limit --------------------------------------------------------


def decoded_body(body: bytes, *, content_encoding: str | None, max_bytes: int) -> bytes:
    """Return the body without its codings (the header's value, e.g. "gzip"); the same object if it has none.

    An uncoded JSON object under a false header is returned as it is: vLLM ignores the header and would serve it.

    Raise UnknownContentEncodingError (also for more than MAX_MEMBERS streams), MalformedRequestError for damaged data,
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
        for _ in codings:  # in any order: the data itself shows its coding
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
