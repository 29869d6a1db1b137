"""Carries out the commands `kvmesh index …` that look into Redis: aligned tables, then remarks, one per line.

Exit code 1 is a failure, or differences found by `verify`; 2 is wrong usage, or a failed `verify`. Text from Redis is
shown as text: without control characters, and never as markup.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kv_indexer.inspect.index_audit import KINDS
from kv_indexer.inspect.inspect_index import (
    Cleared,
    SizeReport,
    SourceLine,
    SourcesReport,
    clear_sources,
    find_targets,
    inspect_sizes,
    inspect_sources,
)
from kv_indexer.inspect.redis_inspect import RedisInspector
from kv_indexer.inspect.verify_index import Audit, IndexVerifier
from kvmesh.errors import KvIndexerError, SettingError, UnknownSourceError
from kvmesh.index.redis_findings import RedisFindings
from kvmesh.output.forms import WIDE_ENOUGH, OutputForm, people_console, print_data
from kvmesh.plain_text import cut_end, printable

FAILURE, WRONG_USAGE = 1, 2
CALL_SECONDS = 5.0  # each call of Redis
RATE_SECONDS = 1.0  # between the two readings for events/s
LISTED = 100  # differences; all are counted
WIDE_FROM_COLUMNS = 100  # a narrower terminal has no room for the owner and the time since the last change
LONGEST_OWNER = 24
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def sources(url: str, form: OutputForm) -> None:
    """Print every source."""

    async def look(inspector: RedisInspector) -> Any:
        shared = RedisFindings(url=url, timeout_seconds=CALL_SECONDS)
        try:
            return await inspect_sources(inspector, findings=shared.read, interval_seconds=RATE_SECONDS)
        finally:
            await shared.close()

    _print(_ask("sources", url, look), form, show=show_sources)


def verify(url: str, form: OutputForm) -> None:
    """Recount the index, and print at most LISTED differences."""

    async def recount(inspector: RedisInspector) -> Any:
        return await IndexVerifier(inspector, listed=LISTED, progress=_tell).verify()

    audit = _ask("verify", url, recount, failure=WRONG_USAGE)
    _print(audit, form, show=show_audit)
    if audit.counts:
        raise typer.Exit(FAILURE)


def size(url: str, form: OutputForm) -> None:
    """Print the memory of each source."""
    _print(_ask("size", url, inspect_sizes), form, show=show_sizes)


def clear(url: str, source: str, form: OutputForm, *, yes: bool) -> None:
    """Hide the blocks of a source, after asking unless `yes`."""
    targets = _ask("clear", url, lambda inspector: find_targets(inspector, source))
    if not yes:
        named = ", ".join(f"{target.stream} ({target.blocks:,} blocks)" for target in targets)
        typer.confirm(f"Clear {named}? Requests miss its cache until it is replayed", abort=True, err=True)
    cleared = _ask("clear", url, lambda inspector: clear_sources(inspector, targets))
    if form is OutputForm.TABLE:
        show_cleared(cleared, console=people_console())
    else:
        print_data({"cleared": [asdict(one) for one in cleared]}, form)


def _ask(
    command: str,
    url: str,
    question: Callable[[RedisInspector], Coroutine[Any, Any, Any]],
    *,
    failure: int = FAILURE,
) -> Any:

    async def ask() -> Any:
        inspector = RedisInspector(url, timeout_seconds=CALL_SECONDS)
        try:
            return await question(inspector)
        finally:
            await inspector.close()

    try:
        return asyncio.run(ask())
    except KvIndexerError as error:
        typer.echo(f"kvmesh index {command}: {error}", err=True)
        usage = isinstance(error, SettingError | UnknownSourceError)
        raise typer.Exit(WRONG_USAGE if usage else failure) from None


def _tell(progress: str) -> None:
    """Show the progress at a terminal; a script does not need it."""
    if sys.stderr.isatty():
        typer.echo(progress, err=True)


def _print(report: Any, form: OutputForm, *, show: Callable[..., None]) -> None:
    if form is OutputForm.TABLE:
        show(report, console=people_console())
    else:
        print_data(asdict(report), form)


def show_sources(report: SourcesReport, *, console: Console) -> None:
    """Print the state of every source."""
    wide = WIDE_FROM_COLUMNS <= console.width < WIDE_ENOUGH  # a pipe always gets the same columns
    numbers = ["epoch", "sequence", "lag", *(["idle"] if wide else []), "blocks", "events/s"]
    table = _table("source", "tier", "state", right=numbers, end=("owner",) if wide else ())
    for line in report.sources:
        cells = [
            _source(line.endpoint, line.dp_rank),
            line.tier or "-",
            line.state,
            str(line.epoch),
            str(line.last_seq) if line.last_seq >= 0 else "-",
            _seconds(line.lag_seconds),
            *((_seconds(line.idle_seconds),) if wide else ()),
            f"{line.blocks:,}",
            "-" if line.events_per_second is None else f"{line.events_per_second:,.1f}",
            *((cut_end(line.owner or "nobody", limit=LONGEST_OWNER),) if wide else ()),
        ]
        table.add_row(*map(_text, cells))
    if report.sources:
        console.print(table)
    _say(console, _remarks(report, wide=wide))


def _remarks(report: SourcesReport, *, wide: bool) -> Iterable[str]:
    if not report.sources:
        yield "The index is empty: no indexer has registered a source yet."
    if not report.indexer_alive:
        yield "No indexer is alive: nothing keeps the index true, and what is shown was true once."
    lines = ((_source(each.endpoint, each.dp_rank), each.state, each.reason) for each in report.sources)
    for source, state, reason in dict.fromkeys(lines):
        if reason:
            yield f"{source} is {state}: {reason}"
    for owner, sources in _by_owner(report.sources).items():
        if not owner:
            yield f"followed by nobody: {', '.join(sources)}"
        elif not wide:
            yield f"followed by {owner}: {', '.join(sources)}"
    for finding in report.findings:
        yield f"{finding.subject} {finding.reason}: {finding.message}"
    for record in report.unreadable:
        yield f"not believed: {record}"


def show_sizes(report: SizeReport, *, console: Console) -> None:
    """Print the memory use of every source in Redis."""
    table = _table("source", "tier", right=("slot", "blocks", "holders", "bytes", "a block", "formula"))
    for line in report.sources:
        cells = [_source(line.endpoint, line.dp_rank), line.tier, str(line.slot), f"{line.blocks:,}"]
        each = f"{line.bytes / line.blocks:.0f} B" if line.blocks else "-"
        cells += [f"{line.holders:.2f}", _bytes(line.bytes), each, _bytes(line.formula_bytes)]
        table.add_row(*map(_text, cells))
    if report.sources:
        console.print(table)
    _say(console, _size_remarks(report))


def _size_remarks(report: SizeReport) -> Iterable[str]:
    if not report.sources:
        yield "The index is empty: no source holds anything."
    waiting = [line for line in report.sources if not line.live]
    if waiting:
        free = _bytes(sum(line.bytes for line in waiting))
        yield f"of these wait for their sweep: {len(waiting)}, which will free {free}"
    yield (
        f"in all {_bytes(report.bytes)}, by the formula of docs/reference/redis.md {_bytes(report.formula_bytes)}; "
        f"this Redis uses {_bytes(report.redis_bytes)}, for data of anyone"
    )


def show_audit(audit: Audit, *, console: Console) -> None:
    """Print the result of a recount."""
    lines = [
        f"recounted {audit.held_blocks:,} blocks of {audit.sources} sources against {audit.block_keys:,} block keys"
        + (f", in {audit.passes} passes" if audit.passes > 1 else "")
    ]
    if audit.waiting_for_sweep:
        lines.append(f"retired slots that wait for their sweep, which is no difference: {audit.waiting_for_sweep}")
    if audit.partial_blocks:
        lines.append(f"blocks held by some KV cache groups only, which is no difference: {audit.partial_blocks:,}")
    if audit.looked_at_again:
        lines.append(f"blocks looked at again, because the index is in use or differs: {audit.looked_at_again:,}")
    _say(console, lines)
    if not audit.counts:
        _say(console, ["no differences"])
        return
    for kind, count in audit.counts.items():
        _say(console, [f"{kind}: {count:,} ({KINDS[kind]})"])
        _say(
            console,
            (f"  {one.where}" + (f": {one.detail}" if one.detail else "") for one in audit.listed if one.kind == kind),
        )
    hidden = sum(audit.counts.values()) - len(audit.listed)
    if hidden:
        _say(console, [f"{hidden:,} more are counted and not listed"])


def show_cleared(cleared: Sequence[Cleared], *, console: Console) -> None:
    """Print which streams were cleared."""
    for one in cleared:
        what = f"{one.owner} replays it" if one.owner else "nobody follows it, so it stays empty"
        _say(console, [f"{one.stream}: its blocks are hidden, epoch {one.epoch} has begun; {what}"])
    if not cleared:
        _say(console, ["nothing to clear: the source has vanished meanwhile"])


def _table(*left: str, right: Sequence[str], end: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for heading in left:
        table.add_column(heading, no_wrap=heading != "source", overflow="fold")
    for heading in right:
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in end:
        table.add_column(heading, no_wrap=True)
    return table


def _say(console: Console, lines: Iterable[str]) -> None:
    for line in lines:
        console.print(_text(line))


def _text(text: str) -> Text:
    return Text(printable(text))


def _source(endpoint: str, dp_rank: int) -> str:
    return f"{endpoint}#{dp_rank}"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if abs(seconds) < 1:
        return f"{seconds * 1000:.0f}ms"
    if abs(seconds) < 100:
        return f"{seconds:.1f}s"
    return f"{seconds / 60:.0f}min" if seconds < 7200 else f"{seconds / 3600:.0f}h"


def _bytes(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1024 and unit < len(UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {UNITS[unit]}" if unit else f"{count} B"


def _by_owner(lines: Iterable[SourceLine]) -> dict[str, list[str]]:
    followed: dict[str, list[str]] = {}
    for line in lines:
        sources = followed.setdefault(line.owner, [])
        if _source(line.endpoint, line.dp_rank) not in sources:
            sources.append(_source(line.endpoint, line.dp_rank))
    return dict(sorted(followed.items()))
