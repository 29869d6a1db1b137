"""One streamed answer of the OpenAI API, put together from the bytes that arrive. Pure; time is an argument."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

EVENT_END = b"\n\n"
DONE = b"[DONE]"
NO_DATA = (b":", b"event:", b"id:", b"retry:")  # a comment says that the connection lives
REASON_HEADER = "x-kvmesh-reason"
OK, TOO_MANY, UNAVAILABLE = 200, 429, 503
BROKE_OFF = "the answer broke off"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # as vLLM has named it since 0.12


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None

    @property
    def piece(self) -> str | None:
        """The text that this event adds."""
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
    error: _Problem | str | None = None  # vLLM ends a stream that fails with one


_EVENT = msgspec.json.Decoder(_Event)


class BadAnswerError(Exception):
    """The answer is not a whole stream of events; the message says what it is."""


@dataclass(slots=True)
class StreamedAnswer:
    """What has arrived so far; it can be read when the exchange fails or is cancelled, too."""

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)  # lowercase names
    server: str = ""  # who answered
    refusal: str = ""  # the start of a body that is no answer
    piece_times: list[float] = field(default_factory=list)  # when each piece of text came
    pieces: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False
    done: bool = False
    _held: bytes = b""

    @property
    def first_at(self) -> float | None:
        """When the first piece of text was there."""
        return self.piece_times[0] if self.piece_times else None

    @property
    def gaps(self) -> tuple[float, ...]:
        """Seconds between two pieces of text."""
        return tuple(b - a for a, b in zip(self.piece_times, self.piece_times[1:], strict=False))

    def feed(self, data: bytes, *, at: float) -> None:
        """Take bytes of the body, cut anywhere. Raise BadAnswerError for what is no event."""
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
    """Return why a server that works did not serve the request now; None where it did, or something is wrong.

    A 503 alone says no such thing: Envoy has it for a pod that is gone, too.
    """
    reason = answer.headers.get(REASON_HEADER)
    if answer.status == TOO_MANY:
        return reason or "status 429"
    if answer.status == UNAVAILABLE and (reason or "retry-after" in answer.headers):
        return reason or f"status 503{_words(answer.refusal)}"
    return None


def problem_of(answer: StreamedAnswer) -> str | None:
    """Return what is wrong with an exchange that has ended and is no refusal; None where the whole answer came."""
    if answer.status == OK:
        return None if answer.done else BROKE_OFF
    return f"status {answer.status}{_words(answer.refusal)}"


def _words(body: str) -> str:
    """The message of an error object, else the start of the body."""
    try:
        told = _EVENT.decode(body).error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        told = None
    message = told.message if isinstance(told, _Problem) else told or body
    return f": {' '.join(message.split())[:160]}" if message.strip() else ""
