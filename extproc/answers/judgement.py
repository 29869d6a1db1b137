"""Judge whether an answer met its targets.

Times are seconds since the picker had the complete request, so that queueing and a prefill request count.
"""

from enum import StrEnum

import msgspec

from extproc.answers.promise import TokenTargets


class Target(StrEnum):
    """A target to judge; a metric's label."""

    TTFT = "ttft"
    INTER_TOKEN = "inter-token"  # noqa: S105
    ALL = "all"  # every judged target was met


class Outcome(StrEnum):
    """The outcome of a target; a metric's label. All but `MET` are misses."""

    MET = "met"
    LATE = "late"
    REFUSED = "refused"  # by the picker, because of load or a missing pod
    FAILED = "failed"  # a 5xx from a pod, or from Envoy on its behalf


class Judgement(msgspec.Struct, frozen=True, kw_only=True):
    """Which targets were met; None if unknown."""

    ttft: bool | None = None
    inter_token: bool | None = None
    whole: bool | None = None

    @property
    def verdicts(self) -> tuple[tuple[Target, bool | None], ...]:
        """Each target and whether it was met."""
        return ((Target.TTFT, self.ttft), (Target.INTER_TOKEN, self.inter_token), (Target.ALL, self.whole))


class StreamTimes(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a stream's first and last tokens."""

    first_seconds: float | None = None  # None before the first token
    last_seconds: float = 0.0

    @classmethod
    def since(cls, arrived_at: float, *, first_at: float | None, last_at: float) -> "StreamTimes":
        """Return the times since the request, by the same clock; never negative, even if the clock was set back."""
        if first_at is None:
            return NO_TOKENS
        first = max(first_at - arrived_at, 0.0)
        return cls(first_seconds=first, last_seconds=max(last_at - arrived_at, first))

    def mean_inter_token(self, tokens: int | None) -> float | None:
        """Return the mean inter-token time, or None with fewer than two tokens or an unknown number."""
        if tokens is None or tokens < 2 or self.first_seconds is None:
            return None
        return (self.last_seconds - self.first_seconds) / (tokens - 1)


NO_TOKENS = StreamTimes()


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A stream's token times as measured by the picker; None if it did not see them."""

    ttft_seconds: float | None = None
    inter_token_seconds: float | None = None  # mean


NOT_MEASURED = Measured()


def judge_stream(
    targets: TokenTargets, times: StreamTimes, *, tokens: int | None, ended: bool, now: float
) -> Judgement:
    """Judge a stream by its token times; `tokens` is their number, or None if unknown.

    `ended`: the stream is complete. Otherwise the client left at `now`, and the tokens so far are judged. If it left
    before the first token, the TTFT target is missed if it has passed, and unknown otherwise.
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
    """Judge an unstreamed answer that came after `seconds`.

    Its token times are not visible, so it is judged as a whole, by the time that the targets allow a stream with the
    same number of tokens.
    """
    if tokens is None:
        return Judgement()
    may_take = targets.ttft_seconds + max(tokens - 1, 0) * targets.inter_token_seconds
    return Judgement(whole=seconds <= may_take)
