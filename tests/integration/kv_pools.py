"""Pools told by hand, and an indexer that follows them; shared by the pools' integration tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from kv_indexer.config import IndexerSettings
from kv_indexer.follow.catch_up import RecoveryPolicy
from kv_indexer.service import IndexerService
from kvmesh.blocks.block_keys import root_key
from kvmesh.documents.documents import Document, Snapshot
from kvmesh.documents.pools import pool_seed
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import prompt

DEADLINE_SECONDS = 20.0
QUICK = RecoveryPolicy(idle_seconds=0.05, retry_seconds=0.02, retry_limit_seconds=0.1, identity_seconds=0.1)
MODEL = "tiny"


class Cluster:
    """What a Kubernetes API would say: implements `DocumentSource`."""

    def __init__(self) -> None:
        self._documents: dict[tuple[str, str], Document] = {}
        self._listeners: list[Callable[[Snapshot], None]] = []
        self.is_reachable = True

    async def run(self, on_change: Callable[[Snapshot], None]) -> None:
        self._listeners.append(on_change)
        try:
            if self.is_reachable:
                on_change(self._snapshot())
            await asyncio.Event().wait()
        finally:
            self._listeners.remove(on_change)

    def pool(self, name: str, *, model: str | None = None) -> None:
        """A Service that takes the pods with its name as label `pool`; each pod has a port of its own, named."""
        annotations = {} if model is None else {"kvmesh.io/model": model}
        self._put(
            {
                "apiVersion": "v1",
                "kind": "Service",
                "metadata": {
                    "namespace": "llm",
                    "name": name,
                    "labels": {"kvmesh.io/pool": "true"},
                    "annotations": annotations,
                },
                "spec": {"selector": {"pool": name}, "ports": [{"name": "http", "port": 80, "targetPort": "api"}]},
            }
        )

    def pod(self, pod: ScriptedPod | str, *, pool: str, ready: bool = True) -> None:
        """Put a pod into a pool, whichever it was in before."""
        address = pod if isinstance(pod, str) else pod.endpoint
        host, _, port = address.rpartition(":")
        self._put(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"namespace": "llm", "name": _pod_name(address), "labels": {"pool": pool}},
                "spec": {"containers": [{"name": "vllm", "ports": [{"name": "api", "containerPort": int(port)}]}]},
                "status": {
                    "phase": "Running",
                    "podIP": host,
                    "podIPs": [{"ip": host}],
                    "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
                },
            }
        )

    def delete(self, what: ScriptedPod | str) -> None:
        """Delete a pod, or a pool by its name."""
        if isinstance(what, str):
            del self._documents["Service", what]
        else:
            del self._documents["Pod", _pod_name(what.endpoint)]
        self._tell()

    def come_back(self) -> None:
        """Answer at last."""
        self.is_reachable = True
        self._tell()

    def _put(self, document: Document) -> None:
        self._documents[document["kind"], document["metadata"]["name"]] = document
        self._tell()

    def _tell(self) -> None:
        for listener in self._listeners if self.is_reachable else ():
            listener(self._snapshot())

    def _snapshot(self) -> Snapshot:
        kinds = {kind for kind, _ in self._documents}
        return Snapshot(
            documents={
                kind: tuple(document for (of, _), document in sorted(self._documents.items()) if of == kind)
                for kind in kinds
            },
            synced=True,
        )


def _pod_name(address: str) -> str:
    return f"pod-{address.replace(':', '-')}"


class PoolMesh:
    """What a test looks at and pulls on."""

    def __init__(self, redis: RedisServer, stack: AsyncExitStack) -> None:
        self.redis = redis
        self.cluster = Cluster()
        self.reader = PrefixIndexReader(url=redis.url, hash_seed="kvmesh")
        self._stack = stack

    async def pod(self, *, pool: str | None = None, model: str = MODEL) -> ScriptedPod:
        """Start a pod, and put it into a pool if one is given."""
        pod = await self._stack.enter_async_context(running_pod())
        pod.models = [model]
        if pool is not None:
            self.cluster.pod(pod, pool=pool)
        return pod

    @asynccontextmanager
    async def indexer(self, *, ready: bool = True, **more: Any) -> AsyncIterator[IndexerService]:
        """Run an indexer that follows the cluster's pools, waiting until it is ready."""
        own: dict[str, Any] = {"endpoints": (), "model": "", "documents": self.cluster}
        service = IndexerService(
            IndexerSettings(
                host="127.0.0.1",
                admin_port=0,
                redis_url=self.redis.url,
                hash_seed="kvmesh",
                recovery=QUICK,
                rediscover_seconds=0.2,
                rediscover_lost_seconds=0.05,
                scrape_seconds=0.2,
                **{**own, **more},
            )
        )
        task = asyncio.create_task(service.run(), name="indexer")
        try:
            if ready:
                await eventually(lambda: dict(service.not_ready()), {})
            yield service
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hits(self, pool: str, *, model: str = MODEL, blocks: int = 9) -> dict[str, int]:
        """What a picker finds for this pool: endpoint -> blocks."""
        seed = pool_seed("kvmesh", f"llm/{pool}" if pool else "")
        lookup = await self.reader.lookup(prompt(blocks), root=root_key(hash_seed=seed, model=model))
        return dict(lookup.matched_blocks)

    async def finds(self, pool: str, hits: Mapping[ScriptedPod, int], *, model: str = MODEL) -> None:
        """Wait until a picker finds exactly this."""
        expected = {pod.endpoint: blocks for pod, blocks in hits.items()}
        await eventually_async(lambda: self.hits(pool, model=model), expected)

    async def streams(self) -> set[str]:
        """The endpoints that the index has streams of."""
        return {line.endpoint for line in await self.reader.sources()}

    async def has_streams_of(self, pods: Collection[ScriptedPod]) -> None:
        """Wait until the index has streams of exactly these."""
        await eventually_async(self.streams, {pod.endpoint for pod in pods})


async def eventually(look: Callable[[], Any], expected: Any) -> None:
    """Wait for a value."""

    async def ask() -> Any:
        return look()

    await eventually_async(ask, expected)


async def eventually_async(look: Callable[[], Any], expected: Any) -> None:
    """Wait for an awaited value."""
    value: Any = None
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (value := await look()) != expected:
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"still {value!r} instead of {expected!r} after {DEADLINE_SECONDS} s") from None
