"""The command `kvmesh indexer`; gathered by the root command through its entry point. Imports late, to start fast."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kv_indexer.redis_options import with_redis

if TYPE_CHECKING:
    from kv_indexer.adapters.redis_address import RedisAccess

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep `indexer` a subcommand when this app runs alone."""


@app.command("indexer")
@with_redis
def indexer(
    access: "RedisAccess",
    model: Annotated[str, typer.Option(help="Model name as clients write it; part of every block key.")],
    endpoints: Annotated[str, typer.Option(metavar="HOST:PORT,…", help="vLLM pods to follow, by their API address.")],
    host: Annotated[str, typer.Option(help="Address that the admin pages listen on.")] = "127.0.0.1",
    indexer_admin_port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of /healthz, /readyz, /metrics and /sources; 0 takes a free one."),
    ] = 9091,
    hash_seed: Annotated[str, typer.Option(help="Part of every block key; the picker must have the same.")] = "kvmesh",
    event_sources: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Where pods publish that have no GET /kv_event_sources (vLLM < 0.31): "
            '{"HOST:PORT": {"events": "tcp://…", "replay": "tcp://…"}}.',
        ),
    ] = "{}",
    indexer_id: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name under which this indexer owns streams, in logs and on /sources; a random part is added, so that "
            "no two processes are taken for one. Default: HOST:PID.",
        ),
    ] = "",
    lease_seconds: Annotated[
        float,
        typer.Option(
            min=1.0,
            max=60.0,
            help="Seconds of silence after which another indexer takes over what this one follows.",
        ),
    ] = 2.0,
) -> None:
    """Follow the KV events of vLLM pods and keep the prefix index in Redis true."""
    from kv_indexer.config import IndexerSettings, parse_endpoints, parse_event_sources, unique_indexer_id
    from kv_indexer.errors import ListenError, SettingError

    try:
        settings = IndexerSettings(
            host=host,
            admin_port=indexer_admin_port,
            redis_url=access,
            endpoints=parse_endpoints(endpoints),
            model=model,
            hash_seed=hash_seed,
            event_sources=parse_event_sources(event_sources),
            indexer_id=unique_indexer_id(indexer_id),
            lease_seconds=lease_seconds,
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
