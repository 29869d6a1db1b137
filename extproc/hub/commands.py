"""The commands `kvmesh models fetch` and `kvmesh models list`. They import late, to start fast."""

import os
import resource
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from extproc.errors import ConfigError
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, print_data

if TYPE_CHECKING:
    from extproc.hub.fetch import Fetched

FAILURE = 1
SUMMARY_BYTES = 4096  # what Kubernetes keeps of a container's last words

app = typer.Typer()
models = typer.Typer(no_args_is_help=True, help="Tokenizer folders of models.")
app.add_typer(models, name="models", help="Tokenizer folders of models.")


@models.command("fetch")
def fetch_models(
    model: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]MODEL[@REVISION]…",
            help="Models of the hub; NAME where the pods serve it under another one.",
        ),
    ],
    tokenizers: Annotated[
        Path,
        typer.Option(metavar="FOLDER", file_okay=False, help="Cache: the folder, as pickers have it."),
    ],
    hub_endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Hub or mirror. Default: $HF_ENDPOINT, else https://huggingface.co."),
    ] = None,
    hub_token_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="File with the token for the hub. Default: $HF_TOKEN, if any."),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Ask which commit a branch or tag is now. Default: the one of the first time."),
    ] = False,
    offline: Annotated[
        bool, typer.Option("--offline", help="Check what is there and ask no hub, as $HF_HUB_OFFLINE=1 does.")
    ] = False,
    timeout_seconds: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds for each model, tries included: several take as much one after another."),
    ] = 120,
    best_effort: Annotated[
        bool,
        typer.Option("--best-effort", help="Exit with 0 where a model cannot be had: the pods are asked instead."),
    ] = False,
    summary_file: Annotated[
        Path | None, typer.Option(help="File for what became of the models, such as /dev/termination-log.")
    ] = None,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
) -> None:
    """Fetch the tokenizer files of models, never weights or code, into FOLDER/NAME, whole or not at all.

    What is there is checked by its checksums and kept, at the commit of the first time. The exit code is 1 where a
    model could not be had.
    """
    from extproc.hub.fetch import Fetched, Outcome, fetch
    from extproc.hub.hub import PUBLIC_HUB, Hub
    from extproc.hub.wanted_models import check_endpoint, parse_all

    form = chosen_form(output, json=json)
    wanted = parse_all(model)
    endpoint = check_endpoint(hub_endpoint or os.environ.get("HF_ENDPOINT") or PUBLIC_HUB)
    token = _token(hub_token_file)
    is_offline = offline or os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
    os.umask(0o002)  # a cache is shared by processes of one group
    found = []
    for each in wanted:
        try:
            with _limits():
                done = fetch(
                    each,
                    tokenizers,
                    hub=lambda: Hub(endpoint, token=token),
                    renew=renew,
                    offline=is_offline,
                    timeout_seconds=timeout_seconds,
                )
        except Exception as error:  # a defect: a picker that waits for this must start all the same
            if not best_effort:
                raise
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            done = Fetched(
                model=each, folder=each.folder(tokenizers), outcome=Outcome.FAILED, record=None, reason=reason
            )
        found.append(done)
        if form is OutputForm.TABLE:
            typer.echo(found[-1].line(), err=found[-1].outcome is Outcome.FAILED)
    if form is not OutputForm.TABLE:
        print_data([each.as_json() for each in found], form)
    if summary_file is not None:
        _summarize(found, summary_file)
    if any(each.outcome is Outcome.FAILED for each in found) and not best_effort:
        raise typer.Exit(FAILURE)


@models.command("list")
def list_models(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", exists=True, file_okay=False, help="The cache.")],
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
) -> None:
    """Show which models a picker finds in FOLDER, and whether what was fetched is whole. Exit code 1: it is not."""
    from extproc.hub.kept_folder import as_json, damage, kept_models

    form = chosen_form(output, json=json)
    rows: list[dict[str, Any]] = []
    for name, path, record in kept_models(folder):
        wrong = damage(path, record) if record is not None else []
        state = "damaged" if wrong else "whole" if record is not None else "not fetched by kvmesh: not checked"
        rows.append({"model": name, "state": state, "damage": wrong})
        if record is not None:
            rows[-1]["fetched"] = as_json(record)
    if form is not OutputForm.TABLE:
        print_data(rows, form)
    else:
        for row in rows:
            fetched = row.get("fetched")
            source = f" ({fetched['repository']} at {fetched['commit'][:12]})" if fetched else ""
            typer.echo(f"{row['model']}{source}: {'; '.join([row['state'], *row['damage']])}")
        if not rows:
            typer.echo(f"no tokenizer folders in {folder}")
    if any(row["damage"] for row in rows):
        raise typer.Exit(FAILURE)


@contextmanager
def _limits() -> Iterator[None]:
    """Write no file above the limit, whatever a hub sends, and clean up on SIGTERM, which process 1 would ignore."""
    from extproc.hub.hub import MOST_FILE_BYTES

    def end(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGTERM, end)
    if soft == resource.RLIM_INFINITY or soft > MOST_FILE_BYTES:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGTERM, before)


def _token(file: Path | None) -> str | None:
    text = os.environ.get("HF_TOKEN", "") if file is None else file.read_text(encoding="utf-8", errors="replace")
    token = text.strip()
    if token and not (token.isascii() and token.isprintable()):
        raise ConfigError(f"{'HF_TOKEN' if file is None else file}: this is no token: it has characters that none has")
    return token or None


def _summarize(found: "list[Fetched]", file: Path) -> None:
    text = "\n".join(each.line() for each in found)
    try:
        file.write_text(text.encode()[:SUMMARY_BYTES].decode(errors="ignore"), encoding="utf-8")
    except OSError as error:
        typer.echo(f"warning: {file} cannot be written: {error.strerror}", err=True)
