"""The commands `kvmesh policy explain` and `kvmesh policy check`. Imports late, for a fast start."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from extproc.errors import ConfigError, KvmeshError
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.documents.documents import KubernetesConfigError
from kvmesh.options import fails_in_one_line, takes_settings
from kvmesh.output.forms import Output, OutputForm, people_console, print_data
from operate.options import DEFAULT_PICKER, PickerUrl, RootNamespace

FAILURE, WRONG_USAGE = 1, 2
CALL_SECONDS = 5.0  # the picker
DOCUMENTS_SECONDS = 30.0  # a large cluster

app = typer.Typer()
policy = typer.Typer(no_args_is_help=True, help="Check and explain InferencePolicies.")
app.add_typer(policy, name="policy", help="Check and explain InferencePolicies.")


def _existing(files: list[Path]) -> list[Path]:
    for file in files:
        if str(file) != "-" and not file.exists():
            raise typer.BadParameter(f"{str(file)!r} does not exist")
    return files


@policy.command("explain")
@fails_in_one_line(
    "policy explain", {ConfigError: WRONG_USAGE, KubernetesConfigError: WRONG_USAGE, KvmeshError: FAILURE}
)
@takes_settings
def explain(
    context: typer.Context,
    login: AdminLogin,
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="TARGET",
            help="Pool as namespace/name; or Kind/namespace/name (InferencePool, Service, HTTPRoute, Gateway, "
            "InferencePolicy); or a namespace. Default: an overview.",
        ),
    ] = None,
    picker: PickerUrl = DEFAULT_PICKER,
    policies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Merge the YAML or JSON documents of this folder instead of asking a picker.",
        ),
    ] = None,
    kubernetes: Annotated[
        bool, typer.Option(help="Merge the documents of the cluster (KUBECONFIG) instead of asking a picker.")
    ] = False,
    root_namespace: RootNamespace = "istio-system",
    output: Output = OutputForm.TABLE,
    resource: Annotated[
        bool,
        typer.Option(
            "--resource",
            help="Print each pool's merged policy as an InferencePolicy in YAML, with the origin of each field in "
            "comments.",
        ),
    ] = False,
) -> None:
    """Show the merged policy of each pool of TARGET, with the origin of each field.

    The exit code is 1 if a policy is not in force, the target is missing, or something else is wrong.
    """
    from extproc.reach import view

    if _is_typed(context, "picker") and not _is_typed(context, "policies") and not _is_typed(context, "kubernetes"):
        policies, kubernetes = None, False  # they come from the picker's settings in the shared file or environment
    if policies is not None or kubernetes:
        snapshot = view.snapshot_once(policies, program="kvmesh-policy", timeout_seconds=DOCUMENTS_SECONDS)
        answer = view.explain_snapshot(snapshot, target, root_namespace=root_namespace, now=datetime.now(UTC))
    else:
        answer = asyncio.run(view.ask_picker(picker, target, timeout_seconds=CALL_SECONDS, login=login))
    if resource:
        typer.echo(view.resources_of(answer), nl=False)
    elif output is OutputForm.TABLE:
        (view.render if target else view.render_overview)(answer, console=people_console())
    else:
        print_data(answer, output)
    if not view.is_all_in_force(answer):
        raise typer.Exit(FAILURE)


def _is_typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@policy.command("check")
def check(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE…", callback=_existing, help="YAML or JSON files, or folders of them; - reads stdin."
        ),
    ],
    root_namespace: RootNamespace = "istio-system",
    output: Output = OutputForm.TABLE,
    resource: Annotated[
        bool,
        typer.Option(
            "--resource",
            help="Print the policies as custom resources in YAML, and findings to stderr.",
        ),
    ] = False,
) -> None:
    """Check policies as the picker does; report errors (exit code 1) and warnings (0) with file, line and path.

    A policy is an InferencePolicy, its `spec`, or the content of `spec`, as in `--policy`. Policies of other systems
    are translated. If the files have pools, too, the command also checks all documents together: missing targets,
    contradictions.
    """
    from operate.policy.check import check_lines, check_resources, check_sources, sources_of

    sources = sources_of(files, stdin=sys.stdin.buffer.read)
    found = check_sources(sources, root_namespace=root_namespace, now=datetime.now(UTC))
    if resource:
        typer.echo(check_resources(found), nl=False)
    if output is not OutputForm.TABLE and not resource:
        print_data([each.shown() for each in found], output)
    else:
        for line in check_lines(found):
            typer.echo(line, err=resource)
    if any(each.is_wrong for each in found):
        raise typer.Exit(FAILURE)
