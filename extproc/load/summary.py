"""What one arm of a load comes to, and how two compare. Pure.

Times are of requests that were answered whole, so they are never told without the number of the others. They count
from when a request should have been sent: what this client was late is part of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import ceil

import msgspec

from extproc.load.script import Record

SHARES = (0.50, 0.95, 0.99)
LATE_SECONDS = 0.05
HELD_BACK_SECONDS = 0.001


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in milliseconds; None where there is nothing to count."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of one arm saw; requests of the warm-up are in the fields `warm_up…` alone."""

    arm: str
    requests: int
    answered: int
    refused: int
    failed: int
    warm_up: int  # sent before the measured part, not counted in anything else
    warm_up_failed: dict[str, int] = {}  # how many of these were not answered whole, by reason and server
    unfinished: int  # cut off in flight, by Ctrl-C
    seconds: float  # of the measured part
    answered_per_second: float
    ttft_ms: Spread
    inter_token_ms: Spread
    hit_rate: float | None  # cached tokens of prompt tokens, as the answers' usage says; None: none says it
    prompt_tokens: int
    cached_tokens: int
    refusals: dict[str, int]  # by reason
    errors: dict[str, int]
    failed_at: dict[str, int]  # by server, where it is known
    servers: dict[str, int]  # answered requests by pod
    late: int  # sent more than LATE_SECONDS late: this client could not keep up
    latest_ms: float
    held_back: int  # sent later than planned, because the answer before came late


def summarise(
    arm: str, records: Sequence[Record], *, measured_from: float, seconds: float, unfinished: int = 0
) -> ArmSummary:
    """Judge one arm; `seconds` is how long it ran."""
    measured = [record for record in records if record.due >= measured_from]
    answered = [record for record in measured if record.is_answered]
    prompt_tokens = sum(record.prompt_tokens for record in answered)
    cached_tokens = sum(record.cached_tokens for record in answered)
    lateness = [record.sent - record.ready for record in measured]
    lasted = max(0.0, seconds - measured_from)
    return ArmSummary(
        arm=arm,
        requests=len(measured),
        answered=len(answered),
        refused=sum(record.refused is not None for record in measured),
        failed=sum(record.error is not None for record in measured),
        warm_up=len(records) - len(measured),
        warm_up_failed=_counted(_problem(record) for record in records if record.due < measured_from),
        unfinished=unfinished,
        seconds=lasted,
        answered_per_second=len(answered) / lasted if lasted else 0.0,
        ttft_ms=_spread(ms for record in answered if (ms := record.awaited_ms) is not None),
        inter_token_ms=_spread(gap * 1000 for record in answered for gap in record.gaps),
        hit_rate=cached_tokens / prompt_tokens if any(record.tells_cached for record in answered) else None,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        refusals=_counted(record.refused for record in measured),
        errors=_counted(record.error for record in measured),
        failed_at=_counted(record.server for record in measured if record.error is not None),
        servers=_counted(record.server for record in answered),
        late=sum(each > LATE_SECONDS for each in lateness),
        latest_ms=max(lateness, default=0.0) * 1000,
        held_back=sum(record.ready - record.due > HELD_BACK_SECONDS for record in measured),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the least value that so many do not exceed; NaN of nothing."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else float("nan")


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """How many times ours theirs is; None where that says nothing."""
    return theirs / ours if ours and theirs is not None else None


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    if not found:
        return Spread()
    return Spread(**{f"p{share * 100:.0f}": round(percentile(found, share), 3) for share in SHARES})


def _problem(record: Record) -> str | None:
    """Why it was not answered whole, and where; None where it was."""
    reason = record.error or (record.refused and f"refused: {record.refused}")
    return f"{reason} at {record.server}" if reason and record.server else reason


def _counted(names: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(name for name in names if name).most_common())
