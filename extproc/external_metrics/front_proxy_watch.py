"""Reads from the cluster who may ask, again and again: the API server's certificates are renewed.

What was read last stays until something better can be read.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from extproc.external_metrics.front_proxy import (
    NAME,
    NAMESPACE,
    READER_ROLE,
    FrontProxy,
    FrontProxyError,
    read_front_proxy,
)
from kvmesh.documents.document_kinds import DocumentKind
from kvmesh.documents.documents import ClusterAccess, KubernetesConfigError

log = logging.getLogger(__name__)

AGAIN_SECONDS = 60.0
RETRY_SECONDS = 5.0
REQUEST_SECONDS = 10.0
CONFIG_MAP = DocumentKind(group="", version="v1", kind="ConfigMap", plural="configmaps", keep=dict)
ReadConfigMap = Callable[[], Awaitable[Mapping[str, Any]]]


class FrontProxyWatch:
    """What was read last."""

    def __init__(self, read: ReadConfigMap | None = None) -> None:
        """`read` returns the ConfigMap; None: of the cluster that we run in, or of the kubeconfig."""
        self._read = read or _read_from_cluster
        self.current: FrontProxy | None = None
        self.problem = "not read yet"  # "": none

    async def run(self) -> None:
        """Read until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(RETRY_SECONDS if self.problem else AGAIN_SECONDS)

    async def look(self) -> None:
        """Read once."""
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                self.current = read_front_proxy(await self._read())
        except TimeoutError:
            self._say("the Kubernetes API does not answer")
        except (FrontProxyError, KubernetesConfigError) as error:
            self._say(str(error))
        except Exception as error:  # an API of other people: whatever our client raises is the answer
            self._say(_words(error))
        else:
            self.problem = ""

    def _say(self, problem: str) -> None:
        if problem != self.problem:
            what = "what was known stays" if self.current is not None else "nobody is let in"
            log.error("it cannot be read who may ask for external metrics; %s: %s", what, problem)
        self.problem = problem


async def _read_from_cluster() -> Mapping[str, Any]:
    from kvmesh.documents.kubernetes_client import Connection, resource_class  # noqa: PLC0415 # 0.1 s and 20 MB

    # its own each time: once a minute, and certificates and tokens are those of now
    connection = await asyncio.to_thread(Connection, ClusterAccess(program="kvmesh-picker"))
    try:
        found: Mapping[str, Any] = await connection.client.get(resource_class(CONFIG_MAP), NAME, namespace=NAMESPACE)
    finally:
        await connection.close()
    return found


def _words(error: Exception) -> str:
    from kvmesh.documents.kubernetes_client import failure_of  # noqa: PLC0415

    failure = failure_of(error)
    if failure.code == 403:
        return f"{failure.message}; bind the picker's account to the Role {NAMESPACE}/{READER_ROLE}"
    return failure.message
