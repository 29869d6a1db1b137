"""The result for a person: a table of classes, one of the whole, the verdicts."""

from collections.abc import Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.overload.plan import SHEDDABLE
from bench.overload.summary import ClassSummary, RunSummary
from bench.routing.summary import Verdict

WIDTH = 150
LATE_MS = 50.0


def tables(runs: Sequence[RunSummary], verdicts: Sequence[Verdict], *, capacity: float) -> Group:
    """Everything that is printed."""
    names = [each.name for each in runs[0].classes]
    errors = [
        Text(f"{run.arm}, {run.scenario} {run.load:g}x: {count} x {error}", "yellow")
        for run in runs
        for error, count in run.errors.items()
    ]
    late = [
        Text(f"{run.arm}, {run.load:g}x: machine too busy, requests left up to {run.late_p99:.0f} ms late", "red")
        for run in runs
        if run.late_p99 > LATE_MS
    ]
    return Group(
        *(_class_table(name, runs) for name in names),
        _whole_table(runs, capacity=capacity),
        *errors,
        *late,
        *(verdict_line(verdict) for verdict in verdicts),
    )


def table_of(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("arm", no_wrap=True, vertical="bottom")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    return table


def _class_table(name: str, runs: Sequence[RunSummary]) -> Table:
    limit = runs[0].of_class(name).ttft_limit
    table = table_of(
        f"{name}: in time is a TTFT within {limit:g} ms",
        *("load", "asked", "answered\n%", "in time\n%", "refused\n%", "failed\n%"),
        *(
            "TTFT ms\nmean",
            "\np50",
            "\np95",
            "\np99",
            "token gap\nms p50",
            "\np95",
            "\np99",
            "steady\ngot %",
            "flood\ngot %",
        ),
    )
    for run in runs:
        table.add_row(run.arm, _load(run), *_class_cells(run.of_class(name)), *_tenant_cells(run, name))
    return table


def _class_cells(each: ClassSummary) -> Sequence[str]:
    shares = (each.answered, each.in_time, each.refused, each.failed)
    times = (each.ttft_mean, each.ttft_p50, each.ttft_p95, each.ttft_p99)
    gaps = (each.inter_token_p50, each.inter_token_p95, each.inter_token_p99)
    return (
        str(each.requests),
        *(f"{100 * count / max(1, each.requests):.1f}" for count in shares),
        *(f"{value:.0f}" for value in (*times, *gaps)),
    )


def _tenant_cells(run: RunSummary, name: str) -> Sequence[str]:
    mine = [each for each in run.tenants if each.class_name == name]
    return [f"{100 * each.answered_tokens / max(1, each.asked_tokens):.0f}" for each in mine]


def _whole_table(runs: Sequence[RunSummary], *, capacity: float) -> Table:
    table = table_of(
        f"all classes: work in prompt tokens, capacity {capacity:g} a second",
        *("load", "goodput\nof cap. %", "all work\nof cap. %", "good\nreq/s", "refusals", "took ms\np50", "\np99"),
        *(
            "Retry-After\ns p50",
            "\nmost",
            "1st retries\nhome",
            "steady's share\nof sheddable %",
            "busy\ncores",
        ),
    )
    for run in runs:
        refusals, retries = run.refusals, run.retries
        table.add_row(
            run.arm,
            _load(run),
            *(f"{100 * value / capacity:.1f}" for value in (run.goodput, run.throughput)),
            f"{run.goodput_requests:.1f}",
            str(refusals.count),
            *(f"{value:.1f}" for value in (refusals.ms_p50, refusals.ms_p99)),
            *(f"{value:.0f}" for value in (refusals.retry_after_p50, refusals.retry_after_most)),
            f"{retries.home} of {retries.count}",
            f"{100 * run.share_of_own_half(SHEDDABLE):.0f}",
            f"{run.busy_cores:.1f}",
        )
    return table


def _load(run: RunSummary) -> str:
    shown = {"steady": "", "falling": " falls"}.get(run.scenario, f" {run.scenario}")
    return f"{run.load:g}x{shown}"


def verdict_line(verdict: Verdict) -> Text:
    """One target and whether it is met."""
    style = "green" if verdict.met else "red"
    return Text(f"{'MET   ' if verdict.met else 'MISSED'} {verdict.target}: {verdict.measured}", style=style)
