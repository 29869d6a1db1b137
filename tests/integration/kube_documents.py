"""Documents and waiting for the tests of discovery: pods, pools, policies, and what a source has told so far."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from kvmesh.documents.documents import Document, DocumentSource, Snapshot

POOL_GROUP = "inference.networking.k8s.io"
POOL_CRD: dict[str, Any] = {"group": POOL_GROUP, "version": "v1", "kind": "InferencePool", "plural": "inferencepools"}
POLICY_CRD: dict[str, Any] = {
    "group": "kvmesh.io",
    "version": "v1alpha1",
    "kind": "InferencePolicy",
    "plural": "inferencepolicies",
}


def pod(name: str, ip: str, *, namespace: str = "llm", app: str = "vllm", ready: bool = True) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": app}},
        "spec": {"containers": [{"name": "vllm", "image": "vllm", "ports": [{"name": "http", "containerPort": 8000}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }


def pool(
    name: str = "llama", *, namespace: str = "llm", app: str = "vllm", ports: tuple[int, ...] = (8000,)
) -> dict[str, Any]:
    return {
        "apiVersion": f"{POOL_GROUP}/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
        },
    }


def policy(name: str, *, namespace: str = "llm", **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": name, "namespace": namespace},
        "spec": spec or {"scoring": {"strategy": "balanced"}},
    }


def names(documents: tuple[Document, ...]) -> list[str]:
    return [document["metadata"]["name"] for document in documents]


class Told:
    """What a source has told, and a way to wait for it."""

    def __init__(self) -> None:
        self.snapshots: list[Snapshot] = []
        self._news = asyncio.Event()

    def take(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)
        self._news.set()

    @property
    def last(self) -> Snapshot:
        return self.snapshots[-1]

    def pods(self) -> list[str]:
        return names(self.last.of("Pod"))

    async def until(self, condition: Callable[[Snapshot], bool], *, seconds: float = 20.0) -> Snapshot:
        try:
            async with asyncio.timeout(seconds):
                while not (self.snapshots and condition(self.last)):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            seen = {kind: names(found) for kind, found in self.last.documents.items()} if self.snapshots else "nothing"
            raise AssertionError(f"not told within {seconds} s; last: {seen}, {self.snapshots[-1:]}") from None
        return self.last

    async def until_pods(self, *expected: str, seconds: float = 20.0) -> Snapshot:
        return await self.until(lambda snapshot: names(snapshot.of("Pod")) == list(expected), seconds=seconds)


@asynccontextmanager
async def following(source: DocumentSource) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(source.run(told.take), name="source")
    try:
        yield told
        if task.done():
            task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(condition: Callable[[], bool], *, seconds: float = 20.0) -> None:
    """Wait for something that nobody tells."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.02)
