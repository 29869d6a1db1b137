"""The command `kvmesh doctor`: looks at every part of a running mesh and says what to mend. It imports late."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.doctor.findings import WORST_FIRST, Finding, Severity
from extproc.errors import ConfigError
from extproc.policy.values import Steering
from kvmesh.admin.admin_login import AdminLogin
from kvmesh.options import takes_settings
from kvmesh.output.forms import AsJson, Output, OutputForm, chosen_form, people_console, print_below, print_data
from kvmesh.plain_text import cut_end, printable
from kvmesh.pods.pod_access import PodAccess
from kvmesh.redis.address import RedisAccess

if TYPE_CHECKING:
    from rich.console import Console

    from extproc.doctor.examine import DoctorSettings
    from extproc.settings.config import PickerSettings
    from kvmesh.documents.documents import Snapshot

STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "yellow", Severity.UNCHECKED: "magenta", Severity.OK: "green"}
WIDTH = max(len(severity) for severity in Severity)
SEEN_LIMIT = 600  # characters; answers of other programs may be long

app = typer.Typer(add_completion=False)


@app.callback()
def _group() -> None:
    """Keep `doctor` a subcommand when this app runs alone."""


@app.command("doctor")
@takes_settings
def doctor(
    context: typer.Context,
    login: AdminLogin,
    access: RedisAccess,
    pods: PodAccess,
    endpoints: Annotated[
        str,
        typer.Option(help="vLLM pods as IP:PORT,IP:PORT,… (IPv6 as [::1]:8000). Default: those of a running picker."),
    ] = "",
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Check all pools of the cluster of KUBECONFIG, their policies, and what is installed.",
        ),
    ] = False,
    policies: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            exists=True,
            file_okay=False,
            help="Check all pools of a folder of YAML or JSON documents, and their policies.",
        ),
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMESPACE/NAME[:PORT]",
            help="With --kubernetes or --policies: ask the pods of these pools alone. Repeat for more.",
        ),
    ] = None,
    namespaces: Annotated[
        str, typer.Option(metavar="A,B,…", help="With --kubernetes: as the picker has them. Default: all.")
    ] = "",
    root_namespace: Annotated[
        str, typer.Option(help="Namespace whose policies without targetRefs are for the whole mesh.")
    ] = "istio-system",
    model: Annotated[str | None, typer.Option(help="Served model name that --tokenizer belongs to.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json and chat template.")
    ] = None,
    tokenizers: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", exists=True, file_okay=False, help="As the picker has it, for learned models."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(metavar="FILE|JSON", help="Models, aliases, rewrites and splits, as the picker has them."),
    ] = None,
    hash_seed: Annotated[str, typer.Option(help="Seed of the block keys; the same for indexer and picker.")] = "kvmesh",
    steering: Annotated[
        Steering, typer.Option(help="How the picker steers Envoy; Envoy's clusters must fit.")
    ] = Steering.OVERRIDE_HOST,
    grpc_port: Annotated[
        int, typer.Option(min=0, max=65535, help="The picker's port for Envoy, on the host of --picker.")
    ] = 9002,
    index_timeout_ms: Annotated[
        float, typer.Option(min=0.1, help="Milliseconds that the picker waits for the index.")
    ] = 20,
    picker: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Admin address of a running picker, like http://127.0.0.1:9090."),
    ] = None,
    indexer: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Admin address of a running indexer, like http://127.0.0.1:9091."),
    ] = None,
    envoy_admin: Annotated[
        str | None, typer.Option(metavar="URL", help="Admin address of an Envoy, like http://127.0.0.1:9901.")
    ] = None,
    trial: Annotated[
        bool,
        typer.Option(
            help="Send each pod one fresh prompt of a few blocks for one token, and look for it in the index. "
            "Finds seeds, models and event addresses that differ."
        ),
    ] = True,
    trial_timeout_ms: Annotated[
        float, typer.Option(min=100, help="Milliseconds within which such a prompt must be in the index.")
    ] = 3000,
    timeout_ms: Annotated[float, typer.Option(min=100, help="Milliseconds to wait for each answer.")] = 5000,
    output: Output = OutputForm.TABLE,
    json: AsJson = False,
) -> None:
    """Check pods, tokens, events, index, Redis and, where named, picker, indexer and Envoy; say what to mend.

    Where no option says what to check, a running picker is asked for its settings: that of --picker, of the default
    admin address, or of `kvmesh up`; else the cluster of KUBECONFIG is checked. Standard error says which it is.

    The exit code is 1 where an error was found, 2 where something could not be checked (or for wrong usage), else 0.
    """
    from extproc.doctor.examine import DoctorSettings, examine
    from extproc.doctor.examine_mesh import examine_mesh
    from extproc.doctor.findings import exit_code
    from extproc.settings.config import PickerSettings, parse_endpoints, read_models

    form = chosen_form(output, json=json)
    settings = DoctorSettings(
        picker=PickerSettings(
            host="127.0.0.1",
            grpc_port=grpc_port,
            admin_port=0,
            redis_url=access,
            pod_access=pods,
            endpoints=parse_endpoints(endpoints),
            model=model,
            tokenizer_folder=tokenizer,
            tokenizer_folders=tokenizers,
            hash_seed=hash_seed,
            known_models=frozenset(),
            steering=steering,
            index_timeout_seconds=index_timeout_ms / 1000,
            scrape_interval_seconds=1.0,
            scrape_timeout_seconds=1.0,
            max_body_bytes=16 << 20,
            drain_seconds=0.0,
            otlp_endpoint=None,
            models=read_models(models),
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
        visible_within_seconds=trial_timeout_ms / 1000,
    )
    if not endpoints and not kubernetes and policies is None:
        settings = _found(context, settings)
    follows_mesh = settings.picker.follows_mesh
    if (pool or namespaces) and not follows_mesh:
        raise ConfigError("--pool and --namespaces belong to --kubernetes or --policies")
    if follows_mesh:
        snapshot = _snapshot(settings.picker, timeout_seconds=settings.timeout_seconds)
        asked = _asked_pools(snapshot, pool or ())
        settings, located = _locate(settings) if settings.picker.kubernetes else (settings, ())
        findings = (*located, *asyncio.run(examine_mesh(settings, snapshot, now=datetime.now(UTC), pools=asked)))
    else:
        findings = asyncio.run(examine(settings))
    if form is OutputForm.TABLE:
        render(findings, console=people_console())
    else:
        print_data(findings, form)
    raise typer.Exit(exit_code(findings))


def render(findings: Sequence[Finding], *, console: "Console") -> None:
    """Print every finding, worst first, with its fix below it, and a last line that counts; all as text, no markup."""
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
    """Return the last line."""
    counts = Counter(finding.severity for finding in findings)
    named = {
        Severity.ERROR: "errors",
        Severity.WARNING: "warnings",
        Severity.UNCHECKED: "not checked",
        Severity.OK: "checks fine",
    }
    return ", ".join(f"{counts[severity]} {name}" for severity, name in named.items() if counts[severity])


def _found(context: typer.Context, settings: "DoctorSettings") -> "DoctorSettings":
    """Return the settings with what was found out, and say on standard error what that is. Raise ConfigError."""
    from extproc.doctor.what_to_check import find_what_to_check

    given = {
        name for name in context.params if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"
    }
    found = asyncio.run(find_what_to_check(settings, given=given))
    for line in found.words:
        typer.echo(f"kvmesh doctor: {line}", err=True)
    return found.settings


def _snapshot(settings: "PickerSettings", *, timeout_seconds: float) -> "Snapshot":
    """Read the documents once. Raise ConfigError or KvmeshError."""
    from extproc.policy.view import first_snapshot
    from extproc.pools.mesh import namespaces_read
    from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
    from kvmesh.documents.sources import FolderSource, kubernetes_source

    folder = settings.policies_folder
    try:
        source = (
            FolderSource(folder)
            if folder is not None
            else kubernetes_source(ClusterAccess(program="kvmesh-doctor"), namespaces=namespaces_read(settings))
        )
        return asyncio.run(first_snapshot(source, timeout_seconds=timeout_seconds))
    except KubernetesConfigError as error:
        raise ConfigError(f"--kubernetes: {error}") from error


def _locate(settings: "DoctorSettings") -> "tuple[DoctorSettings, tuple[Finding, ...]]":
    """Find what no option names, and return the settings with it; findings say what cannot be reached."""
    from extproc.doctor.cluster_parts import locate_parts
    from kvmesh.documents.documents import ClusterAccess

    given = {"picker": settings.picker_admin, "indexer": settings.indexer_admin, "envoy-admin": settings.envoy_admin}
    named = [flag for flag, url in given.items() if url]
    spaces = settings.picker.namespaces
    located = asyncio.run(locate_parts(ClusterAccess(program="kvmesh-doctor"), named=named, namespaces=spaces))
    found = replace(
        settings,
        picker_admin=settings.picker_admin or located.urls.get("picker"),
        indexer_admin=settings.indexer_admin or located.urls.get("indexer"),
        envoy_admin=settings.envoy_admin or located.urls.get("envoy-admin"),
    )
    return found, located.findings


def _asked_pools(snapshot: "Snapshot", texts: Sequence[str]) -> frozenset[str]:
    """Return the pools that are asked for, none: all. Raise ConfigError where one is not there."""
    from extproc.pools.pool_hosts import pool_name
    from kvmesh.documents.pool_resolver import resolve_pools

    names = resolve_pools(snapshot.documents).pools
    try:
        asked = frozenset(map(pool_name, texts))
    except ValueError as error:
        raise ConfigError(f"--pool: {error}") from error
    if missing := sorted(asked - names.keys()):
        raise ConfigError(f"--pool: there is no pool {missing[0]!r}, but {', '.join(sorted(names)) or 'none'}")
    return asked
