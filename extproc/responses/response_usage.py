"""Reads a response's usage object and rewrites its model name, as its bytes pass: plain and streamed; no I/O.

Only the few lines of a stream that have a usage object are decoded, and only at its end. Where a quota needs it, the
tokens of the events are counted, for streams that end without one. Where a stream is judged, its events are decoded up
to the first that brings a token, and those after it are counted. What is too long to be kept is searched for a usage
object.
"""

import json
import re
from collections.abc import Iterable

import msgspec

from extproc.requests.json_edit import ModelFieldSearch
from extproc.requests.request_fields import LARGEST_COUNT
from extproc.responses.realised import Usage

# as much of one response is kept at most
MOST_KEPT_BYTES = 1 << 20

# of what is longer, only so much is searched together; a usage object has some hundred bytes
USAGE_BYTES = 4096
TRIED_AT_ONCE = 4  # from the end: what a hostile text has in plenty costs little

SHORTEST_EVENT = len('data:{"type":".delta"}')  # that may bring a token; shorter lines cost nothing
# of another answer than the first one: an event of a request with several
OTHER_CHOICE = b'"choices":[{"index":1'
_STREAMED_USAGE = re.compile(rb'"usage"\s*:\s*\{')


Number = float | None  # not int: a pod may write a thousand digits, which are read at once as a float


class _TokenDetails(msgspec.Struct):
    cached_tokens: Number = None


class _Usage(msgspec.Struct):
    """All spellings at once."""

    prompt_tokens: Number = None  # chat, completions, embeddings
    completion_tokens: Number = None
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens: Number = None  # Responses API; Anthropic's, where what was cached is not in it
    output_tokens: Number = None
    input_tokens_details: _TokenDetails | None = None
    cache_read_input_tokens: Number = None
    cache_creation_input_tokens: Number = None


class _Envelope(msgspec.Struct):
    usage: _Usage | None = None


class _Choices(msgspec.Struct):
    """The answers of one body."""

    choices: list[msgspec.Raw] = []


class _Answer(msgspec.Struct):
    """A body, or the data of one event."""

    usage: _Usage | None = None
    response: _Envelope | None = None  # Responses API: response.completed
    message: _Envelope | str | None = None  # Anthropic: message_start; elsewhere the text of an error


class _Delta(msgspec.Struct):
    """What chat's chunks bring; vLLM has called reasoning by both names."""

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
    """The data of one event: what shows whether it brought tokens."""

    type: str = ""  # Responses API, Anthropic
    choices: list[_Choice] = []  # chat, completions


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_choices = msgspec.json.Decoder(_Choices).decode
_decode_event = msgspec.json.Decoder(_Event).decode
_decode_beginning = json.JSONDecoder().raw_decode


def usage_reader_for(
    content_type: str,
    *,
    most_bytes: int = MOST_KEPT_BYTES,
    count_events: bool = False,
    find_tokens: bool = False,
) -> "UsageReader | None":
    """Return what reads a body of this type, or None for types without usage.

    `count_events`: also count what a stream's events bring, at some microseconds each. `find_tokens`: also tell when
    the first token comes, and how many events bring some.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type == "text/event-stream":
        return EventStreamUsage(most_bytes=most_bytes, count_events=count_events, find_tokens=find_tokens)
    if media_type == "application/json":
        return JsonUsage(most_bytes=most_bytes)
    return None


class JsonUsage:
    """The usage of a body that is one JSON document."""

    __slots__ = ("_kept", "_long", "_most_bytes", "_size", "gave_up", "generated_tokens", "token_events")

    def __init__(self, *, most_bytes: int) -> None:
        self.gave_up = False  # the body was too long to be kept: `usage` has at most the output tokens
        self.generated_tokens = 0  # not counted
        self.token_events = 0  # there are none
        self._most_bytes = most_bytes
        self._kept: list[bytes] = []
        self._size = 0
        self._long = _LongText()

    def feed(self, chunk: bytes) -> None:
        """Take a part of the body."""
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
        """Return what the whole body says, or None where it does not."""
        return self._long.usage() if self.gave_up else _usage_of(b"".join(self._kept))

    @property
    def has_one_answer(self) -> bool:
        """Whether its tokens came one after the other: it has no second answer beside the first."""
        try:
            return not self.gave_up and len(_decode_choices(b"".join(self._kept)).choices) <= 1
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False


class EventStreamUsage:
    """The usage of a stream: in its last event, or spread over the first and the last that have one (Anthropic)."""

    __slots__ = (
        *("_counts_events", "_finds_tokens", "_first", "_held", "_last", "_long", "_most_bytes", "_skips"),
        *("gave_up", "generated_tokens", "has_one_answer", "token_events"),
    )

    def __init__(self, *, most_bytes: int, count_events: bool = False, find_tokens: bool = False) -> None:
        self.gave_up = False  # a line was too long to be kept: at most its output tokens are in `usage`
        self.generated_tokens = 0  # that events have brought, at least; 0 unless they are counted
        # from the first on that brings a token, without the one that ends the stream; tokens, where they are counted
        self.token_events = 0
        self.has_one_answer = True  # no second one beside the first
        self._counts_events = count_events
        self._finds_tokens = find_tokens
        self._most_bytes = most_bytes
        self._held = bytearray()  # the line that has not ended
        self._skips = False  # it is too long to be held
        self._long = _LongText()
        self._first = b""
        self._last = b""

    def feed(self, chunk: bytes) -> None:
        """Take a part of the body."""
        if self._skips:
            line, ended, chunk = chunk.partition(b"\n")
            self._long.feed(line)
            if not ended:
                return
            self._skips = False
        end = chunk.rfind(b"\n") + 1
        if not end:
            self._held += chunk
            if len(self._held) > self._most_bytes:
                self.gave_up = self._skips = True
                self._long.feed(bytes(self._held))
                self._held = bytearray()
            return
        whole = bytes(self._held) + chunk[:end] if self._held else chunk[:end]
        self._held = bytearray(chunk[end:])
        self._note(whole)

    def usage(self) -> Usage | None:
        """Return what the whole body says, or None where it does not."""
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
        if self._counts_events:
            events = [line for line in lines.splitlines() if len(line) >= SHORTEST_EVENT]
            self.generated_tokens += sum(map(_tokens_of, events))
            self.token_events = self.generated_tokens
        elif self._finds_tokens:
            self._find_tokens(lines)
        if self._finds_tokens and OTHER_CHOICE in lines:
            self.has_one_answer = False
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
    """What is too long to be kept: of all usage objects in it, at any depth, the most output tokens.

    A client may have put some there (a tool's schema comes back in Responses); it can only make its own answer longer.
    """

    __slots__ = ("_output_tokens", "_tail")

    def __init__(self) -> None:
        self._output_tokens: int | None = None
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        """Search this part, and what came right before it."""
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
        """Return what was found."""
        return None if self._output_tokens is None else Usage(output_tokens=self._output_tokens)


def _output_tokens(beginning: bytes) -> int | None:
    """Return what the usage object says that these bytes begin with."""
    try:
        usage = msgspec.convert(_decode_beginning(beginning.decode("utf-8", "replace"))[0], _Usage)
    except (ValueError, RecursionError, OverflowError):  # not wholly there yet, or another thing of that name
        return None
    return _tokens(usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens)


def _tokens(number: Number) -> int | None:
    """Return a count of tokens, None for what is none."""
    return int(number) if number is not None and 0 <= number <= LARGEST_COUNT else None


def _tokens_of(line: bytes) -> int:
    """Return how many tokens a line brings, at least; 0: it is no event, or one that opens, ends or repeats."""
    if not line.startswith(b"data:") or line.endswith(b"[DONE]"):
        return 0
    try:
        event = _decode_event(line[len(b"data:") :])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    if event.type:
        return int(event.type.endswith(".delta") or event.type == "content_block_delta")
    return sum([_tokens_in(choice) for choice in event.choices])


def _tokens_in(choice: _Choice) -> int:
    if choice.token_ids:
        return len(choice.token_ids)
    delta = choice.delta
    return int(bool(choice.text) or (delta is not None and any(msgspec.structs.astuple(delta))))


def _ends(lines: bytes) -> bool:
    """Tell whether the last of these lines of a stream is the one that ends it."""
    return b"[DONE]" in lines and lines.rstrip().endswith(b"[DONE]")


def _largest(numbers: Iterable[int | None]) -> int | None:
    return max((number for number in numbers if number is not None), default=None)


def _usage_of(document: bytes) -> Usage | None:
    try:
        answer = _decode_answer(document)
    except (msgspec.DecodeError, UnicodeDecodeError):  # another shape of answer: nothing that we can compare
        return None
    envelope = answer.response or answer.message
    found = answer.usage or (envelope.usage if isinstance(envelope, _Envelope) else None)
    if found is None:
        return None
    if answer.usage is None and answer.response is None:
        found.output_tokens = None  # message_start: of an answer that has not begun
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


# as much of a response is held back at most; what is longer passes unchanged
MOST_HELD_BACK_BYTES = 4 << 20


def rewriter_for(content_type: str, *, model: str, most_bytes: int = MOST_HELD_BACK_BYTES) -> "ModelRewriter | None":
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
        self.gave_up = False  # the body passed unchanged because it was too large
        self._name = name
        self._most_bytes = most_bytes
        self._held = bytearray()
        self._search = ModelFieldSearch()

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return what can go to the client; by the end, all of it."""
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
        """Whether bytes were taken that have not been given back."""
        return bool(self._held)


class EventStreamRewriter:
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html), each `data:` line JSON."""

    __slots__ = ("_held", "_held_bytes", "_most_bytes", "_name", "gave_up")

    def __init__(self, name: bytes, *, most_bytes: int) -> None:
        self.gave_up = False  # a line passed unchanged because it was too large
        self._name = name
        self._most_bytes = most_bytes
        self._held: list[bytes] = []  # of the line that has not ended
        self._held_bytes = 0

    def feed(self, chunk: bytes, *, end_of_stream: bool) -> bytes:
        """Take a part of the body and return what can go to the client; by the end, all of it."""
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
        """Whether bytes were taken that have not been given back."""
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


ModelRewriter = JsonRewriter | EventStreamRewriter
