"""The commands `kvmesh index …` that look into Redis. Imports late, to start fast.

`kvmesh index lookup` belongs to the same group and comes from the picker's package, which has the tokenizer.
Exit codes: 0; 1 for a failure, or for differences that `verify` has found; 2 for wrong usage, and for a `verify` that
could not be made.
"""

from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.options import takes_settings
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, people_console, print_data
from kvmesh.redis.address import RedisAccess

if TYPE_CHECKING:
    from kv_indexer.inspect.redis_inspect import RedisInspector

FAILURE, WRONG_USAGE = 1, 2
TimeoutMs = Annotated[float, typer.Option(min=1, help="Milliseconds to wait for each answer of Redis.")]

app = typer.Typer()
index = typer.Typer()
app.add_typer(index, name="index", help="Look into the prefix index in Redis, check it, begin a source anew.")


@index.command("sources")
@takes_settings
def sources(
    access: RedisAccess,
    interval_ms: Annotated[
        float,
        typer.Option(min=0, max=60_000, help="Milliseconds between the two looks that events/s needs; 0: one look."),
    ] = 1000,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: TimeoutMs = 5000,
) -> None:
    """Show every source: state, epoch, sequence, lag, blocks, events/s, and who follows it."""
    from kv_indexer.inspect.index_pages import show_sources
    from kv_indexer.inspect.inspect_index import inspect_sources
    from kvmesh.index.redis_findings import RedisFindings

    async def look(inspector: "RedisInspector") -> Any:
        shared = RedisFindings(url=access, timeout_seconds=timeout_ms / 1000)
        try:
            return await inspect_sources(inspector, findings=shared.read, interval_seconds=interval_ms / 1000)
        finally:
            await shared.close()

    form = chosen_form(output, json=json)
    report = _ask("sources", access, look, timeout_ms=timeout_ms)
    _print(report, form, show=show_sources)


@index.command("verify")
@takes_settings
def verify(
    access: RedisAccess,
    listed: Annotated[int, typer.Option(min=0, help="Differences to list; all are counted.")] = 100,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: TimeoutMs = 5000,
) -> None:
    """Recount the index from raw keys, and list what contradicts itself; safe while it is in use.

    Exit code 0: no differences; 1: differences; 2: it could not be verified.
    """
    from kv_indexer.inspect.index_pages import show_audit
    from kv_indexer.inspect.verify_index import IndexVerifier

    async def recount(inspector: "RedisInspector") -> Any:
        return await IndexVerifier(inspector, listed=listed, progress=_tell).verify()

    form = chosen_form(output, json=json)
    audit = _ask("verify", access, recount, timeout_ms=timeout_ms, failure=WRONG_USAGE)
    _print(audit, form, show=show_audit)
    if audit.counts:
        raise typer.Exit(FAILURE)


@index.command("size")
@takes_settings
def size(
    access: RedisAccess,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: TimeoutMs = 5000,
) -> None:
    """Show what each source takes in Redis: estimated from samples, and by the formula of docs/reference/redis.md."""
    from kv_indexer.inspect.index_pages import show_sizes
    from kv_indexer.inspect.inspect_index import inspect_sizes

    form = chosen_form(output, json=json)
    report = _ask("size", access, inspect_sizes, timeout_ms=timeout_ms)
    _print(report, form, show=show_sizes)


@index.command("clear")
@takes_settings
def clear(
    access: RedisAccess,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="HOST:PORT#RANK, or HOST:PORT for all its ranks.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: TimeoutMs = 5000,
) -> None:
    """Hide all blocks of a source at once, and have the indexer that follows it replay its events."""
    from kv_indexer.inspect.index_pages import show_cleared
    from kv_indexer.inspect.inspect_index import clear_sources, find_targets

    form = chosen_form(output, json=json)
    targets = _ask("clear", access, lambda inspector: find_targets(inspector, source), timeout_ms=timeout_ms)
    if not yes:
        named = ", ".join(f"{target.stream} ({target.blocks:,} blocks)" for target in targets)
        typer.confirm(f"Clear {named}? Requests miss its cache until it is replayed", abort=True, err=True)
    cleared = _ask("clear", access, lambda inspector: clear_sources(inspector, targets), timeout_ms=timeout_ms)
    if form is OutputForm.TABLE:
        show_cleared(cleared, console=people_console())
    else:
        print_data({"cleared": [asdict(one) for one in cleared]}, form)


def _ask(
    command: str,
    access: RedisAccess,
    question: "Callable[[RedisInspector], Coroutine[Any, Any, Any]]",
    *,
    timeout_ms: float,
    failure: int = FAILURE,
) -> Any:
    """Ask Redis; end with one line on stderr and the right exit code if that fails."""
    import asyncio

    from kv_indexer.inspect.redis_inspect import RedisInspector
    from kvmesh.errors import KvIndexerError, SettingError, UnknownSourceError

    async def ask() -> Any:
        inspector = RedisInspector(access, timeout_seconds=timeout_ms / 1000)
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
    import sys

    if sys.stderr.isatty():
        typer.echo(progress, err=True)


def _print(report: Any, form: OutputForm, *, show: Callable[..., None]) -> None:
    if form is OutputForm.TABLE:
        show(report, console=people_console())
    else:
        print_data(asdict(report), form)
