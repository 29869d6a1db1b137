"""The table of `kvmesh policy simulate`: what was recorded by class and tenant, and what each policy does to it."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from extproc.replay_log.fates import Sums
from extproc.replay_log.question import Finding
from kvmesh.plain_text import printable

COLUMNS = (
    *("CLASS", "TENANT", "RUN", "REQUESTS", "SERVED", "REFUSED", "LEFT", "WAITED", "WAIT p50", "WAIT p95"),
    *("TTFT p50", "TTFT p95", "IN TARGET", "DEGRADED"),
)
LONGEST_TENANT = 16


def render(finding: Finding, *, console: Console) -> None:
    """Print the answer. All of it is text, never markup."""
    for line in _head(finding):
        console.print(Text(printable(line)))
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in COLUMNS:
        table.add_column(column, no_wrap=column not in ("REFUSED", "DEGRADED"), overflow="fold")
    for row in _rows(finding.runs):
        table.add_row(*(Text(printable(cell)) for cell in row))
    console.print(table)
    for note in finding.notes:
        console.print(Text(printable(f"note: {note}")))


def _head(finding: Finding) -> Iterator[str]:
    pace, fit = finding.pace, finding.fit
    yield f"{finding.requests} requests in {finding.seconds:,.0f} s, replayed on {finding.pods} simulated pods"
    source = (
        "assumed or given" if fit is None else f"fitted to {fit.answers} answers, half of them within {fit.error:.0%}"
    )
    yield (
        f"a pod: {1 / pace.seconds_a_prompt_token:,.0f} prompt tokens/s, a step {pace.alone_seconds * 1e3:.1f} ms and "
        f"{pace.seconds_a_stream * 1e6:.0f} µs a stream, {pace.base_seconds * 1e3:.0f} ms a request ({source}); "
        f"at most {pace.most_running} run, {pace.step_tokens} tokens a step, {pace.cache_tokens:,} in the cache"
    )


def _rows(runs: Mapping[str, Mapping[tuple[str, str], Sums]]) -> Iterator[Sequence[str]]:
    groups = list(next(iter(runs.values())))
    for class_name, tenant in groups:
        for number, (run, by_group) in enumerate(runs.items()):
            sums = by_group[class_name, tenant]
            name = ("", "") if number else (class_name, tenant[:LONGEST_TENANT] if tenant != "" else "(none)")
            yield (*name, run, *_cells(sums))


def _cells(sums: Sums) -> Sequence[str]:
    refused = sum(sums.refused.values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sums.refused.items())
    degraded = {**sums.degraded} | {f"withheld {code}": count for code, count in sums.withheld.items()}
    return (
        f"{sums.requests}",
        f"{sums.served}",
        f"{refused} ({reasons})" if refused else "0",
        f"{sums.left}",
        f"{sums.waited}",
        _seconds(sums.waited_p50_seconds),
        _seconds(sums.waited_p95_seconds),
        _seconds(sums.ttft_p50_seconds),
        _seconds(sums.ttft_p95_seconds),
        "-" if sums.in_target is None else f"{sums.in_target:.1%} of {sums.ttft_target_seconds:g} s",
        ", ".join(f"{step} {count}" for step, count in degraded.items()) or "-",
    )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
