"""Where the picker's documents come from, and where what policies came to is written: as the settings say.

Run by `service`. In a cluster one elected replica writes the status; a folder has none, the log and `/policies` tell.
"""

import asyncio
import os
import secrets
import socket
from pathlib import Path

from extproc.errors import ConfigError, first_error
from extproc.policy.inference_policy import GROUP, KIND
from extproc.policy.mesh_policy import MeshState
from extproc.pools.mesh import MeshFollower
from extproc.settings.config import PickerSettings
from kvmesh.documents.documents import ClusterAccess, DocumentKey, DocumentSource, KubernetesConfigError, StatusUpdate
from kvmesh.documents.sources import FolderSource, kubernetes_source, status_writer

SERVICE_ACCOUNT_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


async def follow_source(
    settings: PickerSettings, follower: MeshFollower, *, source: DocumentSource | None = None
) -> None:
    """Follow the documents until cancelled; `source` goes before what the settings say.

    Raise ConfigError where no cluster is configured.
    """
    if source is not None:
        await follower.run(source)
    elif settings.policies_folder is not None:
        await follower.run(FolderSource(settings.policies_folder))
    else:
        try:
            await _follow_cluster(settings, follower)
        except* KubernetesConfigError as errors:
            raise ConfigError(f"--kubernetes: {first_error(errors)}") from errors


async def _follow_cluster(settings: PickerSettings, follower: MeshFollower) -> None:
    """Follow the cluster, and write the status while elected."""
    access = ClusterAccess()
    writer = status_writer(access, lease_namespace=own_namespace(), identity=own_name())
    follower.told = lambda state: writer.want(status_updates(state))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(writer.run(), name="write status")
        documents = kubernetes_source(access, namespaces=namespaces_read(settings))
        tasks.create_task(follower.run(documents), name="follow documents")


def status_updates(state: MeshState) -> list[StatusUpdate]:
    """Return what the policies' documents do not say yet."""
    return [
        StatusUpdate(
            key=DocumentKey(group=GROUP, kind=KIND, namespace=status.namespace, name=status.name),
            uid=status.uid,
            generation=status.observed_generation,
            status=status.document(),
        )
        for status in state.unwritten
    ]


def namespaces_read(settings: PickerSettings) -> list[str]:
    """Return the namespaces to be read, none for all; the one with the mesh's policies is always among them."""
    return sorted(settings.namespaces | {settings.root_namespace}) if settings.namespaces else []


def own_namespace() -> str:
    """Return the namespace that this process runs in: where its lease is."""
    told = os.environ.get("POD_NAMESPACE")
    if told:
        return told
    try:
        return SERVICE_ACCOUNT_NAMESPACE.read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


def own_name() -> str:
    """Return a name for this process that no other one has."""
    return f"{os.environ.get('POD_NAME') or socket.gethostname()}-{secrets.token_hex(4)}"
