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


def _existing(files: list[Path]) -> list[Path]:
    for file in files:
        if str(file) != "-" and not file.exists():
            raise typer.BadParameter(f"{str(file)!r} does not exist")
    return files


@policy.command("explain")
@takes_settings
def explain(
    context: typer.Context,
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
    resource: Annotated[
        bool,
        typer.Option(
            "--resource",
            help="Print each pool's merged policy as one InferencePolicy in YAML, to be applied; comments say "
            "where each field is from.",
        ),
    ] = False,
    timeout_ms: Annotated[
        float, typer.Option(min=1, help="Milliseconds to wait for the picker, folder or cluster.")
    ] = 5000,
) -> None:
    """Show the merged policy of each pool that TARGET leads to, with the origin of each field.

    The exit code is 1 where some policy is not in force, something else is wrong, or the target is not there.
    """
    from extproc.policy.view import ask_picker, explain_snapshot, is_all_in_force, render, render_overview, resources_of

    form = chosen_form(output, json=json)
    if _is_typed(context, "picker") and not _is_typed(context, "policies") and not _is_typed(context, "kubernetes"):
        policies, kubernetes = None, False  # of the picker's own settings, read for it too
    try:
        if policies is not None or kubernetes:
            snapshot = _snapshot(policies, timeout_seconds=timeout_ms / 1000)
            answer = explain_snapshot(snapshot, target, root_namespace=root_namespace, now=datetime.now(UTC))
        else:
            answer = asyncio.run(ask_picker(picker, target, timeout_seconds=timeout_ms / 1000, login=login))
    except KvmeshError as error:
        _fail("explain", error)
    if resource:
        typer.echo(resources_of(answer), nl=False)
    elif form is OutputForm.TABLE:
        (render if target else render_overview)(answer, console=people_console())
    else:
        print_data(answer, form)
    if not is_all_in_force(answer):
        raise typer.Exit(FAILURE)


def _is_typed(context: typer.Context, name: str) -> bool:
    """Tell whether an option is on the command line itself, and not of the environment or a file."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@policy.command("check")
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", callback=_existing, help="YAML or JSON files, folders of such, or - for stdin."
        ),
    ],
    root_namespace: Annotated[
        str, typer.Option(help="Namespace whose policies without targetRefs are mesh-wide.")
    ] = "istio-system",
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
    resource: Annotated[
        bool,
        typer.Option(
            "--resource",
            help="Print the policies as custom resources in YAML, and what is to be said of them to stderr.",
        ),
    ] = False,
) -> None:
    """Read policies as the picker does, and say what is wrong (exit code 1) or doubtful (0), with file, line and path.

    A policy may be an InferencePolicy, its `spec` alone, or the content of `spec`, as `--policy` takes it. Where the
    files have pools, too, all documents are also judged together: missing targets, policies that contradict.
    """
    from extproc.policy.check_sources import check_sources, sources_of
    from extproc.policy.check_view import check_lines, check_resources

    form = chosen_form(output, json=json)
    sources = sources_of(files, stdin=sys.stdin.buffer.read)
    found = check_sources(sources, root_namespace=root_namespace, now=datetime.now(UTC))
    if resource:
        typer.echo(check_resources(found), nl=False)
    if form is not OutputForm.TABLE and not resource:
        print_data([each.shown() for each in found], form)
    else:
        for line in check_lines(found):
            typer.echo(line, err=resource)
    if any(each.is_wrong for each in found):
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
