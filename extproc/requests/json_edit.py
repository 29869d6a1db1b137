"""Edits raw JSON: changes top-level fields of an object, and finds the model's name in a response as it arrives.

The pod's request differs from the client's only in changed or removed fields. Numbers, key order, spaces, unknown
fields and duplicate keys survive, as all other bytes are copied.
"""

import json
import re
from collections.abc import Iterator, Mapping

import msgspec

from extproc.errors import BodyTooLargeError, MalformedRequestError
from extproc.requests.json_body import has_too_many_parts, may_be_object

# possessive, so that a long string with many escapes costs no backtracking memory
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*+\{[ \t\r\n]*+")
_COLON = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
_RAW_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
# Finds the end of any value that Python's parser accepts. Numbers stay strings, as their conversion could fail.
_LENIENT = json.JSONDecoder(strict=False, parse_int=str, parse_float=str, parse_constant=str)
MAX_FIELDS = 10_000  # at the top level: about 40 ms; no API has a hundred
MAX_INNER = 16  # inner objects to search per object: 20 us each; no honest client repeats them

_Field = tuple[str, int, int, int]  # name, its offset, and the start and the end of the value


class JsonObject:
    """A JSON object as raw bytes. The positions of its fields are found once, on first use.

    That costs about 1 us per field and 1 ns per byte; about 60 ns per byte if fields occur twice or the body is not
    strict JSON (NaN). Methods raise MalformedRequestError if it is not a JSON object in UTF-8, is nested too deep for
    Python's parser or has more than MAX_FIELDS fields, and BodyTooLargeError if the slow search would take too long.
    """

    __slots__ = ("_found", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._found: list[_Field] | None = None

    @property
    def may_be_object(self) -> bool:
        """Whether the bytes begin like a JSON object."""
        return may_be_object(self.raw)

    def may_name(self, field: str) -> bool:
        """Tell quickly whether there may be a field of this ASCII name: False is certain, True mostly right."""
        raw = self.raw
        # any escape could spell the name; UTF-16 and UTF-32, recognized by their NULs, could hide it
        return b'"%b"' % field.encode() in raw or b"\\u00" in raw or b"\0" in raw[:4]

    def values(self, names: frozenset[str]) -> Mapping[str, bytes]:
        """Return the raw values of these fields, if present; of duplicates the last, like vLLM."""
        return {name: self.raw[start:stop] for name, _, start, stop in self._fields() if name in names}

    def replaced(self, changes: Mapping[str, bytes]) -> bytes:
        """Return the object with the fields of `changes` (name -> JSON) replaced at every occurrence, or appended."""
        raw, fields = self.raw, self._fields()
        parts: list[bytes] = []
        copied = 0
        for name, _, start, stop in fields:
            if (value := changes.get(name)) is not None:
                parts += (raw[copied:start], value)
                copied = stop
        names = {name for name, *_ in fields}
        missing = [json.dumps(name).encode() + b":" + value for name, value in changes.items() if name not in names]
        if missing:
            end = fields[-1][3] if fields else _start(raw)
            parts += (raw[copied:end], b"," if fields else b"", b",".join(missing))
            copied = end
        parts.append(raw[copied:])
        return b"".join(parts)

    def without(self, names: frozenset[str], *, within: frozenset[str], depth: int) -> bytes:
        """Return the object without these fields, at the top and up to `depth` levels down in the fields `within`."""
        raw, fields = self.raw, self._fields()
        last = max((number for number, field in enumerate(fields) if field[0] not in names), default=-1)
        if depth and sum(name in within for name, *_ in fields) > MAX_INNER:
            raise MalformedRequestError(f"The request body repeats its fields more than {MAX_INNER} times.")
        parts: list[bytes] = []
        copied = 0
        for number, (name, at, start, stop) in enumerate(fields[: last + 1]):
            if name in names:
                parts.append(raw[copied:at])
                copied = fields[number + 1][1]
            elif depth and name in within and raw[start] == _OBJECT:
                inner = JsonObject(raw[start:stop]).without(names, within=within, depth=depth - 1)
                parts += (raw[copied:start], inner)
                copied = stop
        if last + 1 < len(fields):  # trailing fields, with the comma before them
            parts.append(raw[copied : fields[last][3] if last >= 0 else fields[0][1]])
            copied = fields[-1][3]
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
    """Return the object with these fields (name -> JSON) replaced or appended. Cost and errors: see JsonObject."""
    return JsonObject(body).replaced(changes)


def _fields(body: bytes) -> Iterator[_Field]:
    known = _known_values(body)
    text: str | None = None  # Latin-1: one character per byte, so that offsets agree
    at = _start(body)
    if body[at : at + 1] == b"}":
        _require_end(body, at + 1)
        return
    while True:
        name_at = at
        name, at = _name(body, at)
        stop = _known_stop(body, at, known.get(name))
        if stop is None:
            text = _text(body) if text is None else text
            stop = _stop(text, at)
        yield name, name_at, at, stop
        at = _skip(_SPACE, body, stop)
        sign = body[at : at + 1]
        if sign == b"}":
            _require_end(body, at + 1)
            return
        if sign != b",":
            raise _malformed(at)
        at = _skip(_SPACE, body, at + 1)


def _known_values(body: bytes) -> Mapping[str, bytes]:
    """Return the raw values found by a fast parser: their lengths save scanning them again."""
    try:
        # copied once here, not per use: a name may occur a thousand times
        return {name: bytes(value) for name, value in _RAW_FIELDS.decode(body).items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}  # NaN, a byte order mark, …: the slow search finds the values


def _start(body: bytes) -> int:
    if (match := _START.match(body)) is None:
        raise MalformedRequestError("The request body is not a JSON object in UTF-8.")
    return match.end()


def _name(body: bytes, at: int) -> tuple[str, int]:
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
    if known is None or not body.startswith(known, at):
        return None
    stop = at + len(known)
    after = _skip(_SPACE, body, stop)
    # an earlier duplicate may be a longer number that begins like the known one: then no comma or brace follows
    return stop if body[after : after + 1] in (b",", b"}") else None


def _text(body: bytes) -> str:
    if has_too_many_parts(body):  # the parser would make an object for each
        raise BodyTooLargeError("the request body has too many parts to be changed")
    return body.decode("latin-1")


def _stop(text: str, at: int) -> int:
    """Return the end of the value at `at`, found by a C parser: a Python step per bracket would be slow."""
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

_MARK = re.compile(rb'["{}\[\]]')  # brackets change the depth; strings may contain any of them
_ESCAPED = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+)*+', re.DOTALL)  # the inside of a string, as far as it has arrived
_VALUE = re.compile(rb'\s*+:\s*+("[^"\\]*+(?:\\.[^"\\]*+)*+")', re.DOTALL)
_OTHER_THAN_A_TEXT = re.compile(rb'\s*+:\s*+[^\s"]|\s*+[^\s:]')
_MODEL = b'"model"'
_ENVELOPES = frozenset({b'"response"', b'"message"'})
_LONGEST_NAME = 10  # of the names above, with quotes

_QUOTE = 0x22
_OPENING = frozenset(b"{[")
_OBJECT = 0x7B


class ModelFieldSearch:
    """Finds the value of `model` in JSON that may still be arriving, without parsing the rest.

    The field is at the top level (`model`) or in an event's object (`response.model` in the Responses API,
    `message.model` in Anthropic's); a `model` elsewhere belongs to the content. Call `find` again with the grown
    document: it goes on where it stopped.
    """

    __slots__ = ("_at", "_depth", "_in_envelope", "_last_string", "_string_from", "done")

    def __init__(self) -> None:
        self.done = False  # found, or it cannot come any more
        self._at = 0
        self._depth = 0
        self._string_from = -1  # start of the current string, -1 outside of strings
        self._last_string = b""  # the last string if it is short enough for one of the names, quotes included
        self._in_envelope = False

    def find(self, document: bytes | bytearray) -> tuple[int, int] | None:
        """Return the value's span, quotes included, or None if it has not arrived yet or (`done`) will not."""
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
                    # its value has not arrived: start again at the field's name next time
                    self._at, self._string_from = self._at - len(_MODEL) + 1, self._at - len(_MODEL)
                    return None
            self._string_from = -1

    def _end_string(self, document: bytes | bytearray) -> bool:
        """Skip to the string's end and remember the string; return False if its end has not arrived."""
        end = document.find(b'"', self._at)
        if end >= 0 and document.find(b"\\", self._at, end) < 0:
            self._at = end
        else:
            escaped = _ESCAPED.match(document, self._at)
            assert escaped is not None, "it matches the empty string, too"
            self._at = escaped.end()
            if self._at >= len(document) or document[self._at] != _QUOTE:
                return False  # at the end of the document, or in the middle of an escape
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
