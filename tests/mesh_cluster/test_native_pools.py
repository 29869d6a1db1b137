"""An InferencePool that Istio itself serves: `kvmesh install --mode inferencepool`, and no filter of ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.e2e.install_checks import story
from tests.e2e.stack import eventually
from tests.istiod.bootstrap import supervised
from tests.mesh.istio_proxy import IstioProxy, Workload, running_istio_proxy
from tests.mesh.mesh_objects import http_route, kubernetes_object
from tests.mesh_cluster.cluster import (
    API_PORT,
    GATEWAY,
    GATEWAYS,
    ISTIOD,
    POOLS,
    Cluster,
    model_policy,
    pods_eventually,
    simulated,
    vllm_pod,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
HOST, POOL = "chat.example.com", "chat"
PICKER = {"app.kubernetes.io/name": "kvmesh-picker"}
PODS = ("chat-0", "chat-1", "chat-2")


@dataclass(frozen=True, kw_only=True)
class NativeMesh:
    """The cluster with one native pool."""

    cluster: Cluster
    proxy: IstioProxy
    pods: dict[str, str]  # name: address
    said: str  # by kvmesh install
    has_sidecar: bool  # of the picker


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["none", "sidecar"])
async def native(
    request: pytest.FixtureRequest, started: tuple[Cluster, IstioProxy], secrets: Path
) -> AsyncIterator[NativeMesh]:
    """A pool of three pods; its picker is asked in clear text, or by mTLS alone."""
    cluster, proxy = started
    has_sidecar = request.param == "sidecar"
    kube = cluster.kube
    said = cluster.install(
        "--mode=inferencepool",
        f"--namespace={POOLS}",
        f"--pool={POOLS}/{POOL}",
        f"--membership={request.param}",
        "--replicas=1",
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
    own = "127.0.0.1"  # where a sidecar reaches what it stands before; without one it is reached at all addresses
    hosts = {"KVMESH_HOST": own} if has_sidecar else {}
    processes = [
        *(simulated(name, address) for name, address in pods.items()),
        cluster.program("kvmesh-indexer", namespace=POOLS, address=own, admin_port=9091, **hosts),
        cluster.program("kvmesh-picker", namespace=POOLS, address=own, admin_port=9090, **hosts),
    ]
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(supervised(processes, cluster.folder))
        if has_sidecar:
            await stack.enter_async_context(picker_sidecar(cluster, secrets))
        await eventually(partial(cluster.complete, HOST, "hello"), lambda answer: answer.status == 200)
        yield NativeMesh(cluster=cluster, proxy=proxy, pods=pods, said=said, has_sidecar=has_sidecar)


@asynccontextmanager
async def picker_sidecar(cluster: Cluster, secrets: Path) -> AsyncIterator[IstioProxy]:
    """Start the proxy that istiod would have injected into the picker's pod, and say that it is there."""
    await asyncio.to_thread(cluster.kube.kubectl, "rollout", "status", "-n", POOLS, "deployment/kvmesh-picker")
    found = await pods_eventually(cluster.kube, POOLS, PICKER | {"sidecar.istio.io/inject": "true"}, count=1)
    [(pod, address)] = found.items()
    in_mesh = "security.istio.io/tlsMode=istio"
    await asyncio.to_thread(cluster.kube.kubectl, "label", "pod", "-n", POOLS, pod, in_mesh)
    words = await asyncio.to_thread(cluster.kube.kubectl, "get", "pod", "-n", POOLS, pod, "-o", "json")
    workload = Workload(
        namespace=POOLS,
        name="kvmesh-picker",
        service_account="kvmesh-picker",
        labels=json.loads(words)["metadata"]["labels"],
        ip=address,
        pod=pod,
    )
    async with running_istio_proxy(workload, ISTIOD, cluster.folder, secrets=secrets, name="sidecar") as proxy:
        yield proxy


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


async def test_the_picker_is_asked_by_mtls_where_it_has_a_sidecar_and_else_in_clear_text(native: NativeMesh) -> None:
    handshakes = await native.proxy.stats(f"cluster.outbound.9002..kvmesh-picker-{POOL}.*ssl.handshake")
    assert (sum(handshakes.values()) > 0) is native.has_sidecar


async def test_nobody_but_the_gateway_reaches_a_picker_that_has_a_sidecar(native: NativeMesh) -> None:
    if not native.has_sidecar:
        pytest.skip("without mTLS it is NetworkPolicies that keep others out, and nothing enforces these here")
    [address] = (await pods_eventually(native.cluster.kube, POOLS, PICKER, count=1)).values()
    async with grpc.aio.insecure_channel(f"{address}:9002") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=5)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_doctor_finds_the_installation_by_itself_and_nothing_wrong(native: NativeMesh) -> None:
    seen = await asyncio.to_thread(native.cluster.doctor, POOLS)
    [proxies] = [each for each in seen if each["severity"] != "ok"]  # the picker's account may not look for these
    assert (proxies["check"], proxies["subject"]) == ("cluster-parts", "envoy-admin")
    fine = {each["check"] for each in seen if each["severity"] == "ok"}
    assert {"picker-answers", "picker-tokens", "pool-picker", "indexer-findings", "index-follows", "same-keys"} <= fine
    with_gateway = await asyncio.to_thread(native.cluster.doctor, POOLS, f"--envoy-admin={native.proxy.admin}")
    assert [each for each in with_gateway if each["severity"] != "ok"] == []
    assert "envoy-filter" in {each["check"] for each in with_gateway}
