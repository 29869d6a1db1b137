"""Makes what reads documents and writes status. imports lightkube only where needed."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvmesh.documents.document_folder import FolderSource
from kvmesh.documents.document_kinds import MESH_KINDS, DocumentKind
from kvmesh.documents.documents import ClusterAccess, DocumentSource

if TYPE_CHECKING:
    from kvmesh.documents.status_writer import StatusWriter


def kubernetes_source(
    access: ClusterAccess, *, kinds: Sequence[DocumentKind] = MESH_KINDS, namespaces: Sequence[str] = ()
) -> DocumentSource:
    """Return the documents of a cluster, or of some of its namespaces."""
    from kvmesh.documents.kubernetes_watch import KubernetesSource  # noqa: PLC0415 # 0.1 s and 20 MB

    return KubernetesSource(access, kinds=kinds, namespaces=namespaces)


def folder_source(folder: Path) -> DocumentSource:
    """Return the documents of a folder of YAML and JSON files."""
    return FolderSource(folder)


def status_writer(
    access: ClusterAccess, *, lease_namespace: str, identity: str, lease_name: str = "kvmesh-status-writer"
) -> "StatusWriter":
    """Return what writes the status of policies while it leads; `identity` is this replica's own: the pod's name."""
    from kvmesh.documents.status_writer import StatusWriter  # noqa: PLC0415

    return StatusWriter(access, lease_namespace=lease_namespace, lease_name=lease_name, identity=identity)
