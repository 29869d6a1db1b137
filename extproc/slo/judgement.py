"""Whether an answer was within its targets, by what came of it and when.

Times are seconds since the request was complete at the picker, so that the queue and a prefill leg count.
"""

from enum import StrEnum

import msgspec

from extproc.slo.promise import TokenTargets


class Target(StrEnum):
    """What is judged; a metric's label."""

    TTFT = "ttft"
    INTER_TOKEN = "inter-token"  # noqa: S105
    ALL = "all"  # nothing of what is judged was late


class Outcome(StrEnum):
    """What became of a promise; a metric's label. All but the first are missed."""

    MET = "met"
    LATE = "late"
    REFUSED = "refused"  # by the picker, for load or for want of a pod
    FAILED = "failed"  # a 5xx of a pod, or of Envoy in its place


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """What was met of the targets; None: it cannot be said."""

    ttft: bool | None = None
    inter_token: bool | None = None
    whole: bool | None = None

    @property
    def verdicts(self) -> tuple[tuple[Target, bool | None], ...]:
        """Each target with what became of it."""
        return ((Target.TTFT, self.ttft), (Target.INTER_TOKEN, self.inter_token), (Target.ALL, self.whole))


class StreamTimes(msgspec.Struct, frozen=True, kw_only=True):
    """When a stream's tokens came."""

    first_seconds: float | None = None  # None: none has come
    last_seconds: float = 0.0

    @classmethod
    def since(cls, arrived_at: float, *, first_at: float | None, last_at: float) -> "StreamTimes":
        """Return the times since the request, of one clock; one that was set back makes none negative."""
        if first_at is None:
            return NO_TOKENS
        first = max(first_at - arrived_at, 0.0)
        return cls(first_seconds=first, last_seconds=max(last_at - arrived_at, first))

    def mean_inter_token(self, tokens: int | None) -> float | None:
        """Return the mean time from one token to the next; None where less than two came, or how many is not known."""
        if tokens is None or tokens < 2 or self.first_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / (tokens - 1)


NO_TOKENS = StreamTimes()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """How long a stream's tokens took as the picker saw them; None: that was not seen."""

    ttft_seconds: float | None = None
    inter_token_seconds: float | None = None  # mean


NOT_MEASURED = Measured()


def judge_stream(
    targets: TokenTargets, times: StreamTimes, *, tokens: int | None, ended: bool, now: float
) -> Judgement:
    """Judge a stream by its tokens: how many came, None where that is not known.

    `ended`: it came whole; else the client has left at `now`, and what came is judged. One that left before the first
    token was kept waiting too long, or nothing can be said.
    """
    first = times.first_seconds
    if first is None and (ended or now > targets.ttft_seconds):
        first = now
    if first is None:
        return Judgement()
    ttft = first <= targets.ttft_seconds
    mean = times.mean_inter_token(tokens)
    inter_token = None if mean is None else mean <= targets.inter_token_seconds
    return Judgement(ttft=ttft, inter_token=inter_token, whole=ttft and inter_token is not False)


def judge_document(targets: TokenTargets, *, seconds: float, tokens: int | None) -> Judgement:
    """Judge an answer that came at once, after `seconds`.

    When its tokens were made is not seen, so it is judged as a whole: by the time that a stream of as many tokens may
    take within the targets.
    """
    if tokens is None:
        return Judgement()
    may_take = targets.ttft_seconds + max(tokens - 1, 0) * targets.inter_token_seconds
    return Judgement(whole=seconds <= may_take)
