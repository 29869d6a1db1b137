"""`kvmesh up`: the whole mesh on this machine under one supervisor. Only the flags are here; `service` does the work.

Registered by `extproc.commands`; imports what is heavy only when it runs.
"""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from extproc.local.body_mode import BodyMode

LOG_FORMAT_KEY = "kvmesh.log_format"  # where the root command keeps the value of --log-format


def up(
    context: typer.Context,
    pods: Annotated[int, typer.Option(min=1, max=64, help="Simulated pods to start (without --endpoints).")] = 4,
    endpoints: Annotated[
        str | None,
        typer.Option(help="Real vLLM pods to use instead of simulated ones, as HOST:PORT,HOST:PORT,…"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Served model name. Default: the simulated one, or what the first pod says.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with the model's tokenizer.json and chat template. Default: the simulated pods' own.",
        ),
    ] = None,
    redis: Annotated[
        str | None, typer.Option(help="redis:// URL to use. Default: start one on a free port, without persistence.")
    ] = None,
    envoy_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway port, where clients connect.")] = 10000,
    envoy_admin_port: Annotated[int, typer.Option(min=1, max=65535, help="Envoy's admin port.")] = 9901,
    picker_grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The picker's gRPC port.")] = 9002,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The picker's admin HTTP port.")] = 9090,
    indexer_admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The indexer's admin HTTP port.")] = 9091,
    sim_port: Annotated[
        int, typer.Option(min=1, max=65472, help="Port of the first simulated pod; pod i listens on this + i.")
    ] = 8101,
    body_mode: Annotated[
        BodyMode, typer.Option(help="How Envoy sends request bodies to the picker.")
    ] = BodyMode.DUPLEX,
    ready_file: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file with all addresses and pids, there while all is healthy."),
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="No view: print the addresses, then be silent.")] = False,
) -> None:
    """Start Redis, pods, indexer, picker and a real Envoy on this machine; Ctrl-C ends them all."""
    from extproc.local.addresses import resolve
    from extproc.local.errors import UpError
    from extproc.local.service import run, simulated_tokenizer
    from extproc.local.stack import StackSettings

    try:
        real_pods = resolve(endpoints or "")
        settings = StackSettings(
            simulated_pods=pods,
            endpoints=real_pods,
            model=model or (None if real_pods else "tiny"),
            tokenizer_folder=tokenizer or (None if real_pods else simulated_tokenizer()),
            redis_url=redis,
            envoy_port=envoy_port,
            envoy_admin_port=envoy_admin_port,
            picker_grpc_port=picker_grpc_port,
            admin_port=admin_port,
            indexer_admin_port=indexer_admin_port,
            sim_port=sim_port,
            body_mode=body_mode,
            log_flags=_log_flags(context),
        )
        asyncio.run(run(settings, ready_path=ready_file, live=not no_live))
    except UpError as error:
        print(f"kvmesh up: {error.message}", file=sys.stderr)  # noqa: T201
        for line in error.log_lines:
            print(f"    {line}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from None


def _log_flags(context: typer.Context) -> tuple[str, ...]:
    """The children log as this process was told to."""
    level = logging.getLevelName(logging.getLogger().getEffectiveLevel()).lower()
    form = context.meta.get(LOG_FORMAT_KEY)
    return ("--log-level", level, *(("--log-format", str(form)) if form else ()))
