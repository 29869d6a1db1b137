"""The command `kvmesh indexer`; gathered by the root command through its entry point. Imports late, to start fast."""

from typing import Annotated, Any

import typer

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep `indexer` a subcommand when this app runs alone."""


@app.command("indexer")
def indexer(
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    endpoints: Annotated[str, typer.Option(metavar="HOST:PORT,…", help="vLLM pods to follow, by their API address.")],
    host: Annotated[str, typer.Option(help="Address that the admin pages listen on.")] = "127.0.0.1",
    indexer_admin_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /healthz, /readyz, /metrics and /sources; 0 takes a free one."),
    ] = 9091,
    redis: Annotated[
        str, typer.Option(help="Redis or Valkey that holds the index: redis://, rediss:// or unix://.")
    ] = "redis://127.0.0.1:6379",
    hash_seed: Annotated[str, typer.Option(help="Part of every block key; the picker must have the same.")] = "kvmesh",
    event_sources: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Where pods publish that have no GET /kv_event_sources (vLLM < 0.31): "
            '{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}.',
        ),
    ] = "{}",
) -> None:
    """Follow the KV events of vLLM pods and keep the prefix index in Redis true."""
    from kv_indexer.config import IndexerSettings, parse_endpoints, parse_event_sources
    from kv_indexer.errors import ListenError, SettingError

    try:
        settings = IndexerSettings(
            host=host,
            admin_port=indexer_admin_port,
            redis_url=redis,
            endpoints=parse_endpoints(endpoints),
            model=model,
            hash_seed=hash_seed,
            event_sources=parse_event_sources(event_sources),
        )
        _run(settings)
    except (SettingError, ListenError) as error:
        typer.echo(f"kvmesh indexer: {error}", err=True)
        raise typer.Exit(2) from None


def _run(settings: Any) -> None:
    """Run until SIGTERM or SIGINT."""
    import uvloop

    uvloop.run(_until_signalled(settings))


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
