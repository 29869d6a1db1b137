"""The command `kvmesh top`: live view of a running cluster. Imports late."""

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm
from operate.local.unread_terminal import UntilEnded
from operate.options import only_pool

app = typer.Typer(add_completion=False)


class SortBy(StrEnum):
    """The numeric columns of the pod table."""

    BLOCKS = "blocks"
    RUN = "run"
    WAIT = "wait"
    KV = "kv"
    HITS = "hits"
    PICKS = "picks"


@app.command("top")
@takes_settings
def top(
    login: AdminLogin,
    picker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="Admin address of a picker; repeat for more replicas, or separate them by commas. Default: "
            "http://127.0.0.1:9090.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(help="Pool to show, as NAMESPACE/NAME. Default: a line for each."),
    ] = None,
    sort: Annotated[
        SortBy | None, typer.Option(help="Sort column of the pods, descending. Default: as configured.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print once and exit; exit code 1 if no replica answers.")
    ] = False,
    output: Output = OutputForm.TABLE,
) -> None:
    """Show pods, classes and the last decisions of a running cluster, summed over replicas."""
    from operate.local import top_view

    asked_pool = only_pool(pool)
    top_view.write_anything(sys.stdout)
    urls, console = replica_urls(picker), top_view.view_console()
    if once:
        if code := top_view.print_once(urls, console, pool=asked_pool, login=login, form=output, sort_by=sort):
            raise typer.Exit(code)
        return
    view = UntilEnded()  # before the first drawing, to which the user may respond with Ctrl-C
    if output is OutputForm.TABLE:
        look = top_view.Look(sort_by=sort)
        work = top_view.show_live(urls, pool=asked_pool, login=login, console=console, look=look)
    else:
        work = top_view.follow(urls, pool=asked_pool, login=login, show=top_view.show_data(console, output))
    view.run(work, to=console.file)
    if (exit_code := view.exit_code()) is not None:
        raise typer.Exit(exit_code)


def replica_urls(given: Sequence[str] | None) -> list[str]:
    """Return the distinct URLs, with a scheme and without trailing slashes."""
    values = given or ["http://127.0.0.1:9090"]
    every = [url.strip().rstrip("/") for value in values for url in value.split(",")]
    named = [url if "://" in url else f"http://{url}" for url in every if url]
    return list(dict.fromkeys(named))
