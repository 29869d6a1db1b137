"""Summarizes an arm of a load and compares two; the final report as a value for JSON and a table. Pure except for rich.

Latencies cover completely answered requests only, so they are always shown with the number of the others. They count
from the scheduled send time and so include the client's own lateness.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvmesh.plain_text import cut_end, printable
from operate.load.script import Record

SHARES = (0.50, 0.95, 0.99)
LATE_SECONDS = 0.05
HELD_BACK_SECONDS = 0.001
SHOWN_REASONS = 5
LONGEST_REASON = 200


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Percentiles in milliseconds, or None without samples."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None


class ArmSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The results of an arm; warm-up requests count only in the fields `warm_up…`."""

    arm: str
    requests: int
    answered: int
    refused: int
    failed: int
    warm_up: int  # requests before the measured part
    warm_up_failed: dict[str, int] = {}  # unanswered ones of these, by reason and server
    unfinished: int  # cut off in flight, by Ctrl-C
    seconds: float  # of the measured part
    answered_per_second: float
    ttft_ms: Spread
    inter_token_ms: Spread
    hit_rate: float | None  # cached / prompt tokens from `usage`; None if no answer reports it
    prompt_tokens: int
    cached_tokens: int
    refusals: dict[str, int]  # by reason
    errors: dict[str, int]
    failed_at: dict[str, int]  # by server, if known
    servers: dict[str, int]  # answered requests by pod
    late: int  # sent more than LATE_SECONDS late, because this client could not keep up
    latest_ms: float
    held_back: int  # sent later than planned, because the previous answer was late


def summarise(
    arm: str, records: Sequence[Record], *, measured_from: float, seconds: float, unfinished: int = 0
) -> ArmSummary:
    """Summarize an arm that ran for `seconds`."""
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
    """Return the nearest-rank percentile, or NaN without values."""
    ordered = sorted(values)
    return ordered[max(ceil(share * len(ordered)) - 1, 0)] if ordered else float("nan")


def ratio(ours: float | None, theirs: float | None) -> float | None:
    """Return theirs / ours, or None if it is undefined."""
    return theirs / ours if ours and theirs is not None else None


def _spread(values: Iterable[float]) -> Spread:
    found = list(values)
    if not found:
        return Spread()
    return Spread(**{f"p{share * 100:.0f}": round(percentile(found, share), 3) for share in SHARES})


def _problem(record: Record) -> str | None:
    reason = record.error or (record.refused and f"refused: {record.refused}")
    return f"{reason} at {record.server}" if reason and record.server else reason


def _counted(names: Iterable[str | None]) -> dict[str, int]:
    return dict(Counter(name for name in names if name).most_common())


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A load and its results by arm."""

    load: str
    model: str
    seed: int
    interrupted: bool
    arms: tuple[ArmSummary, ...]

    @property
    def is_all_answered(self) -> bool:
        """Whether every arm had requests and all of them, warm-up included, were answered completely."""
        return not self.interrupted and all(
            arm.requests and arm.requests == arm.answered and not arm.warm_up_failed for arm in self.arms
        )


def shown(report: LoadReport) -> Group:
    """Return the table with a column per arm, followed by remarks."""
    return Group(
        Text(printable(report.load), style="bold"),
        _table(report.arms),
        *(Text(printable(line)) for arm in report.arms for line in _remarks(arm)),
        *([Text("interrupted: this is what came so far", style="yellow")] if report.interrupted else []),
    )


def _table(arms: Sequence[ArmSummary]) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("")
    for arm in arms:
        table.add_column(printable(arm.arm), justify="right", no_wrap=True)
    compared = len(arms) == 2
    if compared:
        table.add_column("", justify="right", no_wrap=True)
    for name, values, times in _rows(arms):
        table.add_row(name, *values, *([times] if compared else []))
    return table


def _rows(arms: Sequence[ArmSummary]) -> Iterator[tuple[str, list[str], str]]:
    for name, figures in (
        ("TTFT", [arm.ttft_ms for arm in arms]),
        ("inter-token", [arm.inter_token_ms for arm in arms]),
    ):
        for share in Spread.__struct_fields__:
            values = [getattr(spread, share) for spread in figures]
            yield f"{name} {share}", [_milliseconds(value) for value in values], _times(values)
    yield "hit rate", ["-" if arm.hit_rate is None else f"{arm.hit_rate:.1%}" for arm in arms], ""
    yield "answered", [f"{arm.answered:,} of {arm.requests:,}" for arm in arms], ""
    yield "refused", [f"{arm.refused:,}" for arm in arms], ""
    yield "failed", [f"{arm.failed:,}" for arm in arms], ""


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms" if value < 100 else f"{value:,.0f} ms"


def _times(values: Sequence[float | None]) -> str:
    """Format the second arm's value as a multiple of the first's."""
    found = ratio(*values) if len(values) == 2 else None
    return "" if found is None else f"{found:,.1f} times" if found < 10 else f"{found:,.0f} times"


def _remarks(arm: ArmSummary) -> Iterator[str]:
    if arm.warm_up:
        yield f"{arm.arm}: not counted: {_many(arm.warm_up, 'request')} before, to warm the caches up"
    yield from _reasons(f"{arm.arm}: warm-up: failed", arm.warm_up_failed)
    if arm.answered and arm.hit_rate is None:
        yield f"{arm.arm}: no answer tells cached tokens; vLLM does with --enable-prompt-tokens-details"
    yield from _reasons(f"{arm.arm}: refused", arm.refusals)
    yield from _reasons(f"{arm.arm}: failed", arm.errors)
    if arm.failed_at:
        where = ", ".join(f"{server} {count:,}" for server, count in arm.failed_at.items())
        yield f"{arm.arm}: failed at {where}"
    if arm.late:
        yield (
            f"{arm.arm}: sent more than {LATE_SECONDS * 1000:.0f} ms late: {_many(arm.late, 'request')}, "
            f"{arm.latest_ms:.0f} ms at the most; this machine could not keep up. TTFT counts from when they were due"
        )
    if arm.held_back:
        yield f"{arm.arm}: asked later than planned, after a late answer: {_many(arm.held_back, 'question')}"
    if arm.unfinished:
        yield f"{arm.arm}: not counted: {_many(arm.unfinished, 'request')} cut off in flight"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _reasons(beginning: str, counts: dict[str, int]) -> Iterator[str]:
    for reason, count in list(counts.items())[:SHOWN_REASONS]:
        yield f"{beginning} {count:,}: {cut_end(printable(reason), limit=LONGEST_REASON)}"
    if len(counts) > SHOWN_REASONS:
        yield f"{beginning} {sum(list(counts.values())[SHOWN_REASONS:]):,} for other reasons"
