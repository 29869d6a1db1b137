"""The command `kvmesh indexer`. Imports late to start fast."""

import asyncio
import resource
import signal
from contextlib import suppress
from dataclasses import replace

import typer

from kv_indexer.config import IndexerSettings
from kvmesh.documents.document_kinds import POOL_KINDS
from kvmesh.documents.documents import ClusterAccess, DocumentSource, KubernetesConfigError
from kvmesh.errors import ListenError, SettingError
from kvmesh.heap import return_large_blocks
from kvmesh.options import fails_in_one_line, takes_settings

app = typer.Typer()


@app.callback()
def _group() -> None:
    """Keep `indexer` a subcommand when this app runs alone."""


@app.command("indexer")
@fails_in_one_line("indexer", dict.fromkeys((SettingError, ListenError, KubernetesConfigError), 2))
@takes_settings
def indexer(settings: IndexerSettings) -> None:
    """Follow the KV events of vLLM pods and keep the prefix index in Redis up to date."""
    import uvloop

    documents = _documents(settings)
    if documents is None:
        given = {"--endpoints": settings.endpoints, "--model": settings.model}
        if missing := " and ".join(flag for flag, value in given.items() if not value):
            raise SettingError(f"{missing} missing; or find pods and models by --kubernetes or --policies FOLDER")
    elif settings.model or settings.endpoints:
        raise SettingError("--kubernetes and --policies find endpoints and models; leave out --endpoints and --model")
    else:
        _allow_files()
    return_large_blocks()  # one message may hold a long batch of a pod's events
    uvloop.run(_until_signalled(replace(settings, documents=documents)))


def _documents(settings: IndexerSettings) -> DocumentSource | None:
    """Return the source of the pools, or None if no pools are followed. Raise SettingError."""
    folder = settings.policies_folder
    if settings.kubernetes and folder is not None:
        raise SettingError("--kubernetes and --policies exclude each other: give one of them")
    if settings.namespaces and not settings.kubernetes:
        raise SettingError("--namespaces belongs to --kubernetes")
    if folder is not None and not folder.is_dir():
        raise SettingError(f"--policies: {folder} is no folder")
    if not settings.kubernetes and folder is None:
        return None
    from kvmesh.documents.sources import FolderSource, kubernetes_source

    if folder is not None:
        return FolderSource(folder)
    names = tuple(name.strip() for name in settings.namespaces.split(",") if name.strip())
    return kubernetes_source(ClusterAccess(program="kvmesh-indexer"), kinds=POOL_KINDS, namespaces=names)


def _allow_files() -> None:
    """Raise the limit on file descriptors to the maximum: a stream takes about eight, and the default is 1,024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # go on with the limit as it is
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _until_signalled(settings: IndexerSettings) -> None:
    from kv_indexer.service import IndexerService

    task = asyncio.create_task(IndexerService(settings).run(), name="indexer")
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return  # a requested stop is no failure
    except ExceptionGroup as group:
        known, other = group.split(KubernetesConfigError)
        if known is None or other is not None:
            raise
        raise known.exceptions[0] from None
