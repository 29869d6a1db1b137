"""The script of a load: made by `workloads` and `trace`, played by `clients`, summarized by `summary`.

Plain values that can cross a process boundary as JSON. Times are seconds from the start of the run.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A request of a session, sent when it is due and the turn before has been answered."""

    due: float
    text: str  # the user's message, or the whole prompt of a completion
    answer_tokens: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A chat that grows with each turn or, if `system` is None, independent completions."""

    name: str
    system: str | None
    turns: tuple[Turn, ...]
    body: Mapping[str, Any] | None = None  # the other fields of a recorded request


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A request's result as seen by its client."""

    session: str
    turn: int
    due: float
    ready: float  # earliest send time: due, or the end of the turn before if later
    sent: float
    first: float | None  # first piece of text
    ended: float
    error: str | None  # None unless it failed
    refused: str | None = None  # reason of a deliberate refusal (429, 503); then `error` is None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False  # whether `usage` includes cached tokens
    answer: str = ""
    gaps: tuple[float, ...] = ()  # seconds between consecutive pieces of text
    server: str = ""  # the pod, if known to gateway or client

    @property
    def is_answered(self) -> bool:
        """Whether the answer was complete."""
        return self.error is None and self.refused is None

    @property
    def ttft_ms(self) -> float | None:
        """Time from sending to the first piece of text, or None if the request failed."""
        return None if not self.is_answered or self.first is None else (self.first - self.sent) * 1000

    @property
    def awaited_ms(self) -> float | None:
        """Like `ttft_ms`, but from the scheduled send time, so that the client's own lateness counts."""
        return None if not self.is_answered or self.first is None else (self.first - self.ready) * 1000
