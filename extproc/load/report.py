"""What `kvmesh load` says at its end: as a value that JSON shows, and as a table. Pure but for rich."""

from collections.abc import Iterator, Sequence

import msgspec
from rich.console import Group
from rich.table import Table
from rich.text import Text

from extproc.load.summary import LATE_SECONDS, ArmSummary, Spread, ratio
from kvmesh.plain_text import cut_end, printable

SHOWN_REASONS = 5
LONGEST_REASON = 200


class LoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """A load and what came of it, arm by arm."""

    load: str
    model: str
    seed: int
    interrupted: bool
    arms: tuple[ArmSummary, ...]

    @property
    def is_all_answered(self) -> bool:
        """Whether each request of each arm was answered whole, those of the warm-up too, and there was one."""
        return not self.interrupted and all(
            arm.requests and arm.requests == arm.answered and not arm.warm_up_failed for arm in self.arms
        )


def shown(report: LoadReport) -> Group:
    """The table, with one column for each arm, and below it what needs words."""
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
    """How many times the first arm's value the second one's is."""
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
