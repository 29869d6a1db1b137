"""A whole picker that follows documents, and a gateway that names pools: for the tests of pools.

The documents are those of the Kubernetes API, handed over by `DocumentDesk` in place of an API server or a folder. Pods
listen on several loopback addresses, as pods of a cluster have several IPs and one port.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from extproc.ext_proc.exchange import BodyMode
from extproc.service import serve
from extproc.settings.config import PickerSettings
from kvmesh.documents.documents import Snapshot
from operate.local.ports import pick_free_port
from tests.integration.hermetic_envoy import CALL_SECONDS, PROCESS, Envoy, HttpExchange, Refused, Routed
from tests.integration.hermetic_picker import SETTINGS, Picker
from tests.integration.overload_pods import MODEL, HeldPod

HOST = "127.0.0.1"
DEADLINE_SECONDS = 15.0
ENVOY = Envoy(mode=BodyMode.FULL_DUPLEX_STREAMED, raw=True)
PODS_PORT_RANGE = 250  # addresses 127.0.1.x


class DocumentDesk:
    """Implements `kvmesh.documents.documents.DocumentSource`: documents as a test puts them."""

    def __init__(self) -> None:
        self._documents: dict[tuple[str, str], dict[str, Any]] = {}
        self._kinds: dict[str, tuple[dict[str, Any], ...]] = {}
        self._tell: Callable[[Snapshot], None] | None = None

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        self._tell = on_change
        self._changed(*{kind for kind, _ in self._documents})
        await asyncio.Event().wait()

    def put(self, *documents: dict[str, Any]) -> None:
        """Create or replace documents."""
        for document in documents:
            metadata = document["metadata"]
            self._documents[document["kind"], f"{metadata['namespace']}/{metadata['name']}"] = document
        self._changed(*{document["kind"] for document in documents})

    @property
    def documents(self) -> tuple[dict[str, Any], ...]:
        """All of them."""
        return tuple(self._documents.values())

    def has(self, kind: str, name: str) -> bool:
        """Tell whether it is there."""
        return (kind, name) in self._documents

    def remove(self, kind: str, name: str) -> None:
        """Delete one, named "namespace/name"."""
        del self._documents[kind, name]
        self._changed(kind)

    def _changed(self, *kinds: str) -> None:
        for changed in kinds:  # the others' tuples stay the same objects, as every source promises
            names = sorted(name for kind, name in self._documents if kind == changed)
            self._kinds[changed] = tuple(self._documents[changed, name] for name in names)
        if self._tell is not None:
            self._tell(Snapshot(documents=dict(self._kinds), synced=True))


def pool_document(name: str, *, port: int, hosts: str = "", namespace: str = "llm") -> dict[str, Any]:
    """Return an InferencePool of the pods labelled `pool: name`."""
    annotations = {"kvmesh.io/hosts": hosts} if hosts else {}
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": _metadata(name, namespace) | {"annotations": annotations},
        "spec": {"selector": {"matchLabels": {"pool": name}}, "targetPorts": [{"number": port}]},
    }


def pod_document(
    address: str,
    *,
    pool: str,
    ready: bool = True,
    terminating: bool = False,
    namespace: str = "llm",
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the Pod that listens at an address; `labels` are further ones."""
    ip = address.rpartition(":")[0]
    metadata = _metadata(f"pod-{ip.replace('.', '-')}", namespace) | {"labels": {"pool": pool, **(labels or {})}}
    if terminating:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": metadata,
        "spec": {},
        "status": {
            "podIP": ip,
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def policy_document(name: str, *, pool: str | None = None, namespace: str = "llm", **spec: Any) -> dict[str, Any]:
    """Return an InferencePolicy; without a pool it is its namespace's."""
    group = "inference.networking.k8s.io"
    targets = [{"group": group, "kind": "InferencePool", "name": pool}] if pool else []
    return {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": _metadata(name, namespace),
        "spec": ({"targetRefs": targets} if targets else {}) | spec,
    }


def _metadata(name: str, namespace: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{namespace}-{name}",
        "generation": 1,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }


@dataclass(slots=True, kw_only=True)
class Mesh:
    """A picker, its documents, and gateways in front of it."""

    picker: Picker
    desk: DocumentDesk
    port: int  # of all pods
    open: AsyncExitStack = field(default_factory=AsyncExitStack)
    _hosts: int = 0

    def address(self) -> str:
        """Return an address for one pod more."""
        self._hosts += 1
        return f"127.0.1.{self._hosts}:{self.port}"

    async def pod(self, pool: str, *, address: str | None = None, **changes: Any) -> HeldPod:
        """Start a pod and put its document."""
        host, _, _ = (address or self.address()).rpartition(":")
        pod = HeldPod(**changes)
        await pod.start(self.port, host=host)
        self.open.push_async_callback(pod.stop)
        self.desk.put(pod_document(pod.address, pool=pool))
        return pod

    @asynccontextmanager
    async def exchange(self, *, pool: str | None = None) -> AsyncIterator[HttpExchange]:
        """Open one HTTP exchange through a gateway whose metadata names the pool."""
        async with grpc.aio.insecure_channel(self.picker.grpc_address) as channel:
            method = channel.stream_stream(
                PROCESS,
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )
            metadata = (("x-kvmesh-pool", pool),) if pool is not None else None
            exchange = HttpExchange(ENVOY, partial(method, timeout=CALL_SECONDS, metadata=metadata))
            yield exchange
            await exchange.close()

    async def asked(
        self, *, pool: str | None = None, host: str = "any.example.com", **request: Any
    ) -> Routed | Refused:
        """Return what becomes of one request that ends at once."""
        async with self.exchange(pool=pool) as exchange:
            answer: Routed | Refused = await send(exchange, host=host, **request)
            return answer

    async def pick(self, **request: Any) -> str:
        """Return the endpoint of one request that ends at once."""
        found = await self.asked(**request)
        assert isinstance(found, Routed), found
        return found.endpoints[0]

    async def serves(self, pool: str, *addresses: str) -> None:
        """Wait until the pool has exactly these endpoints with known load."""

        def holds(state: Any) -> bool:
            found = {line["address"] for line in state.get("endpoints", ()) if line["state"] == "ready"}
            return found == set(addresses)

        await self.eventually(f"/state?pool={pool}", holds)

    async def eventually(self, path: str, holds: Callable[[Any], bool]) -> Any:
        """Read an admin page until the condition holds."""
        return await self.picker.eventually(path, holds)


async def send(exchange: HttpExchange, *, host: str = "any.example.com", prompt: str = "hello", **more: Any) -> Any:
    """Send one completion on an open exchange and return what the picker says."""
    headers = {":authority": host} | more.pop("headers", {})
    cluster = more.pop("cluster", None)
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 100} | more
    async with asyncio.timeout(DEADLINE_SECONDS):
        return await exchange.request(json.dumps(body).encode(), headers=headers, cluster=cluster)


@asynccontextmanager
async def running_mesh(
    folder: Path, *documents: dict[str, Any], desk: DocumentDesk | None = None, **changes: Any
) -> AsyncIterator[Mesh]:
    """Start a picker that follows these documents; `mesh.port` is the port of all pods.

    `desk`: where pods' documents are put instead; the picker then follows what its settings say.
    """
    ports: list[int] = []
    while len(ports) < 4:
        ports.append(pick_free_port(host=HOST, avoid=ports))
    stop, source = asyncio.Event(), DocumentDesk() if desk is None else None
    desk = desk or source
    assert desk is not None
    desk.put(*documents)
    settings = PickerSettings(
        **SETTINGS
        | {"grpc_port": ports[0], "admin_port": ports[1], "redis_url": f"redis://{HOST}:{ports[2]}/0"}
        | {"endpoints": (), "policies_folder": folder}
        | changes
    )
    async with aiohttp.ClientSession() as http:
        task = asyncio.create_task(serve(settings, stop=stop, source=source), name="picker")
        picker = Picker(
            grpc_address=f"{HOST}:{ports[0]}", admin=f"http://{HOST}:{settings.admin_port}", pods=(), http=http
        )
        mesh = Mesh(picker=picker, desk=desk, port=ports[3])
        try:
            async with asyncio.timeout(DEADLINE_SECONDS):
                while not await _is_ready(picker):
                    assert not task.done(), task.result()
                    await asyncio.sleep(0.01)
            async with mesh.open:
                yield mesh
        finally:
            stop.set()
            await task


async def _is_ready(picker: Picker) -> bool:
    try:
        async with picker.http.get(f"{picker.admin}/readyz") as answer:
            return answer.status == 200
    except aiohttp.ClientConnectionError:
        return False
