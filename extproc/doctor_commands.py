"""The command `kvmesh doctor`: looks at every part of a running mesh and says what to mend. Imports late."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from extproc.core.policy import Steering
from kv_indexer.redis_options import with_redis

if TYPE_CHECKING:
    from kv_indexer.api import RedisAccess

app = typer.Typer(add_completion=False)


@app.callback()
def _group() -> None:
    """Keep `doctor` a subcommand when this app runs alone."""


@app.command("doctor")
@with_redis
def doctor(
    access: "RedisAccess",
    endpoints: Annotated[str, typer.Option(help="vLLM pods as IP:PORT,IP:PORT,… (IPv6 as [::1]:8000).")],
    model: Annotated[str | None, typer.Option(help="Served model name that --tokenizer belongs to.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with the model's tokenizer.json and chat template.")
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
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON instead of lines.")] = False,
) -> None:
    """Check pods, tokens, events, index, Redis and, where named, picker, indexer and Envoy; say what to mend.

    The exit code is 1 where an error was found, 2 where something could not be checked (or for wrong usage), else 0.
    """
    import msgspec
    from rich.console import Console

    from extproc.config import PickerSettings, parse_endpoints, read_models
    from extproc.doctor.examine import examine
    from extproc.doctor.findings import exit_code
    from extproc.doctor.gather import DoctorSettings
    from extproc.doctor.report import render

    settings = DoctorSettings(
        picker=PickerSettings(
            host="127.0.0.1",
            grpc_port=grpc_port,
            admin_port=0,
            redis_url=access,
            endpoints=parse_endpoints(endpoints),
            model=model,
            tokenizer_folder=tokenizer,
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
        ),
        envoy_admin=envoy_admin,
        picker_admin=picker,
        indexer_admin=indexer,
        trial=trial,
        timeout_seconds=timeout_ms / 1000,
        visible_within_seconds=trial_timeout_ms / 1000,
    )
    findings = asyncio.run(examine(settings))
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(findings)).decode())
    else:
        render(findings, console=Console(highlight=False))
    raise typer.Exit(exit_code(findings))
