"""What one request is promised: the targets of its class, and tighter ones that its headers ask for.

A header never changes what is counted of the class: a client could otherwise spend the class's error budget. What it
asks for is judged besides.
"""

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from extproc.policy.priority import PriorityClass

# ours, llm-d's, and those that llm-d had before May 2026 and still takes; milliseconds
TTFT_HEADERS = ("x-kvmesh-ttft-ms", "x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
INTER_TOKEN_HEADERS = ("x-kvmesh-inter-token-ms", "x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
SLO_HEADERS = frozenset((*TTFT_HEADERS, *INTER_TOKEN_HEADERS))
_MILLISECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,6})?")  # no sign, no exponent, no other alphabet's digits
_LONGEST_VALUE = 40  # characters that are repeated to people


class TokenTargets(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token, and mean seconds from one token of an answer to the next."""

    ttft_seconds: float
    inter_token_seconds: float


class IgnoredTarget(StrEnum):
    """Why a header with a target counts for nothing; a metric's label."""

    UNREADABLE = "unreadable"  # no number of milliseconds above 0
    LOOSER = "looser"  # than what the class is promised: a header may only tighten


class Promise(msgspec.Struct, frozen=True, kw_only=True):
    """What the requests of a class are promised; the names are labels, hence few."""

    class_name: str
    tenant: str
    model: str  # as the pods serve it, "" where it is not configured
    targets: TokenTargets


class OpenPromise(msgspec.Struct, frozen=True, kw_only=True):
    """The promise of a request that has not ended."""

    promise: Promise
    asked: TokenTargets | None = None  # by the request's headers; None: nothing
    arrived_at: float  # monotonic seconds at which the request was complete
    is_stream: bool

    def is_broken(self, *, now: float) -> bool:
        """Tell whether a stream without a token is too late. An answer that comes at once may take longer."""
        return self.is_stream and now - self.arrived_at > self.promise.targets.ttft_seconds


class AnswerPromise(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one answer is to be judged by, perhaps by another picker than the one that picked."""

    promise: Promise
    asked: TokenTargets | None = None  # by the request's headers; None: nothing
    arrived_at: float  # unix seconds at which the request was complete
    endpoint: str
    weight: float = 1.0  # so many requests it stands for: 1 / the probability that it is read


def targets_of(priority_class: PriorityClass) -> TokenTargets:
    """Return what a class is promised of its answers."""
    targets = priority_class.targets
    return TokenTargets(ttft_seconds=targets.ttft_seconds, inter_token_seconds=targets.inter_token_seconds)


def asked_targets(
    headers: Mapping[str, str], targets: TokenTargets
) -> tuple[TokenTargets | None, Mapping[str, IgnoredTarget]]:
    """Return the targets that these request headers ask for, None where they tighten nothing, and those ignored.

    Of several headers the tightest counts.
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
    """Say of each ignored header why, for people."""
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
