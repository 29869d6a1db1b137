"""The targets of one request: those of its class, and tighter ones from its headers.

A header never changes the class's own figures, or a client could spend the class's error budget. Its targets are judged
separately.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from extproc.policy.priority import PriorityClass

# ours, llm-d's, and llm-d's old names (before May 2026), which it still accepts; milliseconds
TTFT_HEADERS = ("x-kvmesh-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
INTER_TOKEN_HEADERS = ("x-kvmesh-inter-token-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
SLO_HEADERS = frozenset((*TTFT_HEADERS, *INTER_TOKEN_HEADERS))
_MILLISECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")  # no sign, no exponent, no other alphabet's digits
_LONGEST_VALUE = 40  # characters of a bad value shown to people


class TokenTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of the TTFT and of an answer's mean inter-token time, in seconds."""

    ttft_seconds: float
    inter_token_seconds: float


class IgnoredTarget(StrEnum):
    """Why a header with a target is ignored; a metric's label."""

    UNREADABLE = "unreadable"  # not a number of milliseconds above 0
    LOOSER = "looser"  # than the class's target: a header may only tighten it


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """The targets of a request and the labels they are counted under, which have few values."""

    class_name: str
    tenant: str
    model: str  # as the pods serve it, "" if it is not configured
    targets: TokenTargets


class OpenPromise(msgspec.Struct, frozen=True, kw_only=True):
    """The targets of a request that has not ended."""

    promise: Promise
    asked: TokenTargets | None = None  # tighter targets from the request's headers
    arrived_at: float  # monotonic seconds when the request was complete
    is_stream: bool

    def is_broken(self, *, now: float) -> bool:
        """Tell whether a stream, still without a token, misses its TTFT; an unstreamed answer may take longer."""
        return self.is_stream and now - self.arrived_at > self.promise.targets.ttft_seconds


class AnswerPromise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The targets to judge one answer by, possibly in a picker other than the one that picked."""

    promise: Promise
    asked: TokenTargets | None = None  # tighter targets from the request's headers
    arrived_at: float  # unix seconds when the request was complete
    endpoint: str
    weight: float = 1.0  # requests that it stands for: 1 / the probability that it is read


def targets_of(priority_class: PriorityClass) -> TokenTargets:
    """Return a class's targets for its answers."""
    targets = priority_class.targets
    return TokenTargets(ttft_seconds=targets.ttft_seconds, inter_token_seconds=targets.inter_token_seconds)


def asked_targets(
    headers: Mapping[str, str], targets: TokenTargets
) -> tuple[TokenTargets | None, Mapping[str, IgnoredTarget]]:
    """Return the targets from the request headers (None if they tighten nothing) and the ignored headers.

    The tightest of several headers counts.
    """
    ignored: dict[str, IgnoredTarget] = {}
    ttft = _tightest(headers, TTFT_HEADERS, targets.ttft_seconds, ignored)
    inter_token = _tightest(headers, INTER_TOKEN_HEADERS, targets.inter_token_seconds, ignored)
    if (ttft, inter_token) == (targets.ttft_seconds, targets.inter_token_seconds):
        return None, ignored
    return TokenTargets(ttft_seconds=ttft, inter_token_seconds=inter_token), ignored


def words_of_ignored(
    headers: Mapping[str, str], ignored: Mapping[str, IgnoredTarget], targets: TokenTargets
) -> tuple[str, ...]:
    """Explain to people why each header was ignored."""
    return tuple(_words(name, headers[name], why, targets) for name, why in ignored.items())


def _tightest(
    headers: Mapping[str, str], names: Sequence[str], seconds: float, ignored: dict[str, IgnoredTarget]
) -> float:
    tightest = seconds
    for name in names:
        if (text := headers.get(name)) is None:
            continue
        asked = float(text) / 1000 if _MILLISECONDS.fullmatch(text) else 0.0
        if asked <= 0:
            ignored[name] = IgnoredTarget.UNREADABLE
        elif asked > seconds:
            ignored[name] = IgnoredTarget.LOOSER
        else:
            tightest = min(tightest, asked)
    return tightest


def _words(name: str, text: str, why: IgnoredTarget, targets: TokenTargets) -> str:
    if why is IgnoredTarget.UNREADABLE:
        return f"the header {name} is ignored: {text[:_LONGEST_VALUE]!r} is no number of milliseconds above 0"
    seconds = targets.ttft_seconds if name in TTFT_HEADERS else targets.inter_token_seconds
    return f"the header {name} is ignored: the class is promised {seconds * 1000:g} ms, which it may only tighten"
