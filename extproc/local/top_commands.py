"""The command `kvmesh top`: what a running cluster does, live in the terminal. Imports late."""

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated

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
    url: Annotated[
        list[str] | None,
        typer.Option(
            help="The picker's admin address; once for each replica, or separated by commas. Default: "
            "http://127.0.0.1:9090."
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
    urls, console = replica_urls(url), Console(file=standard_output())
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
    # a SIGINT at the moment at which asyncio begins to handle it cancels the task, and no KeyboardInterrupt follows
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        if json:
            asyncio.run(top_view.follow(urls, pool=chosen, login=login, show=top_view.show_json(console)))
        elif not console.is_terminal or console.is_dumb_terminal:  # that can draw nothing over what is there
            lines = top_view.show_lines(console, zone=local_zone())
            asyncio.run(top_view.follow(urls, pool=chosen, login=login, show=lines))
        else:
            with Live(console=console, auto_refresh=False, screen=True) as live:
                pages = top_view.show_pages(live, zone=local_zone())
                asyncio.run(top_view.follow(urls, pool=chosen, login=login, show=pages))


def replica_urls(given: Sequence[str] | None) -> list[str]:
    """Return the addresses without trailing slashes, each once."""
    values = given or ["http://127.0.0.1:9090"]
    every = [url.strip().rstrip("/") for value in values for url in value.split(",")]
    named = [url if "://" in url else f"http://{url}" for url in every if url]
    return list(dict.fromkeys(named))
