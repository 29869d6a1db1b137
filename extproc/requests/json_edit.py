"""JSON in its raw bytes: change top-level fields of an object, and find the model's name in a response that arrives.

A request differs from what came only in the model's name, what it may generate, or its priority. Numbers, key order,
spaces, unknown fields and duplicate keys survive, because nothing but the changed values is written anew.
"""

import json
import re
from collections.abc import Iterator, Mapping

import msgspec

from extproc.errors import BodyTooLargeError, MalformedRequestError
from extproc.requests.json_body import has_too_many_parts, may_be_object

# possessive, so that a long text with many escapes costs no backtracking memory
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\{[ \t\r\n]*+")
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
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


# --- the value of `model` in a response -------------------------------------------------------------------------------

_MARK = re.compile(rb'["{}\[\]]')  # what changes the depth, and strings, which may hold any of it
_ESCAPED = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # as much of a string's inside as there is
_VALUE = re.compile(rb'\s*+:\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_OTHER_THAN_A_TEXT = re.compile(rb'\s*+:\s*+[^\s"]|\s*+[^\s:]')
_MODEL = b'"model"'
_ENVELOPES = frozenset({b'"response"', b'"message"'})
_LONGEST_NAME = 10  # of those above, with quotes

_QUOTE = 0x22
_OPENING = frozenset(b"{[")
_OBJECT = 0x7B


class ModelFieldSearch:
    """Finds the value of `model` in JSON that may still be arriving, without parsing the rest.

    The name stands at the top (`model`), or in the object of an event (`response.model` of the Responses API,
    `message.model` of Anthropic's): a `model` anywhere else belongs to the content. Call `find` again with the same
    document, longer; no byte is looked at twice.
    """

    __slots__ = ("_at", "_depth", "_in_envelope", "_last_string", "_string_from", "done")

    def __init__(self) -> None:
        self.done = False  # there is nothing more to find
        self._at = 0
        self._depth = 0
        self._string_from = -1  # where the string began that has not ended
        self._last_string = b""  # if it is short: perhaps the name of a field
        self._in_envelope = False

    def find(self, document: bytes | bytearray) -> tuple[int, int] | None:
        """Return where the value stands, quotes included; None where it has not come yet, or (`done`) will not."""
        while True:
            if self._string_from < 0:
                mark = _MARK.search(document, self._at)
                if mark is None:
                    self._at = len(document)
                    return None
                self._at = mark.end()
                if document[mark.start()] != _QUOTE:
                    self._step(document[mark.start()])
                    if self.done:
                        return None
                    continue
                self._string_from = mark.start()
            if not self._end_string(document):
                return None
            if self._last_string == _MODEL and (self._depth == 1 or (self._depth == 2 and self._in_envelope)):
                if (value := _VALUE.match(document, self._at)) is not None:
                    self.done = True
                    return value.span(1)
                if _OTHER_THAN_A_TEXT.match(document, self._at) is None:
                    # its value is not here yet: take the field's name again then
                    self._at, self._string_from = self._at - len(_MODEL) + 1, self._at - len(_MODEL)
                    return None
            self._string_from = -1

    def _end_string(self, document: bytes | bytearray) -> bool:
        """Go behind the string's end and note the string; False where its end has not come."""
        end = document.find(b'"', self._at)
        if end >= 0 and document.find(b"\\", self._at, end) < 0:
            self._at = end
        else:
            escaped = _ESCAPED.match(document, self._at)
            assert escaped is not None, "it matches the empty string, too"
            self._at = escaped.end()
            if self._at >= len(document) or document[self._at] != _QUOTE:
                return False  # or in the middle of an escape
        self._at += 1
        is_short = self._at - self._string_from <= _LONGEST_NAME
        self._last_string = bytes(document[self._string_from : self._at]) if is_short else b""
        return True

    def _step(self, bracket: int) -> None:
        if bracket in _OPENING:
            if self._depth == 1:
                self._in_envelope = bracket == _OBJECT and self._last_string in _ENVELOPES
            self._depth += 1
        else:
            self._depth -= 1
            if self._depth == 1:
                self._in_envelope = False
            self.done = self._depth <= 0
