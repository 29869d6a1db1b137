"""The command `kvmesh top`: what a running cluster does, live in the terminal. Imports late."""

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings

app = typer.Typer(add_completion=False)


@app.callback()
def _group() -> None:
    """Keep `top` a subcommand when this app runs alone."""


@app.command("top")
@takes_settings
def top(
    login: AdminLogin,
    picker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Admin address of a running picker; once for each replica, or separated by commas. Default: "
            "http://127.0.0.1:9090.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(help="Pool to show, as NAMESPACE/NAME, where there are several. Default: all in short."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Show it once and end; exit code 1 where no replica answers.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one document a line and second.")] = False,
) -> None:
    """Show pods, classes and the last decisions of a running cluster; several replicas are added up."""
    from rich.console import Console
    from rich.live import Live

    from extproc.errors import ConfigError
    from extproc.local import top_view
    from extproc.local.live_view import local_zone
    from extproc.local.unread_terminal import standard_output
    from extproc.pools.pool_hosts import only_pool

    top_view.write_anything(sys.stdout)
    urls, console = replica_urls(picker), Console(file=standard_output())
    try:
        chosen = only_pool(pool)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if once:
        replicas = asyncio.run(top_view.look_once(urls, pool=chosen, login=login))
        state, now = top_view.added_up(replicas), time.monotonic()
        if json:
            typer.echo(top_view.as_json(replicas, state, now=now).decode())
        else:
            height = console.size.height if console.is_terminal else 10_000
            zone = local_zone()
            width = console.size.width if console.is_terminal else 200
            Console(width=width, file=console.file).print(
                top_view.top_page(replicas, state, now=now, zone=zone, width=width, height=height)
            )
        if state is None:
            raise typer.Exit(1)
        return
    view = _UntilInterrupted()  # from here on: the first thing drawn may be answered with Ctrl-C
    if json:
        view.run(top_view.follow(urls, pool=chosen, login=login, show=top_view.show_json(console)))
    elif not console.is_terminal or console.is_dumb_terminal:  # that can draw nothing over what is there
        lines = top_view.show_lines(console, zone=local_zone())
        view.run(top_view.follow(urls, pool=chosen, login=login, show=lines))
    else:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            pages = top_view.show_pages(live, zone=local_zone())
            view.run(top_view.follow(urls, pool=chosen, login=login, show=pages))


class _UntilInterrupted:
    """Ends work quietly at SIGINT, at whatever moment it comes.

    `asyncio.run` handles one only once its loop runs: before, it breaks the loop's making with a traceback, or is lost.
    """

    def __init__(self) -> None:
        self._has_come = False
        signal.signal(signal.SIGINT, self._note)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it until it ends or SIGINT comes."""
        asyncio.run(self._run(work))

    def _note(self, *_: object) -> None:
        self._has_come = True

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="follow the replicas")
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        if self._has_come:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def replica_urls(given: Sequence[str] | None) -> list[str]:
    """Return the addresses without trailing slashes, each once."""
    values = given or ["http://127.0.0.1:9090"]
    every = [url.strip().rstrip("/") for value in values for url in value.split(",")]
    named = [url if "://" in url else f"http://{url}" for url in every if url]
    return list(dict.fromkeys(named))
