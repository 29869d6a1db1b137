"""The command `kvmesh top`: what a running cluster does, live in the terminal. Imports late."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Coroutine, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import WIDE_ENOUGH, AsJson, Output, OutputForm, chosen_form, print_data
from kvmesh.output.missed_reader import reader_missed
from kvmesh.output.standard_output import CLOSED_PIPE

if TYPE_CHECKING:
    from rich.console import Console

    from extproc.local.top_view import Show

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
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
) -> None:
    """Show pods, classes and the last decisions of a running cluster; several replicas are added up."""
    from rich.console import Console

    from extproc.errors import ConfigError
    from extproc.local import top_view
    from extproc.local.unread_terminal import standard_output
    from extproc.pools.pool_hosts import only_pool

    form = chosen_form(output, json=json)
    top_view.write_anything(sys.stdout)
    console = Console(file=standard_output())
    try:
        asked = _Asked(urls=replica_urls(picker), pool=only_pool(pool), login=login)
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if once:
        _show_once(asked, console, form)
    else:
        _follow(asked, console, form)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """Whom to ask, and for what."""

    urls: Sequence[str]
    pool: str | None
    login: AdminLogin


def _show_once(asked: _Asked, console: "Console", form: OutputForm) -> None:
    """Show it once; exit code 1 where no replica answers."""
    from rich.console import Console

    from extproc.local import top_view
    from extproc.local.live_view import local_zone

    replicas = asyncio.run(top_view.look_once(asked.urls, pool=asked.pool, login=asked.login))
    state, now = top_view.added_up(replicas), time.monotonic()
    if form is OutputForm.TABLE:
        height = console.size.height if console.is_terminal else 10_000
        width = console.size.width if console.is_terminal else WIDE_ENOUGH
        page = top_view.top_page(replicas, state, now=now, zone=local_zone(), width=width, height=height)
        Console(width=width, file=console.file).print(page)
    else:
        print_data(top_view.as_data(replicas, state, now=now), form)
    if state is None:
        unknown_pool = asked.pool is not None and all("status 404" in (each.problem or "") for each in replicas)
        raise typer.Exit(2 if unknown_pool else 1)


def _follow(asked: _Asked, console: "Console", form: OutputForm) -> None:
    """Show it until it is ended: by a signal, or by a key."""
    from rich.live import Live

    from extproc.local import top_view
    from extproc.local.live_view import local_zone
    from extproc.local.terminal_keys import can_read_keys, keys_heard, single_keys

    view = _UntilEnded()  # from here on: the first thing drawn may be answered with Ctrl-C

    def following(show: "Show") -> Coroutine[Any, Any, None]:
        return top_view.follow(asked.urls, pool=asked.pool, login=asked.login, show=show)

    if form is not OutputForm.TABLE:
        view.run(following(top_view.show_data(console, form)), to=console.file)
    elif not console.is_terminal or console.is_dumb_terminal:  # that can draw nothing over what is there
        view.run(following(top_view.show_lines(console, zone=local_zone())), to=console.file)
    else:
        hears_keys = can_read_keys()
        quiet = single_keys() if hears_keys else nullcontext()
        with quiet, Live(console=console, auto_refresh=False, screen=True) as live:
            screen = top_view.TopScreen(live, hears_keys=hears_keys, zone=local_zone())

            def press(key: str) -> None:
                screen.press(key)
                if screen.choice.has_quit:
                    view.end()

            async def until_quit() -> None:
                with keys_heard(press) if hears_keys else nullcontext():
                    await following(screen.show)

            view.run(until_quit(), to=console.file)
    view.end_as_asked()


class _UntilEnded:
    """Ends work quietly where its reader is gone, and at SIGINT or SIGTERM, at whatever moment one comes.

    So the terminal is left as it was.

    `asyncio.run` handles SIGINT only once its loop runs: before, it breaks the loop's making with a traceback, or is
    lost.
    """

    def __init__(self) -> None:
        self._has_come: int | None = None
        self._is_unread = False
        self._task: asyncio.Task[None] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def run(self, work: Coroutine[Any, Any, None], *, to: IO[str]) -> None:
        """Run it until it ends, or is ended, or nobody can read any more what it writes `to`."""
        asyncio.run(self._run(work, to))

    def end(self) -> None:
        """End what runs."""
        if self._task is not None:
            self._task.cancel()

    def end_as_asked(self) -> None:
        """Die of SIGTERM where that came: who sent it may look at how the process has ended. So for a closed pipe."""
        if self._is_unread:
            raise typer.Exit(CLOSED_PIPE)
        if self._has_come == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _note(self, number: int, *_: object) -> None:
        self._has_come = number
        self.end()

    def _miss_reader(self) -> None:
        self._is_unread = True
        self.end()

    async def _run(self, work: Coroutine[Any, Any, None], to: IO[str]) -> None:
        self._task = asyncio.create_task(work, name="follow the replicas")
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._note, number)
        if self._has_come is not None:
            self._task.cancel()
        with suppress(asyncio.CancelledError), reader_missed(to, self._miss_reader):
            await self._task


def replica_urls(given: Sequence[str] | None) -> list[str]:
    """Return the addresses without trailing slashes, each once."""
    values = given or ["http://127.0.0.1:9090"]
    every = [url.strip().rstrip("/") for value in values for url in value.split(",")]
    named = [url if "://" in url else f"http://{url}" for url in every if url]
    return list(dict.fromkeys(named))
