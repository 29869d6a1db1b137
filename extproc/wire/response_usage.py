"""Reads the usage object of a response, as its bytes pass: OpenAI's APIs, Anthropic's, plain and streamed; no I/O.

Used by `booked_exchange` for the responses that are compared with their prediction. Only the few lines of a stream that
have a usage object are decoded, and only at its end.
"""

import re
from typing import Protocol

import msgspec

from extproc.core.realised import Usage

# as much of one response is kept at most
MOST_KEPT_BYTES = 1 << 20

_STREAMED_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    """All spellings at once."""

    prompt_tokens: int | None = None  # chat, completions, embeddings
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens: int | None = None  # Responses API; Anthropic's, where what was cached is not in it
    output_tokens: int | None = None
    input_tokens_details: _TokenDetails | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Envelope(msgspec.Struct):
    usage: _Usage | None = None


class _Answer(msgspec.Struct):
    """A body, or the data of one event."""

    usage: _Usage | None = None
    response: _Envelope | None = None  # Responses API: response.completed
    message: _Envelope | str | None = None  # Anthropic: message_start; elsewhere the text of an error


_decode_answer = msgspec.json.Decoder(_Answer).decode


class UsageReader(Protocol):
    """One response's usage."""

    gave_up: bool  # the response was too long to be kept

    def feed(self, chunk: bytes) -> None:
        """Take a part of the body."""

    def usage(self) -> Usage | None:
        """Return what the whole body says, or None where it does not."""


def usage_reader_for(content_type: str, *, most_bytes: int = MOST_KEPT_BYTES) -> UsageReader | None:
    """Return what reads a body of this type, or None for types without usage."""
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return EventStreamUsage(most_bytes=most_bytes)
    if media_type == "application/json":
        return JsonUsage(most_bytes=most_bytes)
    return None


class JsonUsage:
    """The usage of a body that is one JSON document."""

    __slots__ = ("_kept", "_most_bytes", "_size", "gave_up")

    def __init__(self, *, most_bytes: int) -> None:
        self.gave_up = False
        self._most_bytes = most_bytes
        self._kept: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> None:
        """See UsageReader."""
        self._size += len(chunk)
        if self._size > self._most_bytes:
            self.gave_up = True
            self._kept.clear()
        else:
            self._kept.append(chunk)

    def usage(self) -> Usage | None:
        """See UsageReader."""
        return None if self.gave_up else _usage_of(b"".join(self._kept))


class EventStreamUsage:
    """The usage of a stream: in its last event, or spread over the first and the last that have one (Anthropic)."""

    __slots__ = ("_first", "_held", "_last", "_most_bytes", "gave_up")

    def __init__(self, *, most_bytes: int) -> None:
        self.gave_up = False
        self._most_bytes = most_bytes
        self._held = bytearray()  # the line that has not ended
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """See UsageReader."""
        if self.gave_up:
            return
        end = chunk.rfind(b"\n") + 1
        if not end:
            self._held += chunk
            if len(self._held) > self._most_bytes:
                self.gave_up, self._held = True, bytearray()
            return
        whole = bytes(self._held) + chunk[:end] if self._held else chunk[:end]
        self._held = bytearray(chunk[end:])
        self._note(whole)

    def usage(self) -> Usage | None:
        """See UsageReader."""
        if self.gave_up:
            return None
        self._note(bytes(self._held))
        first, last = _usage_of(self._first), _usage_of(self._last)
        if first is None or last is None:
            return first or last
        return Usage(
            prompt_tokens=_larger(first.prompt_tokens, last.prompt_tokens),
            cached_tokens=_larger(first.cached_tokens, last.cached_tokens),
            output_tokens=_larger(first.output_tokens, last.output_tokens),
        )

    def _note(self, lines: bytes) -> None:
        if _STREAMED_USAGE.search(lines) is None:
            return
        for line in lines.splitlines():
            if line.startswith(b"data:") and _STREAMED_USAGE.search(line) is not None:
                data = line[len(b"data:") :]
                self._first = self._first or data
                self._last = data


def _larger(one: int | None, other: int | None) -> int | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _usage_of(document: bytes) -> Usage | None:
    try:
        answer = _decode_answer(document)
    except (msgspec.DecodeError, UnicodeDecodeError):  # another shape of answer: nothing that we can compare
        return None
    envelope = answer.response or answer.message
    found = answer.usage or (envelope.usage if isinstance(envelope, _Envelope) else None)
    if found is None:
        return None
    if found.prompt_tokens is not None or found.input_tokens_details is not None:
        details = found.prompt_tokens_details or found.input_tokens_details
        prompt_tokens = found.input_tokens if found.prompt_tokens is None else found.prompt_tokens
        return Usage(
            prompt_tokens=prompt_tokens,
            cached_tokens=details.cached_tokens if details is not None else None,
            output_tokens=found.completion_tokens if found.completion_tokens is not None else found.output_tokens,
        )
    if found.input_tokens is None and found.output_tokens is None:
        return None
    # Anthropic: input_tokens + cache_read + cache_creation is the prompt
    parts = (found.input_tokens, found.cache_read_input_tokens, found.cache_creation_input_tokens)
    return Usage(
        prompt_tokens=None if found.input_tokens is None else sum(part or 0 for part in parts),
        cached_tokens=found.cache_read_input_tokens,
        output_tokens=found.output_tokens,
    )
