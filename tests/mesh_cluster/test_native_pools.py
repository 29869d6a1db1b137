"""An InferencePool that Istio itself serves: `kvmesh install --mode inferencepool`, and no filter of ours."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import pytest
import pytest_asyncio

from tests.e2e.install_checks import story
from tests.e2e.stack import eventually
from tests.istiod.bootstrap import supervised
from tests.mesh.istio_proxy import IstioProxy
from tests.mesh.mesh_objects import http_route, kubernetes_object
from tests.mesh_cluster.cluster import (
    API_PORT,
    GATEWAY,
    GATEWAYS,
    POOLS,
    Cluster,
    model_policy,
    pods_eventually,
    simulated,
    vllm_pod,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
HOST, POOL = "chat.example.com", "chat"
PODS = ("chat-0", "chat-1", "chat-2")


@dataclass(frozen=True, kw_only=True)
class NativeMesh:
    """The cluster with one native pool."""

    cluster: Cluster
    proxy: IstioProxy
    pods: dict[str, str]  # name: address
    said: str  # by kvmesh install


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def native(started: tuple[Cluster, IstioProxy]) -> AsyncIterator[NativeMesh]:
    """A pool of three pods whose picker runs outside of the mesh's mTLS."""
    cluster, proxy = started
    kube = cluster.kube
    said = cluster.install(
        "--mode=inferencepool",
        f"--namespace={POOLS}",
        f"--pool={POOLS}/{POOL}",
        "--membership=none",
        "--istio-version=1.31",
        "--image=kvmesh.example/kvmesh:test",
    )
    picks = {"name": f"kvmesh-picker-{POOL}", "port": {"number": 9002}, "failureMode": "FailClose"}
    pool = kubernetes_object(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        POOLS,
        POOL,
        spec={
            "selector": {"matchLabels": {"app": POOL}},
            "targetPorts": [{"number": API_PORT}],
            "endpointPickerRef": picks,
        },
    )
    to_pool = {"backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": POOL}]}
    route = http_route(POOLS, POOL, gateway=(GATEWAYS, GATEWAY), hosts=[HOST], rules=[to_pool])
    kube.apply(pool, route, model_policy(), *(vllm_pod(name, app=POOL) for name in PODS))
    pods = await pods_eventually(kube, POOLS, {"app": POOL}, count=len(PODS))
    everywhere = "127.0.0.1"
    processes = [
        *(simulated(name, address) for name, address in pods.items()),
        cluster.program("kvmesh-indexer", namespace=POOLS, address=everywhere, admin_port=9091),
        cluster.program("kvmesh-picker", namespace=POOLS, address=everywhere, admin_port=9090),
    ]
    async with supervised(processes, cluster.folder):
        await eventually(partial(cluster.complete, HOST, "hello"), lambda answer: answer.status == 200)
        yield NativeMesh(cluster=cluster, proxy=proxy, pods=pods, said=said)


async def test_a_repeated_prompt_lands_on_the_pod_that_holds_it(native: NativeMesh) -> None:
    prompt = story("native")
    first = await native.cluster.complete(HOST, prompt)
    assert first.status == 200, first.body

    async def again() -> int:
        return (await native.cluster.complete(HOST, prompt)).cached_tokens

    await eventually(again, bool)
    assert all([await again() > 0 for _ in range(6)])


async def test_the_gateway_takes_all_that_istiod_makes_of_a_pool(native: NativeMesh) -> None:
    assert await native.proxy.refused() == {}
    clusters = await native.proxy.clusters()
    assert f"outbound|9002||kvmesh-picker-{POOL}.{POOLS}.svc.cluster.local" in clusters


async def test_the_installation_says_what_the_pool_is_to_name(native: NativeMesh) -> None:
    assert f'"endpointPickerRef": {{"name": "kvmesh-picker-{POOL}", "port": {{"number": 9002}}}}' in native.said
