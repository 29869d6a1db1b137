"""The Kubernetes API as far as installing needs it, and how it refuses."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc.errors import KvmeshError
from extproc.install.objects import Document, Kind


class InstallError(KvmeshError):
    """The cluster refuses, or lacks something; the message says what to do."""


class ForbiddenError(InstallError):
    """We lack a right."""


class Cluster(Protocol):
    """The Kubernetes API. Every call has a deadline; refusals are InstallError, ForbiddenError among them."""

    def serves(self, kind: Kind) -> bool:
        """Tell whether the cluster has this kind."""

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        """Apply by server-side apply and return what the object is then.

        `force` takes over fields that others manage, `rehearse` changes nothing.
        """

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        """Return all objects with these labels, of one namespace or of all."""

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        """Delete an object and what it owns; one that is gone is no error."""
