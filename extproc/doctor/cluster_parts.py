"""Finds the parts of an installation in a cluster: picker and indexer by their Services, gateways by our EnvoyFilters.

What cannot be reached from here is a finding with the command that makes it reachable: Envoy's admin page listens on
the loopback of its pod alone, and outside a cluster nobody reaches its Services.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from extproc.doctor.findings import Finding, unchecked
from extproc.install.objects import ENVOY_FILTER, NAME, OWNED
from extproc.install.plan import INDEXER, INDEXER_ADMIN_PORT, PICKER, PICKER_ADMIN_PORT
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import ClusterAccess, Document

CHECK = "cluster-parts"
ENVOY_ADMIN_PORT = 15000  # of istio-proxy
CONNECT_SECONDS = 2.0
MOST_PROXIES = 3  # of one EnvoyFilter that are named: they have the same configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something with an admin page."""

    flag: str  # of `kvmesh doctor`
    target: str  # as kubectl port-forward names it
    namespace: str
    host: str  # reachable within the cluster, if at all
    port: int

    @property
    def url(self) -> str:
        """Return its address within the cluster."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def command(self) -> str:
        """Return what makes it reachable from here, and how the doctor is told."""
        forward = f"kubectl -n {self.namespace} port-forward {self.target} {self.port}"
        return f"run `{forward}` and give --{self.flag} http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """What is reachable, by flag, and findings on the rest."""

    urls: dict[str, str]
    findings: tuple[Finding, ...]


async def locate_parts(access: ClusterAccess, *, named: Sequence[str]) -> Located:
    """Find what no flag of `named` has given. Never raises for what the cluster answers."""
    from kvmesh.documents.kubernetes_client import Connection, failure_of  # noqa: PLC0415 # 0.1 s and 20 MB

    connection = Connection(access)
    urls: dict[str, str] = {}
    findings: list[Finding] = []
    try:
        parts = [each for each in await _parts(connection.client) if each.flag not in named]
    except Exception as failure:  # an API of other people: whatever it raises is the answer
        told = failure_of(failure)
        fix = "give us the right to list services, pods and envoyfilters, or name --picker, --indexer and --envoy-admin"
        if told.code == 403 and await connection.is_starting():
            fix = "the API server is starting and refuses all until it is ready: try again then"
        return Located(urls={}, findings=(_found(unchecked("cluster", told.message, fix=fix)),))
    finally:
        await connection.close()
    for flag in ("picker", "indexer", "envoy-admin"):
        if flag not in named and not any(part.flag == flag for part in parts):
            fix = f"run `kvmesh install`, or name --{flag} where it was installed otherwise"
            findings.append(_found(unchecked(flag, "`kvmesh install` has made none in this cluster", fix=fix)))
    reached = await asyncio.gather(*(_connects(part.host, part.port) for part in parts))
    for part, is_reached in zip(parts, reached, strict=True):
        if is_reached and part.flag not in urls:
            urls[part.flag] = part.url
    for part in parts:
        if part.flag not in urls:
            where = f"{part.namespace}/{part.target.rpartition('/')[2]}"
            findings.append(_found(unchecked(where, f"{part.url} cannot be reached from here", fix=part.command)))
    return Located(urls=urls, findings=tuple(findings))


async def _parts(client: Any) -> list[Part]:
    from kvmesh.documents.kubernetes_client import failure_of, resource_class  # noqa: PLC0415

    async def listed(kind: DocumentKind, labels: dict[str, str], namespace: str = "*") -> list[Document]:
        try:
            return [each async for each in client.list(resource_class(kind), namespace=namespace, labels=labels)]
        except Exception as failure:
            if failure_of(failure).code == 404:
                return []  # a cluster without Istio
            raise

    parts = [
        part
        for name, flag, port in ((PICKER, "picker", PICKER_ADMIN_PORT), (INDEXER, "indexer", INDEXER_ADMIN_PORT))
        for part in _services(await listed(_SERVICE, {**OWNED, NAME: name}), flag=flag, port=port)
    ]
    for document in await listed(_FILTER, dict(OWNED)):
        namespace = document["metadata"]["namespace"]
        labels = (document.get("spec") or {}).get("workloadSelector", {}).get("labels", {})
        parts += list(_proxies(await listed(_POD, dict(labels), namespace)))[:MOST_PROXIES]
    return parts


def _services(documents: Sequence[Document], *, flag: str, port: int) -> Iterator[Part]:
    for document in documents:
        name, namespace = document["metadata"]["name"], document["metadata"]["namespace"]
        yield Part(flag=flag, target=f"svc/{name}", namespace=namespace, host=f"{name}.{namespace}.svc", port=port)


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


def _found(finding: Finding) -> Finding:
    return Finding(check=CHECK, severity=finding.severity, subject=finding.subject, seen=finding.seen, fix=finding.fix)


_SERVICE = DocumentKind(group="", version="v1", kind="Service", plural="services", keep=dict)
_POD = DocumentKind(group="", version="v1", kind="Pod", plural="pods", keep=dict)
_FILTER = DocumentKind(
    group=ENVOY_FILTER.group,
    version=ENVOY_FILTER.version,
    kind=ENVOY_FILTER.name,
    plural=ENVOY_FILTER.plural,
    keep=dict,
)
