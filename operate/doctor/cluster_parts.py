"""Finds the parts of an installation in a cluster: picker and indexer by their Services, proxies by NetworkPolicy.

For unreachable parts a finding gives the command that makes them reachable: Envoy's admin page listens only on its
pod's loopback, and Services are unreachable from outside the cluster.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from extproc.pages.findings import Finding, unchecked
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import ClusterAccess, Document
from kvmesh.documents.kubernetes_client import Connection, failure_of, resource_class
from operate.install.network_objects import NAMESPACE_NAME
from operate.install.objects import component_labels
from operate.install.plan import GRPC_PORT, INDEXER, INDEXER_ADMIN_PORT, PICKER, PICKER_ADMIN_PORT

CHECK = "cluster-parts"
ENVOY_ADMIN_PORT = 15000  # of istio-proxy
CONNECT_SECONDS = 2.0
MOST_PROXIES = 3  # shown per gateway: all its proxies have the same configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A process with an admin page."""

    flag: str  # of `kvmesh doctor`
    target: str  # in kubectl port-forward's syntax
    namespace: str
    host: str  # reachable at most from within the cluster
    port: int

    @property
    def url(self) -> str:
        """Return its URL within the cluster."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def command(self) -> str:
        """Return the port-forward command, and the flag for its address."""
        forward = f"kubectl -n {self.namespace} port-forward {self.target} {self.port}"
        return f"run `{forward}` and give --{self.flag} http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """URLs of the reachable parts by flag, and findings on the others."""

    urls: dict[str, str]
    findings: tuple[Finding, ...]


async def locate_parts(access: ClusterAccess, *, named: Sequence[str], namespaces: Collection[str] = ()) -> Located:
    """Find the parts that `named` lacks, in these namespaces (empty: all). API failures become findings."""
    connection = Connection(access)
    cluster = _Cluster(connection, sorted(namespaces))
    looks: dict[str, Callable[[], Awaitable[list[Part]]]] = {
        "picker": partial(cluster.services, PICKER, flag="picker", port=PICKER_ADMIN_PORT),
        "indexer": partial(cluster.services, INDEXER, flag="indexer", port=INDEXER_ADMIN_PORT),
        "envoy-admin": cluster.proxies,
    }
    parts: list[Part] = []
    refused: dict[tuple[str, str], list[str]] = {}
    try:
        for flag, look in looks.items():
            if flag in named:
                continue
            try:
                found = await look()
            except Exception as failure:  # a foreign library and server: any exception is a result
                refused.setdefault(await _why(connection, failure), []).append(flag)
                continue
            parts += found
            if not found:
                fix = f"run `kvmesh install`, or name --{flag} where it was installed otherwise"
                refused["`kvmesh install` has made none in this cluster", fix] = [flag]
    finally:
        await connection.close()
    findings = [unchecked(", ".join(flags), seen, fix=fix) for (seen, fix), flags in refused.items()]
    reached = await asyncio.gather(*(_connects(part.host, part.port) for part in parts))
    urls: dict[str, str] = {}
    for part, is_reached in zip(parts, reached, strict=True):
        if is_reached and part.flag not in urls:
            urls[part.flag] = part.url
    for part in parts:
        if part.flag not in urls:
            where = f"{part.namespace}/{part.target.rpartition('/')[2]}"
            findings.append(unchecked(where, f"{part.url} cannot be reached from here", fix=part.command))
    return Located(urls=urls, findings=tuple(replace(finding, check=CHECK) for finding in findings))


async def _why(connection: Connection, failure: Exception) -> tuple[str, str]:
    told = failure_of(failure)
    if told.code != 403:
        return told.message, "see that the API server is there, or name --picker, --indexer and --envoy-admin"
    if await connection.is_starting():
        return told.message, "the API server is starting and refuses all until it is ready: try again then"
    return told.message, "give us the right to list them, or name the address by its flag"


class _Cluster:
    def __init__(self, connection: Connection, namespaces: Sequence[str]) -> None:
        self._client = connection.client
        self._namespaces = namespaces or ["*"]

    async def services(self, component: str, *, flag: str, port: int) -> list[Part]:
        """Return the Services of a component."""
        return [
            Part(flag=flag, target=f"svc/{name}", namespace=space, host=f"{name}.{space}.svc", port=port)
            for each in await self._of_install(_SERVICE, component)
            for name, space in [(each["metadata"]["name"], each["metadata"]["namespace"])]
        ]

    async def proxies(self) -> list[Part]:
        """Return the pods that may call a picker by its NetworkPolicy, which exists in every mode."""
        return [
            part
            for policy in await self._of_install(_POLICY, PICKER)
            for namespace, labels in _callers(policy)
            for part in list(_proxies(await self._listed(_POD, labels, namespace)))[:MOST_PROXIES]
        ]

    async def _of_install(self, kind: DocumentKind, component: str) -> list[Document]:
        labels = component_labels(component)  # Helm replaces the label `managed-by`
        return [each for space in self._namespaces for each in await self._listed(kind, labels, space)]

    async def _listed(self, kind: DocumentKind, labels: Mapping[str, str], namespace: str) -> list[Document]:
        found = self._client.list(resource_class(kind), namespace=namespace, labels=dict(labels))
        return [each async for each in found]


def _callers(policy: Document) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the namespace and the labels of each group of pods that may call the picker."""
    for rule in policy["spec"].get("ingress") or ():
        if GRPC_PORT in {each.get("port") for each in rule.get("ports") or ()}:
            for peer in rule.get("from") or ():
                namespace = (peer.get("namespaceSelector") or {}).get("matchLabels", {}).get(NAMESPACE_NAME)
                labels = (peer.get("podSelector") or {}).get("matchLabels")
                if namespace and labels:
                    yield namespace, labels


def _proxies(documents: Sequence[Document]) -> Iterator[Part]:
    for document in documents:
        if ip := (document.get("status") or {}).get("podIP"):
            name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
            yield Part(
                flag="envoy-admin", target=f"pod/{name}", namespace=namespace, host=str(ip), port=ENVOY_ADMIN_PORT
            )


async def _connects(host: str, port: int) -> bool:
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return True
    return False


_SERVICE = DocumentKind(group="", version="v1", kind="Service", plural="services", keep=dict)
_POD = DocumentKind(group="", version="v1", kind="Pod", plural="pods", keep=dict)
_POLICY = DocumentKind(
    group="networking.k8s.io", version="v1", kind="NetworkPolicy", plural="networkpolicies", keep=dict
)
