"""Change top-level fields of a JSON object in its raw bytes; everything else stays as the client wrote it.

Called where a request must differ from what came: the model's name, what it may generate, its priority. Numbers, key
order, spaces, unknown fields and duplicate keys survive, because nothing but the changed values is written anew.
"""

import json
import re
from collections.abc import Iterator, Mapping

import msgspec

from extproc.errors import BodyTooLargeError, MalformedRequestError
from extproc.requests.json_body import has_too_many_parts

# possessive, so that a long text with many escapes costs no backtracking memory
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\{[ \t\r\n]*+")
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
# in UTF-16 and UTF-32, too, which Python's parser reads: NULs and other marks before the bracket
_ANY_START = re.compile(rb"\x00*+(?:\xef\xbb\xbf|\xff\xfe|\xfe\xff)?[ \t\r\n\x00]*+\{")
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# finds where any value ends that Python's parser takes; numbers stay texts, whose conversion could be refused
_LENIENT = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=str)
MAX_FIELDS = 10_000  # at the top: about 40 ms; no API has a hundred

_Field = tuple[str, int, int]  # name, where its value starts and stops


class JsonObject:
    """A JSON object in its raw bytes; its fields are found when they are first needed, once for reading and writing.

    That costs about a microsecond a field and a nanosecond a byte; about 60 where fields occur twice or the body is no
    strict JSON (NaN). Methods raise MalformedRequestError when it is no JSON object in UTF-8, is nested deeper than
    Python's parser goes, or has more than MAX_FIELDS fields, and BodyTooLargeError where those 60 would be too long.
    """

    __slots__ = ("_found", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._found: list[_Field] | None = None

    @property
    def may_be_object(self) -> bool:
        """Tell whether it begins as an object does."""
        return may_be_object(self.raw)

    def may_name(self, field: str) -> bool:
        """Tell without looking for fields whether there may be one of this ASCII name; mostly right."""
        raw = self.raw
        # an escaped name counts, and so does one in UTF-16 or UTF-32, which have NULs
        return b'"%b"' % field.encode() in raw or b"\\u00" in raw or b"\0" in raw[:4]

    def values(self, names: frozenset[str]) -> Mapping[str, bytes]:
        """Return the raw values of these fields, where they occur; of equal ones the last, which is what vLLM reads."""
        return {name: self.raw[start:stop] for name, start, stop in self._fields() if name in names}

    def replaced(self, changes: Mapping[str, bytes]) -> bytes:
        """Return the object with each field of `changes` (name -> JSON) replaced wherever it occurs, or appended."""
        raw, fields = self.raw, self._fields()
        parts: list[bytes] = []
        copied = 0
        for name, start, stop in fields:
            if (value := changes.get(name)) is not None:
                parts += (raw[copied:start], value)
                copied = stop
        names = {name for name, _, _ in fields}
        missing = [json.dumps(name).encode() + b":" + value for name, value in changes.items() if name not in names]
        if missing:
            end = fields[-1][2] if fields else _start(raw)
            parts += (raw[copied:end], b"," if fields else b"", b",".join(missing))
            copied = end
        parts.append(raw[copied:])
        return b"".join(parts)

    def _fields(self) -> list[_Field]:
        if self._found is None:
            found: list[_Field] = []
            for field in _fields(self.raw):
                if len(found) == MAX_FIELDS:
                    raise MalformedRequestError(f"The request body has more than {MAX_FIELDS} fields.")
                found.append(field)
            self._found = found
        return self._found


def replace_top_level(body: bytes, changes: Mapping[str, bytes]) -> bytes:
    """Return the object with these fields (name -> JSON) replaced or appended; costs and errors as JsonObject's."""
    return JsonObject(body).replaced(changes)


def may_be_object(body: bytes) -> bool:
    """Tell whether a body begins as JSON objects do, in any encoding that Python's parser reads."""
    return _ANY_START.match(body) is not None


def _fields(body: bytes) -> Iterator[_Field]:
    """Yield each field's name and where its value starts and stops, in order, duplicates included."""
    known = _known_values(body)
    text: str | None = None  # as long as the bytes, so that offsets are the same
    at = _start(body)
    if body[at : at + 1] == b"}":
        _require_end(body, at + 1)
        return
    while True:
        name, at = _name(body, at)
        stop = _known_stop(body, at, known.get(name))
        if stop is None:
            text = _text(body) if text is None else text
            stop = _stop(text, at)
        yield name, at, stop
        at = _skip(_SPACE, body, stop)
        sign = body[at : at + 1]
        if sign == b"}":
            _require_end(body, at + 1)
            return
        if sign != b",":
            raise _malformed(at)
        at = _skip(_SPACE, body, at + 1)


def _known_values(body: bytes) -> Mapping[str, bytes]:
    """Return the raw values as a fast parser found them: their lengths save looking into them."""
    try:
        # copied here once: a name may occur a thousand times
        return {name: bytes(value) for name, value in _RAW_FIELDS.decode(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}  # NaN, a byte order mark, …: found step by step


def _start(body: bytes) -> int:
    if (match := _START.match(body)) is None:
        raise MalformedRequestError("The request body is not a JSON object in UTF-8.")
    return match.end()


def _name(body: bytes, at: int) -> tuple[str, int]:
    """Return a field's name and where its value starts."""
    string = _STRING.match(body, at)
    colon = _COLON.match(body, string.end()) if string is not None else None
    if string is None or colon is None:
        raise _malformed(at)
    raw = string.group()
    try:
        return (json.loads(raw) if b"\\" in raw else raw[1:-1].decode()), colon.end()
    except ValueError:
        raise _malformed(at) from None


def _known_stop(body: bytes, at: int, known: bytes | None) -> int | None:
    """Return where the value that starts at `at` ends if it is the known one."""
    if known is None or not body.startswith(known, at):
        return None
    stop = at + len(known)
    after = _skip(_SPACE, body, stop)
    # a number may begin like the last value of the same name: then more of it follows
    return stop if body[after : after + 1] in (b",", b"}") else None


def _text(body: bytes) -> str:
    if has_too_many_parts(body):  # the parser makes an object of each
        raise BodyTooLargeError("the request body has too many parts to be changed")
    return body.decode("latin-1")


def _stop(text: str, at: int) -> int:
    """Return where the value that starts at `at` ends, found by a parser in C: a step in Python a bracket is slow."""
    try:
        return _LENIENT.raw_decode(text, at)[1]
    except (ValueError, RecursionError):
        raise _malformed(at) from None


def _require_end(body: bytes, at: int) -> None:
    if _skip(_SPACE, body, at) != len(body):
        raise _malformed(at)


def _skip(pattern: re.Pattern[bytes], body: bytes, at: int) -> int:
    match = pattern.match(body, at)
    return at if match is None else match.end()


def _malformed(at: int) -> MalformedRequestError:
    return MalformedRequestError(f"The request body is not a JSON object in UTF-8 (byte {at}).")
