"""From policies in an API server to their status there: our CRD, source, merge and writer together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from extproc.reach.mesh_policy import MeshPolicy, MeshState
from kvmesh.documents import status_writer as writing
from kvmesh.documents.document_kinds import MESH_KINDS
from kvmesh.documents.documents import ClusterAccess, DocumentKey, Snapshot, StatusUpdate
from kvmesh.documents.sources import kubernetes_source, status_writer
from tests.integration.kube_documents import eventually
from tests.kube_api import KubeApi, kube_api
from tests.unit.extproc_reach.mesh_documents import inference_policy, inference_pool

CRD = Path(__file__).parents[3] / "manifests" / "crds" / "kvmesh.io_inferencepolicies.yaml"
HALF = {"priorities": {"classes": [{"name": "sheddable", "reservedShare": 0.6}]}}
IN_FORCE = {"Accepted": "True Accepted", "Programmed": "True Programmed"}
OTHER_HALF = {"priorities": {"classes": [{"name": "standard", "reservedShare": 0.6}]}}


@dataclass(slots=True)
class Replica:
    """What one picker does with documents, without serving anybody."""

    writer: Any
    policy: MeshPolicy = field(default_factory=MeshPolicy)
    state: MeshState = field(default_factory=MeshState)

    def take(self, snapshot: Snapshot) -> None:
        self.state = self.policy.update(snapshot, now=datetime.now(UTC))
        self.writer.want(
            StatusUpdate(
                key=DocumentKey("kvmesh.io", "InferencePolicy", status.namespace, status.name),
                uid=status.uid,
                generation=status.observed_generation,
                entry=status.entry(),
            )
            for status in self.state.unwritten
        )


@asynccontextmanager
async def replica(api: KubeApi, identity: str) -> AsyncIterator[Replica]:
    access = ClusterAccess(kubeconfig=api.kubeconfig())
    made = Replica(writer=status_writer(access, lease_namespace="default", identity=identity))
    source = kubernetes_source(access, kinds=MESH_KINDS)
    tasks = [asyncio.create_task(made.writer.run()), asyncio.create_task(source.run(made.take))]
    try:
        yield made
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def told(api: KubeApi, name: str) -> dict[str, str]:
    """Return a policy's conditions as the API has them: type -> `status reason`."""
    status = (api.get("InferencePolicy", name) or {}).get("status") or {}
    conditions = [each for entry in status.get("ancestors", ()) for each in entry["conditions"]]
    return {each["type"]: f"{each['status']} {each['reason']}" for each in conditions}


def put(api: KubeApi, name: str, spec: dict[str, Any], *, pool: str = "") -> None:
    document = inference_policy(name, spec, InferencePool=pool) if pool else inference_policy(name, spec)
    document["metadata"] = {part: document["metadata"][part] for part in ("namespace", "name")}
    api.put(document)


def writes(api: KubeApi) -> int:
    return sum("inferencepolicies" in path and verb in ("update", "patch") for verb, _, path, _ in api.requests)


async def test_every_condition_comes_into_the_api_and_then_nothing_more_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "RETRY_SECONDS", 0.1)
    async with kube_api(tmp_path) as api:
        api.install_crd(CRD)
        api.loose_crd(group="inference.networking.k8s.io", version="v1", kind="InferencePool", plural="inferencepools")
        api.put(dict(inference_pool("llm/llama")))
        put(api, "istio-system/mesh", HALF | {"scoring": {"fallbacks": 1}})
        put(api, "llm/later", {"scoring": {"fallbacks": 3}}, pool="later")
        async with replica(api, "one") as one, replica(api, "two") as two:
            await eventually(lambda: told(api, "istio-system/mesh") == IN_FORCE)
            await eventually(
                lambda: (
                    told(api, "llm/later") == {"Accepted": "False TargetNotFound", "Programmed": "False TargetNotFound"}
                )
            )
            put(api, "llm/broken", OTHER_HALF)  # contradicts the mesh-wide one
            await eventually(
                lambda: told(api, "llm/broken") == {"Accepted": "False Invalid", "Programmed": "False Invalid"}
            )
            put(api, "llm/own", {"scoring": {"fallbacks": 4}}, pool="llama")
            overridden = {"Accepted": "True Accepted", "Programmed": "True PartiallyProgrammed"}
            await eventually(lambda: told(api, "istio-system/mesh") == overridden)
            api.put(dict(inference_pool("llm/later")))
            await eventually(lambda: told(api, "llm/later") == IN_FORCE)
            await eventually(lambda: one.state.unwritten == two.state.unwritten == ())
            assert one.state.configs == two.state.configs
            assert {name: each.policy.fallbacks for name, each in one.state.configs.items()} == {
                "llm/llama": 4,
                "llm/later": 3,
            }
            settled = writes(api)
            put(api, "llm/own", {"scoring": {"fallbacks": 5}}, pool="llama")
            await eventually(lambda: two.state.configs["llm/llama"].policy.fallbacks == 5)
            await eventually(lambda: one.state.unwritten == two.state.unwritten == ())
            assert writes(api) <= settled + 1  # the generation that was observed, once, by one of them
            document = api.get("InferencePolicy", "llm/own")
            assert document is not None
            [entry] = document["status"]["ancestors"]
            generations = {each["observedGeneration"] for each in entry["conditions"]}
            assert generations == {document["metadata"]["generation"]} == {2}
