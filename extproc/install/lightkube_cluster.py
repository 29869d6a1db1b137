"""The Kubernetes API through lightkube: implements `installer.Cluster`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx2
from lightkube import Client
from lightkube.core.exceptions import ApiError, LoadResourceError
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import create_global_resource, create_namespaced_resource

from extproc.install.installer import InstallError
from extproc.install.objects import OWNER, Document, Kind, kind_of

TIMEOUT_SECONDS = 20.0


class LightkubeCluster:
    """One cluster: the one that the kubeconfig names, or the one that this runs in."""

    def __init__(self) -> None:
        """Raise InstallError where no cluster is configured."""
        try:
            self._client = Client(timeout=httpx2.Timeout(TIMEOUT_SECONDS), field_manager=OWNER)
        except KubeConfigError as error:
            raise InstallError(f"no cluster is configured (KUBECONFIG): {error}") from error

    def serves(self, kind: Kind) -> bool:
        """Ask for one object of it."""
        try:
            with _refusals(f"list {kind.plural}"):
                next(iter(self._client.list(_resource(kind), namespace=_everywhere(kind), chunk_size=1)), None)
        except NotThereError:
            return False
        return True

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> None:
        """Apply one object, or have the API server say what would become of that."""
        resource = _resource(kind_of(document["kind"]))
        name = f"{document['kind']} {document['metadata']['name']}"
        with _refusals(f"apply {name}"):
            self._client.apply(resource.from_dict(dict(document)), force=force, dry_run=rehearse)

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""
        try:
            with _refusals(f"get {kind.name} {name}"):
                found: Any = self._client.get(_resource(kind), name, **_in(namespace))
        except NotThereError:
            return None
        document: dict[str, Any] = found.to_dict()
        return document

    def labelled(self, kind: Kind, labels: Mapping[str, str]) -> Sequence[Document]:
        """Return objects by label."""
        with _refusals(f"list {kind.plural}"):
            found: Any = self._client.list(_resource(kind), namespace=_everywhere(kind), labels=dict(labels) or None)
            return [each.to_dict() | {"kind": kind.name} for each in found]

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        """Delete an object in the background."""
        try:
            with _refusals(f"delete {kind.name} {name}"):
                self._client.delete(_resource(kind), name, **_in(namespace))
        except NotThereError:
            return


class NotThereError(InstallError):
    """404: the object, or the kind."""


@contextmanager
def _refusals(what: str) -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status.code == 404:
            raise NotThereError(f"cannot {what}: {error.status.message}") from error
        advice = {
            403: "; kvmesh install needs the rights of a cluster's administrator",
            409: "; somebody else manages these fields: --force-conflicts takes them over",
        }.get(error.status.code or 0, "")
        raise InstallError(f"cannot {what}: {error.status.message}{advice}") from error
    except httpx2.HTTPError as error:
        raise InstallError(f"cannot {what}: the Kubernetes API does not answer: {error}") from error


def _resource(kind: Kind) -> Any:
    """Return lightkube's class of a kind: it brings those of Kubernetes, and makes the others once."""
    try:
        return resource_registry.load(kind.api_version, kind.name)
    except LoadResourceError:
        create = create_namespaced_resource if kind.namespaced else create_global_resource
        return create(kind.group, kind.version, kind.name, kind.plural)


def _everywhere(kind: Kind) -> str | None:
    return "*" if kind.namespaced else None


def _in(namespace: str | None) -> dict[str, Any]:
    return {"namespace": namespace} if namespace is not None else {}
