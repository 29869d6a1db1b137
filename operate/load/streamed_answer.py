"""Parses a streamed answer of the OpenAI API from arriving bytes. Pure; time is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

EVENT_END = b"\n\n"
DONE = b"[DONE]"
NO_DATA = (b":", b"event:", b"id:", b"retry:")  # comments are keep-alives
REASON_HEADER = "x-kvmesh-reason"
OK, TOO_MANY, UNAVAILABLE = 200, 429, 503
BROKE_OFF = "the answer broke off"
EMPTY = "the answer was empty"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's name since 0.12


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def piece(self) -> str | None:
        if self.delta is None:
            return self.text
        return self.delta.content or self.delta.reasoning_content or self.delta.reasoning


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Problem(msgspec.Struct):
    message: str = ""


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Problem | str | None = None  # the last event of a failed vLLM stream


_EVENT = msgspec.json.Decoder(_Event)


class BadAnswerError(Exception):
    """The answer is not a complete event stream; the message says why."""


@dataclass(slots=True)
class StreamedAnswer:
    """The answer so far; readable also after a failure or cancellation."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # lowercase names
    server: str = ""  # the answering server
    refusal: str = ""  # start of an error body
    piece_times: list[float] = field(default_factory=list)  # arrival time of each piece
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False
    has_begun: bool = False  # any event but the end has come
    done: bool = False
    _held: bytes = b""

    @property
    def first_at(self) -> float | None:
        """Arrival time of the first piece of text."""
        return self.piece_times[0] if self.piece_times else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between consecutive pieces of text."""
        return tuple(b - a for a, b in zip(self.piece_times, self.piece_times[1:], strict=False))

    def feed(self, data: bytes, *, at: float) -> None:
        """Parse a chunk of the body, split anywhere. Raise BadAnswerError for an invalid or error event."""
        *events, self._held = (self._held + data).replace(b"\r\n", b"\n").split(EVENT_END)
        for event in events:
            self._take(event, at=at)

    def _take(self, event: bytes, *, at: float) -> None:
        lines = [line for line in event.split(b"\n") if line and not line.startswith(NO_DATA)]
        if not lines:
            return
        data = b"\n".join(line.removeprefix(b"data:").strip() for line in lines)
        if data == DONE:
            self.done = True
            return
        try:
            told = _EVENT.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise BadAnswerError(f"not an event: {event[:200].decode(errors='replace')}") from None
        self.has_begun = True
        if told.error is not None:
            raise BadAnswerError(told.error if isinstance(told.error, str) else told.error.message)
        for choice in told.choices:
            if choice.piece:
                self.pieces.append(choice.piece)
                self.piece_times.append(at)
        if told.usage is not None:
            self.prompt_tokens = told.usage.prompt_tokens
            details = told.usage.prompt_tokens_details
            self.tells_cached = details is not None and details.cached_tokens is not None
            self.cached_tokens = (details.cached_tokens or 0) if details else 0


def refusal_of(answer: StreamedAnswer) -> str | None:
    """Return the reason of a deliberate refusal (429, 503), or None for an answer or a failure.

    A bare 503 is a failure: Envoy also sends it for a pod that is gone.
    """
    reason = answer.headers.get(REASON_HEADER)
    if answer.status == TOO_MANY:
        return reason or "status 429"
    if answer.status == UNAVAILABLE and (reason or "retry-after" in answer.headers):
        return reason or f"status 503{_words(answer.refusal)}"
    return None


def problem_of(answer: StreamedAnswer) -> str | None:
    """Return the failure of an ended exchange that was not refused, or None if the answer is complete."""
    if answer.status == OK:
        return BROKE_OFF if not answer.done else None if answer.has_begun else EMPTY
    return f"status {answer.status}{_words(answer.refusal)}"


def _words(body: str) -> str:
    try:
        told = _EVENT.decode(body).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        told = None
    message = told.message if isinstance(told, _Problem) else told or body
    return f": {' '.join(message.split())[:160]}" if message.strip() else ""
