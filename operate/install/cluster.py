"""The part of the Kubernetes API that installing needs, and its errors."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc.errors import KvmeshError
from operate.install.objects import Document, Kind


class InstallError(KvmeshError):
    """The cluster refuses or lacks something; the message says what to do."""


class ForbiddenError(InstallError):
    """Permission denied (403)."""


class Cluster(Protocol):
    """The Kubernetes API. Every call has a deadline; failures raise InstallError, or ForbiddenError for 403."""

    def serves(self, kind: Kind) -> bool:
        """Tell whether the cluster has this kind."""

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        """Apply by server-side apply and return the resulting object.

        `force` takes over fields of other managers; `rehearse` is a dry run.
        """

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        """Return all objects with these labels, in one namespace or in all."""

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        """Delete an object and its dependents; a missing object is no error."""
