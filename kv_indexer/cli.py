"""The command `kvmesh indexer`; gathered by the root command through its entry point. Imports late, to start fast."""

from typing import Annotated, Any

import typer

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep `indexer` a subcommand when this app runs alone."""


def _endpoints(value: Any) -> Any:
    return _parsed("parse_endpoints", value)


def _event_sources(value: Any) -> Any:
    return _parsed("parse_event_sources", value)


def _parsed(parser: str, value: Any) -> Any:
    from kv_indexer import config
    from kv_indexer.errors import SettingError

    try:
        return getattr(config, parser)(value)
    except SettingError as error:
        raise typer.BadParameter(str(error)) from None


@app.command("indexer")
def indexer(
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    endpoints: Annotated[
        Any, typer.Option(parser=_endpoints, metavar="HOST:PORT,…", help="vLLM pods to follow, by their API address.")
    ],
    host: Annotated[str, typer.Option(help="Address that the admin pages listen on.")] = "127.0.0.1",
    indexer_admin_port: Annotated[
        int, typer.Option(help="Port of /healthz, /readyz, /metrics and /sources; 0 takes a free one.")
    ] = 9091,
    redis: Annotated[
        str, typer.Option(help="Redis or Valkey that holds the index: redis://, rediss:// or unix://.")
    ] = "redis://127.0.0.1:6379",
    hash_seed: Annotated[str, typer.Option(help="Part of every block key; the picker must have the same.")] = "kvmesh",
    event_sources: Annotated[
        Any,
        typer.Option(
            parser=_event_sources,
            metavar="JSON",
            help="Where pods publish that have no GET /kv_event_sources (vLLM < 0.31): "
            '{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}.',
        ),
    ] = "{}",
) -> None:
    """Follow the KV events of vLLM pods and keep the prefix index in Redis true."""
    from kv_indexer.config import IndexerSettings

    settings = IndexerSettings(
        host=host,
        admin_port=indexer_admin_port,
        redis_url=redis,
        endpoints=endpoints,
        model=model,
        hash_seed=hash_seed,
        event_sources=event_sources,
    )
    raise typer.Exit(_run(settings))


def _run(settings: Any) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    import errno

    import uvloop

    try:
        uvloop.run(_until_signalled(settings))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        typer.echo(
            f"kvmesh indexer: port {settings.admin_port} on {settings.host} is already in use "
            "(choose another with --indexer-admin-port)",
            err=True,
        )
        return 1
    return 0


async def _until_signalled(settings: Any) -> None:
    import asyncio
    import signal

    from kv_indexer.service import IndexerService

    task = asyncio.create_task(IndexerService(settings).run(), name="indexer")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return  # asked to end: no failure
