"""An InferencePool that Istio itself serves: `kvmesh install --mode inferencepool`, and no filter of ours."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from operate.local.processes import ProcessSpec
from tests.e2e.stack import eventually
from tests.e2e.supervised import supervised
from tests.mesh.install_checks import story
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
PICKER = {"app.kubernetes.io/name": "kvmesh-picker"}


@dataclass(frozen=True, kw_only=True)
class Pool:
    """One InferencePool; its pods and its host have its name."""

    name: str
    failure_mode: str
    pods_count: int

    @property
    def host(self) -> str:
        return f"{self.name}.example.com"

    @property
    def picker(self) -> str:
        """The Service that it names."""
        return f"kvmesh-picker-{self.name}"

    def objects(self) -> list[dict[str, Any]]:
        """Return the pool, its route and its pods."""
        asked = {"name": self.picker, "port": {"number": 9002}, "failureMode": self.failure_mode}
        spec = {
            "selector": {"matchLabels": {"app": self.name}},
            "targetPorts": [{"number": API_PORT}],
            "endpointPickerRef": asked,
        }
        pool = kubernetes_object("inference.networking.k8s.io/v1", "InferencePool", POOLS, self.name, spec=spec)
        to_pool = {
            "backendRefs": [{"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": self.name}]
        }
        route = http_route(POOLS, self.name, gateway=(GATEWAYS, GATEWAY), hosts=[self.host], rules=[to_pool])
        pods = [vllm_pod(f"{self.name}-{number}", app=self.name) for number in range(self.pods_count)]
        return [pool, route, *pods]


CHAT = Pool(name="chat", failure_mode="FailClose", pods_count=3)
CODE = Pool(name="code", failure_mode="FailOpen", pods_count=2)
NATIVE = (CHAT, CODE)
each_pool = pytest.mark.parametrize("pool", NATIVE, ids=lambda pool: pool.name)


@dataclass(frozen=True, kw_only=True)
class NativeMesh:
    """The cluster with native pools that share one picker."""

    cluster: Cluster
    proxy: IstioProxy
    pods: dict[str, dict[str, str]]  # of each pool, by name: address
    said: str  # by kvmesh install
    picker: ProcessSpec
    secrets: Path
    has_sidecar: bool  # of the picker
    running: AsyncExitStack  # the picker's pod

    async def start_picker(self) -> None:
        """Start the picker, then its sidecar, which takes the same port at all other addresses."""
        await self.running.enter_async_context(supervised([self.picker], self.cluster.folder))
        if self.has_sidecar:
            await self.running.enter_async_context(picker_sidecar(self.cluster, self.secrets))
        await self.is_picked()

    async def stop_picker(self) -> None:
        """End its pod."""
        await self.running.aclose()

    async def is_picked(self) -> None:
        """Wait until each pool answers."""
        for pool in NATIVE:
            await eventually(partial(self.cluster.complete, pool.host, "hello"), lambda answer: answer.status == 200)

    async def statuses(self) -> dict[str, tuple[int, int]]:
        """Return how each pool answers a request with a body, and one without."""
        found = {}
        for pool in NATIVE:
            with_body = await self.cluster.complete(pool.host, "hello")
            url = f"{self.cluster.gateway}/health"
            async with self.cluster.http.get(url, headers={"Host": pool.host}) as without:
                found[pool.name] = with_body.status, without.status
        return found

    async def compared(self, pool: Pool, prompt: str) -> tuple[float, float]:
        """Send a prompt; return the cached tokens that the picker expected, and those that came."""
        count, expected, found = await self.realised()
        await self.cluster.complete(pool.host, prompt)
        _, expected_now, found_now = await eventually(self.realised, lambda now: now[0] > count)
        return expected_now - expected, found_now - found

    async def realised(self) -> tuple[float, float, float]:
        """Return the responses that the picker has compared, and their cached tokens: expected, and found."""
        names = ("requests", "predicted_tokens", "cached_tokens")
        url = "http://127.0.0.1:9090/metrics"
        first, second, third = [sum(await self.counted(url, f"kvmesh_realised_{name}_total")) for name in names]
        return first, second, third

    async def scale_picker(self, count: int) -> None:
        """Change its number of pods, and wait until the gateway knows."""
        command = ("scale", "deployment", "-n", POOLS, "kvmesh-picker", f"--replicas={count}")
        await asyncio.to_thread(self.cluster.kube.kubectl, *command)
        for pool in NATIVE:
            known = partial(self.proxy.stats, f"cluster.outbound.9002..{pool.picker}.*membership_total")
            await eventually(known, lambda stats: sum(stats.values()) == count)

    async def served(self, pool: Pool) -> float:
        """Return how many requests the pool's pods have ended."""
        urls = [f"http://{address}:{API_PORT}/metrics" for address in self.pods[pool.name].values()]
        return sum([sum(await self.counted(url, "vllm:request_success_total")) for url in urls])

    async def counted(self, url: str, name: str) -> list[float]:
        """Return the values of a metric's series."""
        async with self.cluster.http.get(url) as response:
            lines = (await response.text()).splitlines()
        return [float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name}{{", f"{name} "))]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=["none", "sidecar"])
async def native(
    request: pytest.FixtureRequest, started: tuple[Cluster, IstioProxy], secrets: Path
) -> AsyncIterator[NativeMesh]:
    """Two pools and their picker, which is asked in clear text, or by mTLS alone."""
    cluster, proxy = started
    has_sidecar = request.param == "sidecar"
    kube = cluster.kube
    said = cluster.install(
        "--mode=inferencepool",
        f"--namespace={POOLS}",
        *(f"--pool={POOLS}/{pool.name}" for pool in NATIVE),
        f"--membership={request.param}",
        "--replicas=1",
        "--istio-version=1.31",
        "--image=kvmesh.example/kvmesh:test",
    )
    kube.apply(model_policy(), *(each for pool in NATIVE for each in pool.objects()))
    pods = {pool.name: await pods_eventually(kube, POOLS, {"app": pool.name}, count=pool.pods_count) for pool in NATIVE}
    own = "127.0.0.1"  # where a sidecar reaches what it stands before; without one it is reached at all addresses
    hosts = {"KVMESH_HOST": own} if has_sidecar else {}
    processes = [
        *(simulated(name, address) for found in pods.values() for name, address in found.items()),
        cluster.program("kvmesh-indexer", namespace=POOLS, address=own, admin_port=9091, **hosts),
    ]
    async with supervised(processes, cluster.folder), AsyncExitStack() as running:
        mesh = NativeMesh(
            cluster=cluster,
            proxy=proxy,
            pods=pods,
            said=said,
            picker=cluster.program("kvmesh-picker", namespace=POOLS, address=own, admin_port=9090, **hosts),
            secrets=secrets,
            has_sidecar=has_sidecar,
            running=running,
        )
        await mesh.start_picker()
        yield mesh


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


@each_pool
async def test_a_repeated_prompt_lands_on_the_pod_of_its_pool_that_holds_it(native: NativeMesh, pool: Pool) -> None:
    prompt = story(f"native {pool.name} {native.has_sidecar}")
    before = await native.served(pool)
    first = await native.cluster.complete(pool.host, prompt)
    assert first.status == 200, first.body

    async def again() -> int:
        return (await native.cluster.complete(pool.host, prompt)).cached_tokens

    await eventually(again, bool)
    assert all([await again() > 0 for _ in range(6)])
    assert await native.served(pool) >= before + 8  # none of them went to the other pool's pods


@each_pool
async def test_what_the_picker_expects_of_each_pool_comes_true(native: NativeMesh, pool: Pool) -> None:
    prompt = story(f"predicted {pool.name} {native.has_sidecar}")
    await native.cluster.complete(pool.host, prompt)
    # the index may still be told of the first answer when the second request is picked
    await eventually(partial(native.compared, pool, prompt), lambda tokens: tokens[0] == tokens[1] > 0)


async def test_without_its_picker_each_pool_fails_as_it_says_and_recovers(native: NativeMesh) -> None:
    await native.stop_picker()
    # docs/limits.md: Istio's filter streams bodies, and Envoy cannot take back what it was about to send to the picker
    assert await native.statuses() == {"chat": (500, 500), "code": (500, 200)}
    await native.scale_picker(0)  # as when its pod is not ready
    assert await native.statuses() == {"chat": (500, 500), "code": (200, 200)}
    await native.scale_picker(1)
    await native.start_picker()


@each_pool
async def test_the_gateway_takes_all_that_istiod_makes_of_a_pool(native: NativeMesh, pool: Pool) -> None:
    assert await native.proxy.refused() == {}
    clusters = await native.proxy.clusters()
    assert f"outbound|9002||{pool.picker}.{POOLS}.svc.cluster.local" in clusters


@each_pool
async def test_the_installation_says_what_the_pool_is_to_name(native: NativeMesh, pool: Pool) -> None:
    assert f'"endpointPickerRef": {{"name": "{pool.picker}", "port": {{"number": 9002}}}}' in native.said


@each_pool
async def test_istio_alone_tells_the_state_of_a_pool(native: NativeMesh, pool: Pool) -> None:
    wanted = ("get", "inferencepool", "-n", POOLS, pool.name, "-o", "json", "--show-managed-fields")
    words = await asyncio.to_thread(native.cluster.kube.kubectl, *wanted)
    found = json.loads(words)
    managers = {each["manager"] for each in found["metadata"]["managedFields"] if each.get("subresource") == "status"}
    assert managers == {"istiod"}  # the program that the tests build of it
    [parent] = found["status"]["parents"]
    conditions = {each["type"]: each["status"] for each in parent["conditions"]}
    assert parent["parentRef"]["name"] == GATEWAY
    assert conditions == {"Accepted": "True", "ResolvedRefs": "True"}


async def test_the_picker_is_asked_by_mtls_where_it_has_a_sidecar_and_else_in_clear_text(native: NativeMesh) -> None:
    handshakes = await native.proxy.stats(f"cluster.outbound.9002..{CHAT.picker}.*ssl.handshake")
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
