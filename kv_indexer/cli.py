"""The command `kvmesh indexer`. Imports late, to start fast."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvmesh.admin.admin_options import with_admin_access
from kvmesh.redis.options import with_redis

if TYPE_CHECKING:
    from kvmesh.admin.admin_access import AdminAccess
    from kvmesh.documents.documents import DocumentSource
    from kvmesh.redis.address import RedisAccess

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep `indexer` a subcommand when this app runs alone."""


@app.command("indexer")
@with_redis
@with_admin_access
def indexer(
    access: "RedisAccess",
    admin: "AdminAccess",
    model: Annotated[
        str | None,
        typer.Option(
            help="Model name as clients write it; part of every block key. Required, unless pools are followed: these "
            "have theirs from the annotation kvmesh.io/model or from their pods."
        ),
    ] = None,
    endpoints: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="vLLM pods to follow, by their API address. Required, unless --kubernetes or --pools finds them.",
        ),
    ] = None,
    kubernetes: Annotated[
        bool,
        typer.Option(
            "--kubernetes",
            help="Follow the pods of all InferencePools, and of Services labelled kvmesh.io/pool=true.",
        ),
    ] = False,
    pools: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Follow the pods of the pools in this folder of YAML or JSON documents (InferencePool, Service, Pod), "
            "watched for changes, instead of asking Kubernetes.",
        ),
    ] = None,
    namespaces: Annotated[
        str, typer.Option(metavar="A,B,…", help="With --kubernetes: these namespaces alone. Default: all.")
    ] = "",
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
    from kvmesh.documents.documents import KubernetesConfigError
    from kvmesh.errors import ListenError, SettingError

    try:
        documents = _documents(kubernetes=kubernetes, folder=pools, namespaces=namespaces)
        if documents is None:
            missing = " and ".join(
                name for name, value in (("--endpoints", endpoints), ("--model", model)) if value is None
            )
            if missing:
                raise SettingError(f"{missing} missing; or find pods and models by --kubernetes or --pools FOLDER")
        elif model or endpoints:
            raise SettingError("--kubernetes and --pools find endpoints and models; leave out --endpoints and --model")
        settings = IndexerSettings(
            host=host,
            admin_port=indexer_admin_port,
            redis_url=access,
            endpoints=parse_endpoints(endpoints or ""),
            model=model or "",
            hash_seed=hash_seed,
            event_sources=parse_event_sources(event_sources),
            indexer_id=unique_indexer_id(indexer_id),
            lease_seconds=lease_seconds,
            documents=documents,
            admin_access=admin,
        )
        _run(settings)
    except (SettingError, ListenError, KubernetesConfigError) as error:
        typer.echo(f"kvmesh indexer: {error}", err=True)
        raise typer.Exit(2) from None


def _documents(*, kubernetes: bool, folder: Path | None, namespaces: str) -> "DocumentSource | None":
    """Return where pools come from, None if these are not followed. Raise SettingError."""
    from kvmesh.errors import SettingError

    if kubernetes and folder is not None:
        raise SettingError("--kubernetes and --pools exclude each other: give one of them")
    if namespaces and not kubernetes:
        raise SettingError("--namespaces belongs to --kubernetes")
    if folder is not None and not folder.is_dir():
        raise SettingError(f"--pools: {folder} is no folder")
    if not kubernetes and folder is None:
        return None
    from kvmesh.documents.document_kinds import POOL_KINDS
    from kvmesh.documents.documents import ClusterAccess
    from kvmesh.documents.sources import FolderSource, kubernetes_source

    if folder is not None:
        return FolderSource(folder)
    names = tuple(name.strip() for name in namespaces.split(",") if name.strip())
    return kubernetes_source(ClusterAccess(), kinds=POOL_KINDS, namespaces=names)


def _run(settings: Any) -> None:
    """Run until SIGTERM or SIGINT."""
    import uvloop

    if settings.documents is not None:
        _allow_files()
    uvloop.run(_until_signalled(settings))


def _allow_files() -> None:
    """Use as many file descriptors as we may: a stream takes about eight, and the default limit is 1,024."""
    import resource
    from contextlib import suppress

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # as many as there are must do then
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_signalled(settings: Any) -> None:
    import asyncio
    import signal

    from kv_indexer.service import IndexerService
    from kvmesh.documents.documents import KubernetesConfigError

    task = asyncio.create_task(IndexerService(settings).run(), name="indexer")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return  # asked to end: no failure
    except ExceptionGroup as group:
        known, other = group.split(KubernetesConfigError)
        if known is None or other is not None:
            raise
        raise known.exceptions[0] from None
