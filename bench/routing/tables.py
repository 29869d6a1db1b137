"""The result for a person: one table for each workload and the verdicts."""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench.routing.summary import RunSummary, Verdict

WIDTH = 120
LATE_MS = 50.0


def workload_table(title: str, runs: Sequence[RunSummary], *, limit_ms: float) -> Table:
    """One line for each arm."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0), pad_edge=False)
    table.add_column("arm", no_wrap=True, vertical="bottom")
    for heading in (
        *("ok\n%", f"goodput/s\n≤ {limit_ms:g} ms", "TTFT ms\nmean", "\np50", "\np95", "\np99"),
        *("hit\nrate", "of one\ncache", "spread\nof req.", "of\nprefill", "CPU ms\nrouter", "\npods"),
    ):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for run in runs:
        table.add_row(
            run.arm,
            f"{100 * run.success_rate:.1f}",
            f"{run.goodput_per_second:.1f}",
            *(f"{value:.0f}" for value in (run.ttft_mean, run.ttft_p50, run.ttft_p95, run.ttft_p99)),
            f"{run.hit_rate:.3f}",
            f"{run.hit_share:.3f}",
            f"{run.spread.requests:.2f}",
            f"{run.spread.prefill:.2f}",
            f"{run.router_cpu_ms:.1f}",
            f"{run.pods_cpu_ms:.1f}",
        )
    return table


def tables(
    runs: Sequence[RunSummary], titles: Mapping[str, str], verdicts: Sequence[Verdict], *, limit_ms: float
) -> Group:
    """Everything, in the order of `titles`."""
    parts = [
        workload_table(f"{name}: {title}", chosen, limit_ms=limit_ms)
        for name, title in titles.items()
        if (chosen := [run for run in runs if run.workload == name])
    ]
    errors = [
        Text(f"{run.arm}, {run.workload}: {count} x {error}", style="yellow")
        for run in runs
        for error, count in run.errors.items()
    ]
    late = [
        Text(
            f"{run.arm}, {run.workload}: the machine was too busy, requests left up to {run.late_p99:.0f} ms late",
            "red",
        )
        for run in runs
        if run.late_p99 > LATE_MS
    ]
    return Group(*parts, *errors, *late, _conditions(runs), *(_verdict_line(verdict) for verdict in verdicts))


def _conditions(runs: Sequence[RunSummary]) -> Text:
    """What tells a good measurement from a bad one."""
    busy, late = max(run.busy_cores for run in runs), max(run.late_p99 for run in runs)
    wrong = sum(run.miscounted_prompts for run in runs)
    return Text(
        f"at most {busy:.1f} cores of the machine busy; 99 % of the requests left within {late:.0f} ms of their time; "
        f"{wrong} prompts had another length than planned"
    )


def _verdict_line(verdict: Verdict) -> Text:
    style, word = ("green", "MET   ") if verdict.met else ("red", "MISSED")
    return Text(f"{word} {verdict.arm}, {verdict.target}: {verdict.measured}", style=style)
