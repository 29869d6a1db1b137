"""From a body's bytes to typed fields: its content encoding undone, its JSON decoded as vLLM's own parser does.

The pod gets the bytes as they came; vLLM itself reads no coded bodies, but a filter between the picker and the pod may.
msgspec reads nearly all JSON. What it refuses and Python's parser accepts (NaN, Infinity, halves of surrogate pairs, a
byte order mark, UTF-16, numbers beyond a float) is read by that one, if the body is small.
"""

import json
import re
import zlib
from typing import TypeVar

import msgspec

from extproc.errors import BodyTooLargeError, KvmeshError, MalformedRequestError

_T = TypeVar("_T")

BODY_BYTES_WITHOUT_LIMIT = 256 << 10
LONG_BODY_BYTES = 256 << 10  # more is read in a thread: it may take some milliseconds
# What a thread holds Python's lock for, and with it every other request: about 20 ms each.
MAX_CONTAINERS = 100_000  # objects and lists
MAX_ELEMENTS = 600_000  # token ids and their like; more than are looked up of one request
MAX_LENIENT_BYTES = 1 << 20  # Python's parser takes some ten times as long: about 10 ms
OUT_OF_RANGE = "Number out of range"
GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS  # zlib finds out which
RAW_DEFLATE = -zlib.MAX_WBITS  # what some clients send as "deflate"
CODINGS = frozenset(("gzip", "x-gzip", "deflate"))
MAX_CODINGS = 2  # there is no reason for more
MAX_MEMBERS = 64  # gzip streams in one body: each costs a copy of all that follow
# in UTF-16 and UTF-32, too, which Python's parser reads: NULs and other marks before the bracket
_ANY_START = re.compile(rb"\x00*+(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[ \t\r\n\x00]*+\{")


class MalformedFieldError(MalformedRequestError):
    """The body is JSON, but a field that the picker must read has the wrong type."""

    reason = "malformed-request"


class BodyNotReadError(Exception):
    """Reading the body would hold up other requests; the text says why."""


class UnknownContentEncodingError(KvmeshError):
    """The body has a coding that the picker does not read (br, zstd, …)."""


def decode_body(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    """Return the decoder's value of a body; of equal keys the last counts, as in vLLM.

    Raise MalformedRequestError for what vLLM would not parse either, BodyNotReadError for what would take too long.
    """
    if len(body) > BODY_BYTES_WITHOUT_LIMIT and has_too_many_parts(body):
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
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # the latter for half of a surrogate pair
        raise _field_error(error) from error


def _field_error(error: Exception) -> MalformedFieldError:
    return MalformedFieldError(f"The request body has a field of the wrong type: {error}")


def has_too_many_parts(body: bytes) -> bool:
    """Tell whether decoding could hold up other requests: the decoder makes an object a part and keeps the GIL.

    Counts what separates parts, also inside texts, so a very large text full of brackets is routed on load.
    """
    if len(body) <= BODY_BYTES_WITHOUT_LIMIT:
        return False
    return body.count(b"{") + body.count(b"[") > MAX_CONTAINERS or body.count(b",") > MAX_ELEMENTS


def may_be_object(body: bytes) -> bool:
    """Tell whether a body begins as JSON objects do, in any encoding that Python's parser reads."""
    return _ANY_START.match(body) is not None


# --- content encodings: gzip and deflate, never beyond a limit --------------------------------------------------------


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
        for _ in codings:  # in any order: the data itself shows which coding it has
            plain = _unpacked(plain, max_bytes=max_bytes)
    except MalformedRequestError:
        if may_be_object(body):
            return body
        raise
    return plain


class ClientBody:
    """A request's body as the client sent it; its content encoding is undone once, whoever asks first."""

    __slots__ = ("_coding", "_max_bytes", "_plain", "_refusal", "raw")

    def __init__(self, raw: bytes, *, content_encoding: str | None, max_bytes: int) -> None:
        """`content_encoding`: the header's value; `max_bytes`: of the body without it."""
        self.raw = raw
        self._coding = content_encoding
        self._max_bytes = max_bytes
        self._plain = None if content_encoding else raw
        # no exception, whose traceback would hold this very body until the collector comes
        self._refusal: tuple[type[KvmeshError], str] | None = None

    @property
    def is_long(self) -> bool:
        """Whether it is worth a thread. A short body is unpacked for that, as far as a short one goes."""
        if self._plain is None and self._refusal is None and len(self.raw) <= LONG_BODY_BYTES < self._max_bytes:
            try:
                self._unpack(max_bytes=LONG_BODY_BYTES)
            except BodyTooLargeError:
                return True
        return len(self.raw if self._plain is None else self._plain) > LONG_BODY_BYTES

    def plain(self) -> bytes:
        """Return the body without its codings; raise as `decoded_body`."""
        if self._plain is None and self._refusal is None:
            try:
                self._unpack(max_bytes=self._max_bytes)
            except BodyTooLargeError as error:
                self._refusal = BodyTooLargeError, str(error)
        if self._refusal is not None:
            kind, words = self._refusal
            raise kind(words)
        assert self._plain is not None, "it was unpacked, or refused"
        return self._plain

    def _unpack(self, *, max_bytes: int) -> None:
        """Keep the result; raise BodyTooLargeError where it is longer."""
        try:
            self._plain = decoded_body(self.raw, content_encoding=self._coding, max_bytes=max_bytes)
        except (UnknownContentEncodingError, MalformedRequestError) as error:
            self._refusal = type(error), str(error)


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
