"""The command `kvmesh doctor`: checks every part of a running mesh and suggests fixes. Imports late."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.errors import ConfigError
from extproc.pages.findings import WORST_FIRST, Finding, Severity, exit_code
from extproc.policy.values import Steering
from extproc.settings.config import PickerSettings, parse_endpoints, read_models
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import Output, OutputForm, people_console, print_below, print_data
from kvmesh.plain_text import cut_end, printable
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess
from operate.options import RootNamespace

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.UNCHECKED: "magenta", Severity.OK: "green"}
WIDTH = max(len(severity) for severity in Severity)
SEEN_LIMIT = 600  # characters; other programs' answers may be long

app = typer.Typer(add_completion=False)


@app.command("doctor")
@takes_settings
def doctor(
    context: typer.Context,
    login: AdminLogin,
    access: RedisAccess,
    pods: PodAccess,
    endpoints: Annotated[
        str,
        typer.Option(help="vLLM pods as IP:PORT,IP:PORT,… (IPv6: [::1]:8000). Default: the running picker's."),
    ] = "",
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes", help="Check all pools of the cluster of KUBECONFIG, their policies, and what is installed."
        ),
    ] = False,
    policies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Check all pools and policies of a folder of YAML or JSON documents.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT]",
            help="Check only the pods of this pool, with --kubernetes or --policies. Repeat for more.",
        ),
    ] = None,
    namespaces: Annotated[
        str, typer.Option(metavar="A,B,…", help="Namespaces with --kubernetes, as the picker's. Default: all.")
    ] = "",
    root_namespace: RootNamespace = "istio-system",
    model: Annotated[str | None, typer.Option(help="Served model name of --tokenizer.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json and chat template.")
    ] = None,
    tokenizers: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", exists=True, file_okay=False, help="Tokenizer folders of the picker, for learned models."
        ),
    ] = None,
    policy: Annotated[
        str | None, typer.Option(metavar="FILE|YAML", help="The picker's --policy, for its section `models`.")
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; equal for indexer and picker.")] = "kvmesh",
    steering: Annotated[
        Steering, typer.Option(help="The picker's steering; Envoy's clusters must fit.")
    ] = Steering.OVERRIDE_HOST,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The picker's port for Envoy, on the host of --picker.")
    ] = 9002,
    index_timeout_ms: Annotated[
        float, typer.Option(min=0.1, help="The picker's timeout of the index, in milliseconds.")
    ] = 20,
    picker: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin address of a running picker, like http://127.0.0.1:9090.")
    ] = None,
    indexer: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin address of a running indexer, like http://127.0.0.1:9091.")
    ] = None,
    envoy_admin: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin address of an Envoy, like http://127.0.0.1:9901.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            help="Send each pod a new prompt of a few blocks, and look for it in the index; finds different seeds, "
            "models and event addresses."
        ),
    ] = True,
    timeout_ms: Annotated[
        float,
        typer.Option(min=100, help="Timeout of each call, and until that prompt is in the index, in milliseconds."),
    ] = 5000,
    output: Output = OutputForm.TABLE,
) -> None:
    """Check pods, tokens, events, index, Redis and, if named, picker, indexer and Envoy, with a remedy for each error.

    Without options it takes the settings of a running picker (--picker, the default admin address, or `kvmesh up`),
    else it checks the cluster of KUBECONFIG. Standard error names the choice.

    The exit code is 1 if it found an error, 2 if a check was impossible or the usage wrong, else 0.
    """
    from operate.doctor.examine import DoctorSettings, examine
    from operate.doctor.examine_mesh import examine_mesh
    from operate.doctor.what_to_check import asked_pools, find_what_to_check, locate, snapshot_of

    settings = DoctorSettings(
        picker=PickerSettings(
            grpc_port=grpc_port,
            redis_url=access.url,
            pod_access=pods,
            endpoints=parse_endpoints(endpoints),
            model=model,
            tokenizer_folder=tokenizer,
            tokenizer_folders=tokenizers,
            hash_seed=hash_seed,
            steering=steering,
            index_timeout_seconds=index_timeout_ms / 1000,
            models=read_models(policy),
            kubernetes=kubernetes,
            policies_folder=policies,
            root_namespace=root_namespace,
            namespaces=frozenset(name.strip() for name in namespaces.split(",") if name.strip()),
        ),
        envoy_admin=envoy_admin,
        picker_admin=picker,
        indexer_admin=indexer,
        login=login,
        trial=trial,
        timeout_seconds=timeout_ms / 1000,
        visible_within_seconds=timeout_ms / 1000,
    )
    if not endpoints and not kubernetes and policies is None:
        given = {
            name
            for name in context.params
            if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"
        }
        found = asyncio.run(find_what_to_check(settings, given=given))
        settings = found.settings
        for line in found.words:
            typer.echo(f"kvmesh doctor: {line}", err=True)
    follows_mesh = settings.picker.follows_mesh
    if (pool or namespaces) and not follows_mesh:
        raise ConfigError("--pool and --namespaces belong to --kubernetes or --policies")
    if follows_mesh:
        snapshot = snapshot_of(settings.picker, timeout_seconds=settings.timeout_seconds)
        asked = asked_pools(snapshot, pool or ())
        settings, located = locate(settings) if settings.picker.kubernetes else (settings, ())
        findings = (*located, *asyncio.run(examine_mesh(settings, snapshot, now=datetime.now(UTC), pools=asked)))
    else:
        findings = asyncio.run(examine(settings))
    if output is OutputForm.TABLE:
        render(findings, console=people_console())
    else:
        print_data(findings, output)
    raise typer.Exit(exit_code(findings))


def render(findings: Sequence[Finding], *, console: "Console") -> None:
    """Print the findings, worst first, each with its fix, then a summary line; all as plain text, no markup."""
    from rich.text import Text

    for finding in sorted(findings, key=lambda finding: WORST_FIRST.index(finding.severity)):
        severity = Text(finding.severity.value.ljust(WIDTH + 1), style=STYLES[finding.severity])
        about = f"{finding.subject}: " if finding.subject else ""
        seen = Text(f"[{finding.check}] ", style="dim")
        seen.append(cut_end(printable(about + finding.seen), limit=SEEN_LIMIT), style="none")
        print_below(console, severity, seen)
        if finding.fix:
            print_below(console, Text(" " * (WIDTH + 1)), Text(f"→ {printable(finding.fix)}"))
    console.print(Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """Return the summary line."""
    counts = Counter(finding.severity for finding in findings)
    named = {
        Severity.ERROR: "errors",
        Severity.WARNING: "warnings",
        Severity.UNCHECKED: "not checked",
        Severity.OK: "checks fine",
    }
    return ", ".join(f"{counts[severity]} {name}" for severity, name in named.items() if counts[severity])
