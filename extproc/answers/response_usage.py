"""Read a response's usage object and rewrite its model name while its bytes pass, plain or streamed. No I/O.

Only the few lines of a stream with a usage object are decoded, and only at its end. For a quota, the tokens of the
events are counted, as a stream may end without usage. For an SLO, events are decoded up to the first token and only
counted after it. A text too long to be kept is searched for a usage object.
"""

import json
import re
from collections.abc import Iterable
from itertools import groupby

import msgspec

from extproc.answers.realised import Usage
from extproc.requests.json_edit import ModelFieldSearch
from extproc.requests.request_fields import LARGEST_COUNT

# most bytes kept of one response
MOST_KEPT_BYTES = 1 << 20

# overlap of the searched parts of a longer response; a usage object has some hundred bytes
USAGE_BYTES = 4096
TRIED_AT_ONCE = 4  # matches tried per part, from the end: bounds the cost of a hostile text

SHORTEST_EVENT = len('data:{"type":".delta"}')  # with a token; shorter lines are not decoded
# in an event of a second choice: the request asked for several
OTHER_CHOICE = b'"choices":[{"index":1'
_STREAMED_USAGE = re.compile(rb'"usage"\s*:\s*\{')
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # a stream may begin with it
_DATA = b"data:"
_CONTINUED = re.compile(rb"^data:[^\r\n]*(?:\n|\r\n?)data:", re.MULTILINE)  # an event with several data lines
_BLANK_LINES = (b"\n\n", b"\n\r\n", b"\r\r")
_LONGEST_BLANK_LINE = 3


Number = float | None  # not int: parsing a thousand digits as int is slow, as float it is fast


class _TokenDetails(msgspec.Struct):
    cached_tokens: Number = None


class _Usage(msgspec.Struct):
    prompt_tokens: Number = None  # chat, completions, embeddings
    completion_tokens: Number = None
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens: Number = None  # Responses API; Anthropic, where it excludes cached tokens
    output_tokens: Number = None
    input_tokens_details: _TokenDetails | None = None
    cache_read_input_tokens: Number = None
    cache_creation_input_tokens: Number = None


class _Envelope(msgspec.Struct):
    usage: _Usage | None = None


class _Choices(msgspec.Struct):
    choices: list[msgspec.Raw] = []


class _Answer(msgspec.Struct):
    usage: _Usage | None = None
    response: _Envelope | None = None  # Responses API: response.completed
    message: _Envelope | str | None = None  # Anthropic: message_start; elsewhere an error's text


class _Delta(msgspec.Struct):
    """The delta of a chat chunk; vLLM has used both names of reasoning."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None  # completions
    token_ids: list[msgspec.Raw] | None = None  # vLLM's /inference/v1/generate; elsewhere with return_token_ids


class _Event(msgspec.Struct):
    type: str = ""  # Responses API, Anthropic
    choices: list[_Choice] = []  # chat, completions


class _Error(msgspec.Struct):
    """An error; its code is the HTTP status that it would have had before the headers."""

    code: msgspec.Raw = msgspec.Raw(b"")


class _ErrorEvent(msgspec.Struct):
    """The data of an error event, which replaces the rest of the answer."""

    type: str = ""  # Responses API, Anthropic
    error: _Error | str | None = None  # vLLM, SGLang, Anthropic


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_error = msgspec.json.Decoder(_ErrorEvent).decode
_decode_beginning = json.JSONDecoder().raw_decode


def usage_reader_for(
    content_type: str,
    *,
    most_bytes: int = MOST_KEPT_BYTES,
    count_events: bool = False,
    find_tokens: bool = False,
) -> "UsageReader | None":
    """Return a usage reader for this content type, or None for types without usage.

    `count_events`: also count the tokens of a stream's events, at some microseconds each. `find_tokens`: also find the
    first token, and count the events from there on.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return EventStreamUsage(most_bytes=most_bytes, count_events=count_events, find_tokens=find_tokens)
    if media_type == "application/json":
        return JsonUsage(most_bytes=most_bytes)
    return None


class JsonUsage:
    """The usage of a single JSON document."""

    __slots__ = ("_kept", "_long", "_most_bytes", "_size", "gave_up", "generated_tokens", "token_events")
    has_failed = has_refused = False  # both have an HTTP status
    is_empty = False

    def __init__(self, *, most_bytes: int) -> None:
        self.gave_up = False  # the body was too long to be kept: `usage` has at most the output tokens
        self.generated_tokens = 0  # counted only in streams
        self.token_events = 0  # only in streams
        self._most_bytes = most_bytes
        self._kept: list[bytes] = []
        self._size = 0
        self._long = _LongText()

    def feed(self, chunk: bytes) -> None:
        """Take a chunk of the body."""
        self._size += len(chunk)
        if self._size <= self._most_bytes:
            self._kept.append(chunk)
            return
        self.gave_up = True
        for kept in self._kept:
            self._long.feed(kept)
        self._kept.clear()
        self._long.feed(chunk)

    def usage(self) -> Usage | None:
        """Return the usage after the whole body was fed, or None without one."""
        return self._long.usage() if self.gave_up else _usage_of(b"".join(self._kept))

    @property
    def has_one_answer(self) -> bool:
        """Whether the body has at most one choice: then its tokens were generated one after the other."""
        try:
            return not self.gave_up and len(_decode_choices(b"".join(self._kept)).choices) <= 1
        except UNREADABLE:
            return False


class EventStreamUsage:
    """The usage of a stream: in its last event, or (Anthropic) split over the first and the last event with usage."""

    __slots__ = (
        *("_counts_events", "_finds_tokens", "_first", "_held", "_last", "_long", "_most_bytes", "_skips"),
        *("gave_up", "generated_tokens", "has_failed", "has_one_answer", "has_refused", "is_empty", "token_events"),
    )

    def __init__(self, *, most_bytes: int, count_events: bool = False, find_tokens: bool = False) -> None:
        self.gave_up = False  # a line was too long to be kept: of it, `usage` has at most the output tokens
        self.generated_tokens = 0  # lower bound by events; 0 unless they are counted
        # events from the first token on, without the one that ends the stream; tokens if those are counted
        self.token_events = 0
        self.has_one_answer = True  # no event of a second choice was seen
        self.has_failed = False  # an event reported a server error
        self.has_refused = False  # an event reported an error of the client's
        self.is_empty = True  # nothing but the stream's end has come
        self._counts_events = count_events
        self._finds_tokens = find_tokens
        self._most_bytes = most_bytes
        self._held = bytearray()  # the incomplete last event
        self._skips = False  # it is too long to be kept
        self._long = _LongText()
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """Take a chunk of the body."""
        if self._skips:
            line, ended, chunk = chunk.partition(b"\n")
            self._long.feed(line)
            if not ended:
                return
            self._skips = False
        if not self._held and chunk.endswith(b"\n\n"):  # nearly always
            self._note(chunk)
            return
        held, searched = self._held, max(len(self._held) - _LONGEST_BLANK_LINE, 0)
        held += chunk
        end = end_of_events(held, searched)
        if end:
            self._note(bytes(held[:end]))
            del held[:end]
        elif len(held) > self._most_bytes:
            self.gave_up = self._skips = True
            self._long.feed(bytes(held))
            self._held = bytearray()

    def usage(self) -> Usage | None:
        """Return the usage after the whole body was fed, or None without one."""
        self._note(bytes(self._held))
        self._held.clear()
        found = [usage for usage in (_usage_of(self._first), _usage_of(self._last), self._long.usage()) if usage]
        if len(found) <= 1:
            return found[0] if found else None
        return Usage(
            prompt_tokens=_largest(usage.prompt_tokens for usage in found),
            cached_tokens=_largest(usage.cached_tokens for usage in found),
            output_tokens=_largest(usage.output_tokens for usage in found),
        )

    def _note(self, lines: bytes) -> None:
        if self.is_empty:
            lines = lines.removeprefix(BYTE_ORDER_MARK)
        lines = _with_single_lines(lines)
        if self._counts_events:
            events = [line for line in lines.splitlines() if len(line) >= SHORTEST_EVENT]
            self.generated_tokens += sum(map(_tokens_of, events))
            self.token_events = self.generated_tokens
        elif self._finds_tokens:
            self._find_tokens(lines)
        if self._finds_tokens and OTHER_CHOICE in lines:
            self.has_one_answer = False
        if b'error"' in lines or b'response.failed"' in lines:
            errors = [found for found in map(_error_in, lines.splitlines()) if found is not None]
            self.has_failed = self.has_failed or True in errors
            self.has_refused = self.has_refused or False in errors
        if self.is_empty:
            self.is_empty = not any(line.startswith(b"data:") and not _ends(line) for line in lines.splitlines())
        if _STREAMED_USAGE.search(lines) is None:
            return
        for line in lines.splitlines():
            if line.startswith(b"data:") and _STREAMED_USAGE.search(line) is not None:
                data = line[len(b"data:") :]
                self._first = self._first or data
                self._last = data

    def _find_tokens(self, lines: bytes) -> None:
        if self.token_events:
            self.token_events += lines.startswith(b"data:") + lines.count(b"\ndata:") - _ends(lines)
            return
        events = [line for line in lines.splitlines() if line.startswith(b"data:")]
        for at, event in enumerate(events):
            if len(event) >= SHORTEST_EVENT and _tokens_of(event):
                self.token_events = len(events) - at - _ends(lines)
                return


UsageReader = JsonUsage | EventStreamUsage


class _LongText:
    """A text too long to be kept: the largest output tokens of all usage objects in it, at any depth.

    A client can plant usage objects (Responses echoes a tool's schema), but that only makes its own answer count more.
    """

    __slots__ = ("_output_tokens", "_tail")

    def __init__(self) -> None:
        self._output_tokens: int | None = None
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        window = self._tail + chunk
        self._tail = window[-USAGE_BYTES:]
        at = len(window)
        for _ in range(TRIED_AT_ONCE):
            at = window.rfind(b'"usage"', 0, at)
            if at < 0:
                return
            if (found := _STREAMED_USAGE.match(window, at)) is not None:
                tokens = _output_tokens(window[found.end() - 1 : found.end() + USAGE_BYTES])
                self._output_tokens = _largest((self._output_tokens, tokens))

    def usage(self) -> Usage | None:
        return None if self._output_tokens is None else Usage(output_tokens=self._output_tokens)


def end_of_events(text: bytes | bytearray, start: int = 0) -> int:
    """Return the offset behind the last blank line that begins after `start`; 0 without one."""
    found = [(text.rfind(mark, start), mark) for mark in _BLANK_LINES]
    return max([at + len(mark) for at, mark in found if at >= 0], default=0)


def _with_single_lines(events: bytes) -> bytes:
    """Join each event's data lines; JSON has no newlines within its strings, so that a space may replace them."""
    if events.count(_DATA) < 2 or _CONTINUED.search(events) is None:
        return events
    joined: list[bytes] = []
    for is_data, found in groupby(events.splitlines(), lambda line: line.startswith(_DATA)):
        lines = list(found)
        joined += [_DATA + b" ".join([line[len(_DATA) :] for line in lines])] if is_data else lines
    return b"\n".join(joined)


def _output_tokens(beginning: bytes) -> int | None:
    try:
        usage = msgspec.convert(_decode_beginning(beginning.decode("utf-8", "replace"))[0], _Usage)
    except (ValueError, RecursionError, OverflowError):  # incomplete, or not a usage object
        return None
    return _tokens(usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens)


def _tokens(number: Number) -> int | None:
    return int(number) if number is not None and 0 <= number <= LARGEST_COUNT else None


def _tokens_of(line: bytes) -> int:
    """Return a lower bound of a line's tokens; 0 if it is no event, or an event that opens, ends or repeats."""
    if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
        return 0
    try:
        event = _decode_event(line[len(b"data:") :])
    except UNREADABLE:
        return 0
    if event.type:
        return int(event.type.endswith(".delta") or event.type == "content_block_delta")
    return sum([_tokens_in(choice) for choice in event.choices])


def _tokens_in(choice: _Choice) -> int:
    if choice.token_ids:
        return len(choice.token_ids)
    delta = choice.delta
    return int(bool(choice.text) or (delta is not None and any(msgspec.structs.astuple(delta))))


def _error_in(line: bytes) -> bool | None:
    """Tell whether an event reports an error of the server (True) or the client (a code of 4xx), or None (None)."""
    if not line.startswith(b"data:"):
        return None
    try:
        event = _decode_error(line[len(b"data:") :])
    except UNREADABLE:
        return None
    if event.error is None:
        return True if event.type in ("error", "response.failed") else None
    return isinstance(event.error, str) or bytes(event.error.code)[:1] != b"4"


def _ends(lines: bytes) -> bool:
    return b"[DONE]" in lines and lines.rstrip().endswith(b"[DONE]")


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _usage_of(document: bytes) -> Usage | None:
    try:
        answer = _decode_answer(document)
    except RecursionError:  # nested a thousand times
        text = _LongText()
        text.feed(document)
        return text.usage()
    except UNREADABLE:  # an unknown kind of answer: nothing to compare
        return None
    envelope = answer.response or answer.message
    found = answer.usage or (envelope.usage if isinstance(envelope, _Envelope) else None)
    if found is None:
        return None
    if answer.usage is None and answer.response is None:
        found.output_tokens = None  # message_start: the answer has not begun
    if found.prompt_tokens is not None or found.input_tokens_details is not None:
        details = found.prompt_tokens_details or found.input_tokens_details
        prompt_tokens = found.input_tokens if found.prompt_tokens is None else found.prompt_tokens
        return Usage(
            prompt_tokens=_tokens(prompt_tokens),
            cached_tokens=_tokens(details.cached_tokens if details is not None else None),
            output_tokens=_tokens(
                found.completion_tokens if found.completion_tokens is not None else found.output_tokens
            ),
        )
    if found.input_tokens is None and found.output_tokens is None:
        return None
    # Anthropic: input_tokens + cache_read + cache_creation is the prompt
    parts = (found.input_tokens, found.cache_read_input_tokens, found.cache_creation_input_tokens)
    return Usage(
        prompt_tokens=None if found.input_tokens is None else _tokens(sum(part or 0 for part in parts)),
        cached_tokens=_tokens(found.cache_read_input_tokens),
        output_tokens=_tokens(found.output_tokens),
    )


# most bytes of a response held back; a longer one passes unchanged
MOST_HELD_BACK_BYTES = 4 << 20


def rewriter_for(content_type: str, *, model: str, most_bytes: int = MOST_HELD_BACK_BYTES) -> "ModelRewriter | None":
    """Return a rewriter that sets `model` in a body of this type, or None for types without a model name."""
    media_type = content_type.partition(";")[0].strip().lower()
    name = msgspec.json.encode(model)
    if media_type == "text/event-stream":
        return EventStreamRewriter(name, most_bytes=most_bytes)
    if media_type == "application/json":
        return JsonRewriter(name, most_bytes=most_bytes)
    return None


class JsonRewriter:
    """Rewrites a single JSON document."""

    __slots__ = ("_held", "_most_bytes", "_name", "_search", "gave_up")

    def __init__(self, name: bytes, *, most_bytes: int) -> None:
        self.gave_up = False  # the body passed unchanged because it was too large
        self._name = name
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._search = ModelFieldSearch()

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """Take a chunk of the body and return the bytes that may go to the client; at the end, all of them."""
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
        """Whether some bytes are still held back."""
        return bool(self._held)


class EventStreamRewriter:
    """Rewrites the JSON of each event (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    __slots__ = ("_event", "_held", "_held_bytes", "_most_bytes", "_name", "_passes", "_search", "gave_up")

    def __init__(self, name: bytes, *, most_bytes: int) -> None:
        self.gave_up = False  # a line passed unchanged because it was too large
        self._name = name
        self._most_bytes = most_bytes
        self._held: list[bytes] = []  # chunks of the incomplete last line
        self._held_bytes = 0
        self._passes = False  # the rest of such a line is still to come
        self._event = bytearray()  # the data lines of an event that has not ended
        self._search = ModelFieldSearch()  # in it

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """Take a chunk of the body and return the bytes that may go to the client; at the end, all of them."""
        if self._passes:
            rest = chunk.find(b"\n") + 1
            if not rest:
                return chunk
            self._passes = False
            return chunk[:rest] + self.feed(chunk[rest:], end_of_stream=end_of_stream)
        end = len(chunk) if end_of_stream else chunk.rfind(b"\n") + 1
        if not end and not end_of_stream:
            self._held.append(chunk)
            self._held_bytes += len(chunk)
            return self._pass_if_too_long()
        whole = b"".join((*self._held, chunk[:end]))
        self._held, self._held_bytes = [chunk[end:]] if end < len(chunk) else [], len(chunk) - end
        if b'"model"' not in whole and not self._event and whole.endswith(_BLANK_LINES):
            return whole
        return b"".join(map(self._line, whole.splitlines(keepends=True)))

    @property
    def holds_back(self) -> bool:
        """Whether some bytes are still held back."""
        return bool(self._held)

    def _line(self, line: bytes) -> bytes:
        if not line.startswith((_DATA, BYTE_ORDER_MARK + _DATA)):
            if not line.strip():  # the event's end
                self._event, self._search = bytearray(), ModelFieldSearch()
            return line
        if self._search.done:
            return line
        before = len(self._event)
        self._event += line.replace(_DATA, b" " * len(_DATA), 1)
        found = self._search.find(self._event)
        if found is None:
            if before > self._most_bytes:
                self.gave_up = self._search.done = True
            return line
        return line[: found[0] - before] + self._name + line[found[1] - before :]

    def _pass_if_too_long(self) -> bytes:
        if self._held_bytes <= self._most_bytes:
            return b""
        self.gave_up = self._passes = True
        passed, self._held, self._held_bytes = b"".join(self._held), [], 0
        return passed


ModelRewriter = JsonRewriter | EventStreamRewriter
