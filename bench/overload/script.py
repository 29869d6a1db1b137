"""What the clients will send and what they saw: made by `workloads`, played by `load`, judged by `summary`.

Plain values that cross a process boundary as JSON. Times are seconds after the start of the run.
"""

import msgspec


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One request of one client; sent when it is due, whatever became of those before it."""

    number: int
    due: float
    tenant: str
    class_name: str
    prompt: str
    work_tokens: int  # prompt tokens that nobody has cached
    answer_tokens: int
    obeys: bool  # comes back when Retry-After says so; others give up


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One sending of a request, as its client saw it."""

    sent: float
    ended: float
    status: int | None  # None: there was no answer
    first: float | None = None  # first piece of the answer
    pieces: int = 0  # of the answer
    retry_after: float | None = None  # seconds, as the refusal says
    reason: str = ""  # x-kvmesh-reason
    degraded: str = ""  # x-kvmesh-degraded
    error: str | None = None  # None: answered completely
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft(self) -> float | None:
        """Seconds to the first piece of a whole answer."""
        return None if self.error is not None or self.first is None else self.first - self.sent

    @property
    def is_refused(self) -> bool:
        """Whether it was told to come back later."""
        return self.status in (429, 503)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request."""

    due: float
    tenant: str
    class_name: str
    work_tokens: int
    obeys: bool
    attempts: tuple[Attempt, ...]

    @property
    def last(self) -> Attempt:
        """How it ended."""
        return self.attempts[-1]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the load generator is told."""

    host: str
    port: int
    model: str
    requests: tuple[Request, ...]
    patience_seconds: float  # a client leaves when its answer is not whole by then
    most_attempts: int
