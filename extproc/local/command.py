"""`kvmesh up`: the whole mesh on this machine under one supervisor. Only the flags are here; `service` does the work.

Registered by `extproc.local.commands`; imports what is heavy only when it runs.
"""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from extproc.local.body_delivery import BodyDelivery
from kvmesh.admin.admin_options import AdminTokenFile
from kvmesh.logs import LOG_FORMAT, LOG_LEVEL
from kvmesh.redis.options import (
    RedisCaFile,
    RedisCertFile,
    RedisKeyFile,
    RedisPasswordFile,
    RedisSentinelPasswordFile,
    RedisServerName,
    RedisUsername,
)


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
            help="Folder with the model's tokenizer.json and chat template. Default: the simulated pods' own, or the "
            "folder that the first pod names if it is on this machine; else no prefix routing.",
        ),
    ] = None,
    event_sources: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Where real pods publish that have no GET /kv_event_sources (vLLM < 0.31): "
            '{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}.',
        ),
    ] = None,
    redis: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Redis to use: redis://, rediss://, unix://, redis+sentinel:// or redis+cluster://. "
            "Default: start one on a free port, without persistence.",
        ),
    ] = None,
    redis_username: RedisUsername = None,
    redis_password_file: RedisPasswordFile = None,
    redis_sentinel_password_file: RedisSentinelPasswordFile = None,
    redis_ca_file: RedisCaFile = None,
    redis_cert_file: RedisCertFile = None,
    redis_key_file: RedisKeyFile = None,
    redis_server_name: RedisServerName = None,
    admin_token_file: AdminTokenFile = None,
    envoy_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway port, where clients connect.")] = 10000,
    envoy_admin_port: Annotated[int, typer.Option(min=1, max=65535, help="Envoy's admin port.")] = 9901,
    grpc_port: Annotated[
        int, typer.Option(min=1, max=65535, help="Port of the picker for Envoy: ext_proc and gRPC health.")
    ] = 9002,
    admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The picker's admin HTTP port.")] = 9090,
    indexer_admin_port: Annotated[int, typer.Option(min=1, max=65535, help="The indexer's admin HTTP port.")] = 9091,
    sim_port: Annotated[
        int, typer.Option(min=1, max=65472, help="Port of the first simulated pod; pod i listens on this + i.")
    ] = 8101,
    body_mode: Annotated[
        BodyDelivery, typer.Option(help="How Envoy sends request bodies to the picker.")
    ] = BodyDelivery.DUPLEX,
    ready_file: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="JSON file with all addresses and pids, there while all is healthy."),
    ] = None,
    no_live: Annotated[bool, typer.Option("--no-live", help="No view: print the addresses, then be silent.")] = False,
) -> None:
    """Start Redis, pods, indexer, picker and a real Envoy on this machine; Ctrl-C ends them all."""
    from extproc.local.addresses import resolve, resolve_event_sources
    from extproc.local.errors import UpError
    from extproc.local.redis_choice import foreign_redis
    from extproc.local.service import run, simulated_tokenizer
    from extproc.local.stack import StackSettings

    try:
        real_pods = resolve(endpoints or "")
        settings = StackSettings(
            simulated_pods=pods,
            endpoints=tuple(real_pods.values()),
            model=model or (None if real_pods else "tiny"),
            tokenizer_folder=tokenizer or (None if real_pods else simulated_tokenizer()),
            redis=foreign_redis(
                redis,
                username=redis_username,
                password_file=redis_password_file,
                sentinel_password_file=redis_sentinel_password_file,
                ca_file=redis_ca_file,
                cert_file=redis_cert_file,
                key_file=redis_key_file,
                server_name=redis_server_name,
            ),
            event_sources=None if event_sources is None else resolve_event_sources(event_sources, endpoints=real_pods),
            envoy_port=envoy_port,
            envoy_admin_port=envoy_admin_port,
            grpc_port=grpc_port,
            admin_port=admin_port,
            indexer_admin_port=indexer_admin_port,
            sim_port=sim_port,
            body_delivery=body_mode,
            admin_token_file=admin_token_file,
            log_flags=_log_flags(context),
        )
        asyncio.run(run(settings, ready_path=ready_file, live=not no_live))
    except UpError as error:
        print(f"kvmesh up: {error.message}", file=sys.stderr)  # noqa: T201
        for line in error.log_lines:
            print(f"    {line}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(error.exit_code) from None


def _log_flags(context: typer.Context) -> tuple[str, ...]:
    """The children log as this process was told to."""
    flags = {"--log-level": context.meta.get(LOG_LEVEL), "--log-format": context.meta.get(LOG_FORMAT)}
    return tuple(word for flag, value in flags.items() if value is not None for word in (flag, str(value)))
