"""The commands `kvmesh policy explain` and `kvmesh policy check`. Imports late, to start fast."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from extproc.errors import ConfigError, KvmeshError
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, people_console, print_data

if TYPE_CHECKING:
    from kvmesh.documents.documents import Snapshot

FAILURE, WRONG_USAGE = 1, 2

app = typer.Typer()
policy = typer.Typer(no_args_is_help=True, help="What InferencePolicies come to.")
app.add_typer(policy, name="policy", help="What InferencePolicies come to.")


@policy.command("explain")
@takes_settings
def explain(
    login: AdminLogin,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="A pool as namespace/name; Kind/namespace/name (InferencePool, Service, HTTPRoute, Gateway, "
            "InferencePolicy); a namespace. Left out: an overview.",
        ),
    ] = None,
    picker: Annotated[
        str, typer.Option(metavar="URL", help="Admin address of a running picker.")
    ] = "http://127.0.0.1:9090",
    policies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Folder of YAML or JSON documents to merge here, in place of asking a picker.",
        ),
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option(help="Read the documents from the cluster of KUBECONFIG, in place of asking a picker.")
    ] = False,
    root_namespace: Annotated[
        str,
        typer.Option(
            help="With --policies or --kubernetes: namespace whose policies without targetRefs are mesh-wide."
        ),
    ] = "istio-system",
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    timeout_ms: Annotated[
        float, typer.Option(min=1, help="Milliseconds to wait for the picker, folder or cluster.")
    ] = 5000,
) -> None:
    """Show the merged policy of each pool that TARGET leads to, with the origin of each field.

    The exit code is 1 where some policy is not in force, something else is wrong, or the target is not there.
    """
    from extproc.policy.view import ask_picker, explain_snapshot, is_all_in_force, render, render_overview

    form = chosen_form(output, json=json)
    try:
        if policies is not None or kubernetes:
            snapshot = _snapshot(policies, timeout_seconds=timeout_ms / 1000)
            answer = explain_snapshot(snapshot, target, root_namespace=root_namespace, now=datetime.now(UTC))
        else:
            answer = asyncio.run(ask_picker(picker, target, timeout_seconds=timeout_ms / 1000, login=login))
    except KvmeshError as error:
        _fail("explain", error)
    if form is OutputForm.TABLE:
        (render if target else render_overview)(answer, console=people_console())
    else:
        print_data(answer, form)
    if not is_all_in_force(answer):
        raise typer.Exit(FAILURE)


@policy.command("check")
def check(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE…", exists=True, dir_okay=False, help="YAML or JSON files.")
    ],
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
) -> None:
    """Read policies as the picker does, and say what is wrong (exit code 1) or doubtful (0), with the field's path.

    Each document is judged by itself; whether they agree is what `explain --policies` shows.
    """
    from extproc.policy.view import check_files
    from kvmesh.plain_text import printable

    form = chosen_form(output, json=json)
    found = list(check_files(files))
    if form is not OutputForm.TABLE:
        print_data(found, form)
    else:
        for verdict in found:
            name = " ".join(part for part in (verdict["file"], verdict["document"]) if part)
            lines = [f"ERROR {verdict['error']}"] if verdict["error"] else ["ok"]
            for line in [*lines, *(f"warning {warning}" for warning in verdict["warnings"])]:
                typer.echo(printable(f"{name}: {line}"))
        if not found:
            typer.echo("no policies in these files")
    if any(verdict["error"] for verdict in found):
        raise typer.Exit(FAILURE)


def _snapshot(folder: Path | None, *, timeout_seconds: float) -> "Snapshot":
    from extproc.policy.view import first_snapshot
    from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
    from kvmesh.documents.sources import FolderSource, kubernetes_source

    source = kubernetes_source(ClusterAccess(program="kvmesh-policy")) if folder is None else FolderSource(folder)
    try:
        return asyncio.run(first_snapshot(source, timeout_seconds=timeout_seconds))
    except KubernetesConfigError as error:
        raise ConfigError(str(error)) from error


def _fail(command: str, error: KvmeshError) -> NoReturn:
    print(f"kvmesh policy {command}: {error}", file=sys.stderr)  # noqa: T201
    raise typer.Exit(WRONG_USAGE if isinstance(error, ConfigError) else FAILURE) from None
