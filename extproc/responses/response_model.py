"""Puts the name that the client asked for back into a response whose request was rewritten, as the bytes come; no I/O.

Used by `booked_exchange` for one response each. Nothing but that name changes, however the chunks are cut: a
server-sent event is held back until its line is complete, a JSON body until its `model` has come; what cannot be read
passes as it is.
"""

from typing import Protocol

import msgspec

from extproc.requests.json_edit import ModelFieldSearch

# as much of a response is held back at most; what is longer passes unchanged
MOST_HELD_BACK_BYTES = 4 << 20


class ModelRewriter(Protocol):
    """One response's rewriting."""

    gave_up: bool  # something passed unchanged because it was too large

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return what can go to the client; by the end, all of it."""

    @property
    def holds_back(self) -> bool:
        """Tell whether bytes were taken that have not been given back."""


def rewriter_for(content_type: str, *, model: str, most_bytes: int = MOST_HELD_BACK_BYTES) -> ModelRewriter | None:
    """Return what rewrites a body of this type to say `model`, or None for types that name no model."""
    media_type = content_type.partition(";")[0].strip().lower()
    name = msgspec.json.encode(model)
    if media_type == "text/event-stream":
        return EventStreamRewriter(name, most_bytes=most_bytes)
    if media_type == "application/json":
        return JsonRewriter(name, most_bytes=most_bytes)
    return None


class JsonRewriter:
    """A body that is one JSON document."""

    __slots__ = ("_held", "_most_bytes", "_name", "_search", "gave_up")

    def __init__(self, name: bytes, *, most_bytes: int) -> None:
        self.gave_up = False
        self._name = name
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._search = ModelFieldSearch()

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """See ModelRewriter."""
        if self._search.done or self.gave_up:
            return chunk
        held = self._held
        held += chunk
        found = self._search.find(held)
        if found is None and not (self._search.done or end_of_stream):
            if len(held) <= self._most_bytes:
                return b""
            self.gave_up = True
        if found is not None:
            held[found[0] : found[1]] = self._name
        self._held = bytearray()
        return bytes(held)

    @property
    def holds_back(self) -> bool:
        """See ModelRewriter."""
        return bool(self._held)


class EventStreamRewriter:
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), each `data:` line JSON."""

    __slots__ = ("_held", "_held_bytes", "_most_bytes", "_name", "gave_up")

    def __init__(self, name: bytes, *, most_bytes: int) -> None:
        self.gave_up = False
        self._name = name
        self._most_bytes = most_bytes
        self._held: list[bytes] = []  # of the line that has not ended
        self._held_bytes = 0

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """See ModelRewriter."""
        end = len(chunk) if end_of_stream else chunk.rfind(b"\n") + 1
        if not end and not end_of_stream:
            self._held.append(chunk)
            self._held_bytes += len(chunk)
            return self._pass_if_too_long()
        whole = b"".join((*self._held, chunk[:end]))
        self._held, self._held_bytes = [chunk[end:]] if end < len(chunk) else [], len(chunk) - end
        if b'"model"' not in whole:
            return whole
        return b"".join(map(self._line, whole.splitlines(keepends=True)))

    @property
    def holds_back(self) -> bool:
        """See ModelRewriter."""
        return bool(self._held)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith(b"data:") or (found := ModelFieldSearch().find(line)) is None:
            return line
        return line[: found[0]] + self._name + line[found[1] :]

    def _pass_if_too_long(self) -> bytes:
        if self._held_bytes <= self._most_bytes:
            return b""
        self.gave_up = True  # the rest of the line is taken for a line, which has no `data:`
        passed, self._held, self._held_bytes = b"".join(self._held), [], 0
        return passed
