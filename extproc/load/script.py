"""What clients will say and when: made by `workloads` and `trace`, played by `clients`, judged by `summary`.

Plain values that cross a process boundary as JSON. Times are seconds after the start of the run.
"""

from collections.abc import Mapping
from typing import Any

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a session; sent when it is due and the turn before has been answered."""

    due: float
    text: str  # the user's message, or the whole prompt of a completion
    answer_tokens: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A chat that grows with each turn, or (system None) completions that know nothing of each other."""

    name: str
    system: str | None
    turns: tuple[Turn, ...]
    body: Mapping[str, Any] | None = None  # of a recorded request: its other fields


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it."""

    session: str
    turn: int
    due: float
    ready: float  # when it could be sent: due, or later if the turn before was answered late
    sent: float
    first: float | None  # first piece of the answer
    ended: float
    error: str | None  # None: answered completely
    refused: str | None = None  # why a server that works refused it (429, 503); such a request has no `error`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    tells_cached: bool = False  # whether the answer's usage has cached tokens at all
    answer: str = ""
    gaps: tuple[float, ...] = ()  # seconds between two pieces of the answer
    server: str = ""  # the pod that answered, where the gateway or the client knows it

    @property
    def is_answered(self) -> bool:
        """Whether the whole answer came."""
        return self.error is None and self.refused is None

    @property
    def ttft_ms(self) -> float | None:
        """Time from the sending to the first piece of the answer; None where the request failed."""
        return None if not self.is_answered or self.first is None else (self.first - self.sent) * 1000

    @property
    def awaited_ms(self) -> float | None:
        """As `ttft_ms`, from the moment when it should have been sent: what this client was late counts, too."""
        return None if not self.is_answered or self.first is None else (self.first - self.ready) * 1000
