"""The command `kvmesh load`: asks a server many questions, and says how it answered. Imports late."""

import asyncio
import re
import secrets
import signal
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm, people_console, print_data
from kvmesh.pods.pod_access import PodAccess

if TYPE_CHECKING:
    from extproc.load.plan import Load, LoadSize
    from extproc.load.play import Arm
    from extproc.load.report import LoadReport

app = typer.Typer(add_completion=False)

LONGEST_LINE = 1 << 26
INTERRUPTED = 130  # as a shell has it for SIGINT
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class LoadKind(StrEnum):
    """What is asked."""

    QUESTIONS = "questions"
    BURST = "burst"
    TRACE = "trace"


@app.callback()
def _group() -> None:
    """Keep `load` a subcommand when this app runs alone."""


@app.command("load")
@takes_settings
def load(
    access: PodAccess,
    kind: Annotated[
        LoadKind,
        typer.Argument(
            help="questions: chats of several rounds below one system prompt; burst: many at once about new documents; "
            "trace: recorded requests of FILE."
        ),
    ] = LoadKind.QUESTIONS,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="Of trace: a Mooncake trace, or JSON lines with bodies (messages or prompt) and perhaps `at` in "
            "seconds."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Any server with the OpenAI API, without /v1. Default: the gateway of the running `kvmesh up`, else "
            "http://127.0.0.1:10000.",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="round-robin|URL",
            help="Then play the same load there, for comparison: at the pods in turn, without any router, or at "
            "another server.",
        ),
    ] = None,
    endpoints: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,…", help="Pods of round-robin. Default: those of the running `kvmesh up`."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model to ask for. Default: the first that the server names.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=100_000, help="Requests a second. Default: 8; of a trace, as recorded."),
    ] = None,
    duration: Annotated[
        str | None,
        typer.Option(help="How long requests are sent, like 20s. Default: 20s; of a trace, all of it."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests at the same times.")] = 0,
    users: Annotated[int, typer.Option(min=1, max=100_000, help="questions: users that take turns.")] = 24,
    prompt_tokens: Annotated[
        int,
        typer.Option(min=1, max=1_000_000, help="questions: of a user's history; burst: of a document; about."),
    ] = 2600,
    answer_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Most tokens of an answer.")] = 24,
    shrink: Annotated[
        int, typer.Option(min=1, max=512, help="trace: what a Mooncake trace's tokens are divided by, for small pods.")
    ] = 1,
    salt: Annotated[
        str | None,
        typer.Option(
            help="Makes the first words of each prompt. Default: by chance, so that no cache holds anything before."
        ),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header of each request; repeated for more.")
    ] = None,
    request_timeout: Annotated[
        str, typer.Option(metavar="DURATION", help="An answer that is not whole by then has failed.")
    ] = "60s",
    output: Output = OutputForm.TABLE,
) -> None:
    """Ask a server at a rate, however it answers, and show latency, hits and failures; beside round robin, if asked.

    Ends with 0 if all were answered, 1 if not, and 130 after Ctrl-C, which shows what came so far.
    """
    from extproc.load.plan import LoadSize
    from extproc.load.report import LoadReport
    from extproc.local.load_targets import Wanted, choose_arms
    from extproc.local.plan_view import seconds_of

    size = LoadSize(
        rate=rate,
        seconds=None if duration is None else seconds_of(duration, flag="--duration"),
        seed=seed,
        users=users,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        shrink=shrink,
    )
    request_seconds = seconds_of(request_timeout, flag="--request-timeout")
    planned = _planned(kind, file, size)
    wanted = Wanted(server=server, beside=beside, endpoints=endpoints, model=model, access=access)
    arms = choose_arms(wanted, headers=_headers(header or ()), salt=salt or secrets.token_hex(8))
    played = asyncio.run(_play(planned, arms, request_seconds=request_seconds))
    report = LoadReport(load=planned.title, seed=seed, **played)
    _show(report, output)
    if not report.is_all_answered:
        raise typer.Exit(INTERRUPTED if report.interrupted else 1)


def _planned(kind: LoadKind, file: Path | None, size: "LoadSize") -> "Load":
    from extproc.errors import ConfigError
    from extproc.load.plan import bursts, questions, replay
    from extproc.load.trace import read_requests

    if (file is None) == (kind is LoadKind.TRACE):
        raise ConfigError("`kvmesh load trace FILE` needs a file" if file is None else f"{kind} takes no file: {file}")
    if kind is LoadKind.QUESTIONS:
        return questions(size)
    if kind is LoadKind.BURST or file is None:
        return bursts(size)
    try:
        with file.open("rb") as opened:
            lines = iter(lambda: opened.readline(LONGEST_LINE), b"")  # what has no lines is not read to its end
            requests = read_requests(lines, where=str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    return replay(requests, size, name=file.name)


def _headers(given: Sequence[str]) -> dict[str, str]:
    from extproc.errors import ConfigError

    headers = {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name) or not value.strip().isprintable():
            raise ConfigError(f"--header {line!r}: NAME:VALUE is needed")
        headers[name.lower()] = value.strip()
    return headers


async def _play(load: "Load", arms: "Sequence[Arm]", *, request_seconds: float) -> dict[str, Any]:
    from rich.console import Console
    from rich.status import Status

    from extproc.load.play import play, with_model

    stop, console = asyncio.Event(), Console(stderr=True)
    arms = await with_model(arms)  # before that there is nothing to show: Ctrl-C just ends it
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    status = Status("", console=console)
    if console.is_terminal:
        status.start()
    try:
        summaries = await play(load, arms, request_seconds=request_seconds, tell=status.update, stop=stop)
    finally:
        status.stop()
    return {"model": arms[0].target.model, "interrupted": stop.is_set(), "arms": summaries}


def _show(report: "LoadReport", output: OutputForm) -> None:
    from extproc.load.report import shown

    if output is OutputForm.TABLE:
        people_console().print(shown(report))
    else:
        print_data(report, output)
