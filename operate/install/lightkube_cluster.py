"""The Kubernetes API through lightkube: implements `cluster.Cluster`."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import httpx2
from lightkube import Client
from lightkube.config.client_adapter import Client as HttpClient
from lightkube.config.client_adapter import ConnectionParams
from lightkube.core.exceptions import ApiError, LoadResourceError
from lightkube.core.exceptions import ConfigError as KubeConfigError
from lightkube.core.resource_registry import resource_registry
from lightkube.generic_resource import create_global_resource, create_namespaced_resource

from kvmesh.documents.bounded_stream import bound
from kvmesh.documents.cluster_config import ClusterConfig, read_cluster_config
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError
from operate.install.cluster import ForbiddenError, InstallError
from operate.install.objects import OWNER, Document, Kind, kind_of

TIMEOUT_SECONDS = 20.0
STARTING_SECONDS = 30.0  # for an API server that has not loaded its roles yet
POLL_SECONDS = 1.0
ALL = "*"
ADVICE = {
    401: "; log in again",
    403: "; kvmesh install needs the rights of a cluster's administrator; those of its namespaces do with "
    "--scope namespaced --no-create-namespace --skip-crds",
    409: "; somebody else manages these fields: --force-conflicts takes them over",
}

NOT_READY = "; or wait until the API server is ready: its /readyz does not say so"

T = TypeVar("T")


class LightkubeCluster:
    """A cluster; `place` describes it for users."""

    def __init__(
        self, access: ClusterAccess, *, say: Callable[[str], None], sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Raise InstallError if no cluster is configured."""
        self._say, self._sleep = say, sleep
        self._starting_seconds = STARTING_SECONDS
        try:
            config = read_cluster_config(access)
            transport = _Transport(config)
            timeout = httpx2.Timeout(TIMEOUT_SECONDS)
            self._client = Client(config=config.login, timeout=timeout, transport=transport, field_manager=OWNER)
            self._http = HttpClient(config.login, ConnectionParams(timeout=timeout, transport=transport))
        except (KubernetesConfigError, KubeConfigError, OSError) as error:
            raise InstallError(f"no cluster is configured (KUBECONFIG): {error}") from error
        self.place = f"{config.server} (context {config.context})"

    def serves(self, kind: Kind) -> bool:
        """Look it up in the API server's discovery, which needs no rights."""
        path = f"/apis/{kind.api_version}" if kind.group else f"/api/{kind.version}"

        def look() -> bool:
            answer = self._http.get(path).raise_for_status()
            return any(each["name"] == kind.plural for each in answer.json()["resources"])

        try:
            return self._call(f"look for {kind.plural}", look)
        except NotThereError:
            return False

    def apply(self, document: Document, *, force: bool, rehearse: bool = False) -> Document:
        """Apply an object, or dry-run it."""
        wanted = _resource(kind_of(document["kind"])).from_dict(dict(document))
        name = f"{document['kind']} {document['metadata']['name']}"
        applied = self._call(f"apply {name}", lambda: self._client.apply(wanted, force=force, dry_run=rehearse))
        return dict(applied.to_dict())

    def get(self, kind: Kind, name: str, namespace: str | None) -> Document | None:
        """Return an object, or None."""
        look = partial(self._client.get, _resource(kind), name, **_in(namespace))
        try:
            return dict(self._call(f"get {kind.name} {name}", look).to_dict())
        except NotThereError:
            return None

    def labelled(self, kind: Kind, labels: Mapping[str, str], namespace: str | None = None) -> Sequence[Document]:
        """Return objects by label."""
        where = (namespace or ALL) if kind.namespaced else None

        def find() -> list[Any]:
            return list(self._client.list(_resource(kind), namespace=where, labels=dict(labels) or None))

        found = self._call(f"list {kind.plural}{f' in {namespace}' if namespace else ''}", find)
        return [each.to_dict() | {"kind": kind.name} for each in found]

    def delete(self, kind: Kind, name: str, namespace: str | None) -> None:
        """Delete an object in the background."""
        delete = partial(self._client.delete, _resource(kind), name, **_in(namespace))
        with suppress(NotThereError):
            self._call(f"delete {kind.name} {name}", delete)

    def _call(self, what: str, call: Callable[[], T]) -> T:
        """Call the API server, with retries while it starts. Raise the errors of `cluster.Cluster`."""
        was_ready = has_waited = False
        while True:
            try:
                return call()
            except httpx2.HTTPStatusError as error:
                code = error.response.status_code
                # 429: it is overloaded, or sets up storage for a new CRD. 403: until its roles are loaded it refuses
                # all but administrators.
                may_pass = code == 429 or (code == 403 and not was_ready)
                if self._starting_seconds <= 0 or not may_pass:
                    raise _refusal(what, error, is_ready=code != 403 or self._is_ready()) from error
                was_ready = code == 403 and self._is_ready()
                if was_ready:
                    continue  # it may have become ready since the refusal
                if not has_waited:
                    self._say(f"waiting for the API server, which is not ready for this yet: {what}")
                has_waited = True
                self._starting_seconds -= POLL_SECONDS
                self._sleep(POLL_SECONDS)
            except httpx2.HTTPError as error:
                raise InstallError(f"cannot {what}: the Kubernetes API does not answer: {error}") from error

    def _is_ready(self) -> bool:
        """Tell whether the API server is ready; while it starts, it may refuse this request, too."""
        try:
            return bool(self._http.get("/readyz").status_code == 200)
        except httpx2.HTTPError:
            return False


class NotThereError(InstallError):
    """The object or kind does not exist (404)."""


def _refusal(what: str, error: httpx2.HTTPStatusError, *, is_ready: bool) -> InstallError:
    """Translate an error response. Its body is a Status only if the API server knows the kind."""
    code = error.response.status_code
    words = error.status.message if isinstance(error, ApiError) else f"HTTP {code}: {error.response.text[:200].strip()}"
    kind = {403: ForbiddenError, 404: NotThereError}.get(code, InstallError)
    return kind(f"cannot {what}: {words}{ADVICE.get(code, '')}{'' if is_ready else NOT_READY}")


class _Transport(httpx2.HTTPTransport):
    """Adds what lightkube lacks: extra headers, the TLS server name, a content type for responses without one."""

    def __init__(self, config: ClusterConfig) -> None:
        super().__init__(verify=config.verify, proxy=config.proxy)
        self._config = config

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        self._config.dress(request)
        response = bound(super().handle_request(request))
        response.headers.setdefault("Content-Type", "text/plain")  # such as a load balancer's 502
        return response


def _resource(kind: Kind) -> Any:
    """Return lightkube's class for a kind: built-in for Kubernetes' own kinds, created once for others."""
    try:
        return resource_registry.load(kind.api_version, kind.name)
    except LoadResourceError:
        create = create_namespaced_resource if kind.namespaced else create_global_resource
        return create(kind.group, kind.version, kind.name, kind.plural)


def _in(namespace: str | None) -> dict[str, Any]:
    return {"namespace": namespace} if namespace is not None else {}
