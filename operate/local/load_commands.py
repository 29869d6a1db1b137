"""The command `kvmesh load`: sends a load to a server and reports latency and hits. Imports late."""

import re
import secrets
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from extproc.errors import ConfigError
from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm
from kvmesh.pods.pod_access import PodAccess
from operate.load.plan import Load, LoadSize, bursts, questions, replay
from operate.load.trace import read_requests
from operate.local.stack_settings import seconds_of

app = typer.Typer(add_completion=False)

LONGEST_LINE = 1 << 26
HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


class LoadKind(StrEnum):
    """The workload."""

    QUESTIONS = "questions"
    BURST = "burst"
    TRACE = "trace"


@app.command("load")
@takes_settings
def load(
    access: PodAccess,
    kind: Annotated[
        LoadKind,
        typer.Argument(
            help="questions: chats with several rounds and one system prompt; burst: many requests at once about new "
            "documents; trace: recorded requests of FILE."
        ),
    ] = LoadKind.QUESTIONS,
    file: Annotated[
        Path | None,
        typer.Argument(
            help="For trace: a Mooncake trace, or JSON lines of bodies (messages or prompt), optionally with `at` in "
            "seconds."
        ),
    ] = None,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Server with the OpenAI API, without /v1. Default: the gateway of `kvmesh up`, else "
            "http://127.0.0.1:10000.",
        ),
    ] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="round-robin|URL",
            help="Repeat the load for comparison: directly at the pods in turn, or at another server.",
        ),
    ] = None,
    endpoints: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT,…", help="Pods for round-robin. Default: those of `kvmesh up`."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model name. Default: the server's first.")] = None,
    rate: Annotated[
        float | None,
        typer.Option(min=0.01, max=100_000, help="Requests per second. Default: 8; for a trace, as recorded."),
    ] = None,
    duration: Annotated[
        str | None, typer.Option(help="How long requests are sent, like 20s. Default: 20s; of a trace, all of it.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same requests at the same times.")] = 0,
    users: Annotated[int, typer.Option(min=1, max=100_000, help="questions: number of users.")] = 24,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="questions: of a user's history; burst: of a document; about.")
    ] = 2600,
    answer_tokens: Annotated[int, typer.Option(min=1, max=100_000, help="Maximum tokens of an answer.")] = 24,
    shrink: Annotated[
        int, typer.Option(min=1, max=512, help="trace: divisor of a Mooncake trace's tokens, for small pods.")
    ] = 1,
    header: Annotated[
        list[str] | None, typer.Option(metavar="NAME:VALUE", help="Header of each request; repeat for more.")
    ] = None,
    output: Output = OutputForm.TABLE,
) -> None:
    """Send requests to a server at a fixed rate; show latency, hits and failures, optionally versus round robin.

    Exit code 0: all were answered; 1: some were not; 130: Ctrl-C, after a report of the results so far.
    """
    from operate.local.run_load import Wanted, run_load

    size = LoadSize(
        rate=rate,
        seconds=None if duration is None else seconds_of(duration, flag="--duration"),
        seed=seed,
        users=users,
        prompt_tokens=prompt_tokens,
        answer_tokens=answer_tokens,
        shrink=shrink,
    )
    planned = _planned(kind, file, size)
    wanted = Wanted(server=server, beside=beside, endpoints=endpoints, model=model, access=access)
    code = run_load(
        planned,
        wanted,
        headers=_headers(header or ()),
        salt=secrets.token_hex(8),
        seed=seed,
        output=output,
    )
    if code:
        raise typer.Exit(code)


def _planned(kind: LoadKind, file: Path | None, size: LoadSize) -> Load:
    if (file is None) == (kind is LoadKind.TRACE):
        raise ConfigError("`kvmesh load trace FILE` needs a file" if file is None else f"{kind} takes no file: {file}")
    if kind is LoadKind.QUESTIONS:
        return questions(size)
    if kind is LoadKind.BURST or file is None:
        return bursts(size)
    try:
        with file.open("rb") as opened:
            lines = iter(lambda: opened.readline(LONGEST_LINE), b"")  # bounded for files without newlines
            requests = read_requests(lines, where=str(file))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    return replay(requests, size, name=file.name)


def _headers(given: Sequence[str]) -> dict[str, str]:
    headers = {}
    for line in given:
        name, colon, value = line.partition(":")
        if not colon or not HEADER_NAME.fullmatch(name) or not value.strip().isprintable():
            raise ConfigError(f"--header {line!r}: NAME:VALUE is needed")
        headers[name.lower()] = value.strip()
    return headers
