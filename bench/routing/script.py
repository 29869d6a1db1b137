"""What clients will say and when: made by `workloads`, played by `load`, judged by `summary`.

Plain values that cross a process boundary as JSON.
"""

import msgspec


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a session; sent when it is due and the turn before has been answered."""

    due: float  # seconds after the start of the run
    text: str  # the user's message, or the whole prompt of a completion
    answer_tokens: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A chat that grows with each turn, or (system None) completions that know nothing of each other."""

    name: str
    system: str | None
    turns: tuple[Turn, ...]


class PodRestart(msgspec.Struct, frozen=True, kw_only=True):
    """A pod is killed and comes back empty."""

    pod: int
    at: float  # seconds after the start of the run
    back_after: float  # seconds


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """All that happens in one run; requests due before `measured_from` only warm the caches up."""

    name: str
    title: str
    sessions: tuple[Session, ...]
    measured_from: float  # seconds
    routers: int = 1  # replicas of the router
    restarts: tuple[PodRestart, ...] = ()


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator is told."""

    gateways: tuple[tuple[str, int], ...]  # taken in turn
    model: str
    sessions: tuple[Session, ...]
    request_seconds: float


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One request as its client saw it; times in seconds after the start of the run."""

    session: str
    turn: int
    due: float
    ready: float  # when it could be sent: due, or later if the turn before was answered late
    sent: float
    first: float | None  # first piece of the answer
    ended: float
    error: str | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer: str = ""

    @property
    def ttft_ms(self) -> float | None:
        """Time to the first piece of the answer; None where the request failed."""
        return None if self.error or self.first is None else (self.first - self.sent) * 1000
