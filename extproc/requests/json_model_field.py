"""Finds the value of a response's `model` in JSON that may still be arriving, without parsing the rest; no I/O.

Used by `response_model`. The name stands at the top (`model`), or in the object of an event (`response.model` of the
Responses API, `message.model` of Anthropic's): a `model` anywhere else belongs to the content.
"""

import re

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
    """Walks through one JSON document; go on with the same document, longer. No byte is looked at twice."""

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
