"""Two pools behind one gateway, one picker, one indexer and one Redis; who is where is read from a folder of documents.

The gateway is an Envoy with istiod's configuration and what `kvmesh install` renders. Pods are simulated, each on a
loopback address of its own, because a pool's pods share their port.
"""

import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from extproc.install.plan import GatewayTarget, InstallPlan, IstioVersion, PoolTarget, RouteTarget
from extproc.install.render import render
from extproc.local.ports import pick_free_port
from extproc.local.processes import HttpReady, ProcessSpec
from extproc.local.service import simulated_tokenizer
from tests.e2e.conformance_mesh import free_at_all
from tests.e2e.stack import Answer, eventually
from tests.integration.kv_redis import RedisServer
from tests.istiod.apply import apply_envoy_filters
from tests.istiod.base import GatewayRoute, Proxy, gateway_proxy
from tests.istiod.bootstrap import HOST, running_proxy, supervised
from tests.istiod.clusters import MeshService
from tests.istiod.filters import documents_of
from tests.istiod.installs import PICKER
from tests.istiod.releases import RELEASES

CHAT, CODE = "chat/llama", "code/llama"  # the same model in two namespaces
IPS: Mapping[str, Sequence[str]] = {CHAT: ("127.0.0.2", "127.0.0.3"), CODE: ("127.0.0.4", "127.0.0.5")}
SERVICES = {pool: MeshService(namespace=pool.split("/")[0], name="llama", port=8000) for pool in IPS}
MODEL = "tiny"
START_SECONDS = 60.0
MINOR = 30


@dataclass(frozen=True, kw_only=True)
class PoolsMesh:
    """The running mesh."""

    gateway: str
    admin: str
    indexer_admin: str
    redis_port: int
    documents: Path
    port: int  # of every pod
    http: aiohttp.ClientSession

    def pods(self, pool: str) -> set[str]:
        return {f"{ip}:{self.port}" for ip in IPS[pool]}

    def write(self, name: str, *documents: Mapping[str, Any]) -> None:
        """Change one of the documents' files."""
        write_documents(self.documents, name, *documents)

    async def complete(self, host: str, prompt: str, **fields: Any) -> Answer:
        """Send one completion to a host of the gateway."""
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2} | fields
        async with self.http.post(f"{self.gateway}/v1/completions", json=body, headers={"Host": host}) as response:
            return Answer(
                status=response.status,
                headers={name.lower(): value for name, value in response.headers.items()},
                body=await response.read(),
            )

    @asynccontextmanager
    async def stream(self, host: str, prompt: str, *, max_tokens: int) -> AsyncIterator[aiohttp.ClientResponse]:
        """Begin a streamed completion."""
        body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
        url = f"{self.gateway}/v1/completions"
        async with self.http.post(url, json=body, headers={"Host": host}) as response:
            yield response

    async def indexed(self, pool: str, prompt: str) -> None:
        """Wait until the index knows the prompt somewhere in the pool."""

        async def explained() -> Any:
            url, body = f"{self.admin}/explain", {"model": MODEL, "prompt": prompt}
            query = {"path": "/v1/completions", "pool": pool}
            async with self.http.post(url, json=body, params=query) as response:
                return json.loads(await response.read())

        await eventually(explained, lambda answer: any(each["indexed_tokens"] for each in answer["candidates"]))


@asynccontextmanager
async def pools_mesh(
    folder: Path, *, flags: Sequence[str] = (), picker_flags: Sequence[str] = ()
) -> AsyncIterator[PoolsMesh]:
    """Start everything, picker and indexer with further flags; yield when both pools serve."""
    port = free_at_all([ip for ips in IPS.values() for ip in ips], count=1)[0]
    documents = folder / "documents"
    documents.mkdir()
    write_documents(documents, "pools", *(each for pool in IPS for each in pool_documents(pool, port=port)))
    write_documents(documents, "policy", mesh_policy())
    async with AsyncExitStack() as stack:
        redis = RedisServer(folder)
        stack.callback(redis.kill)
        redis.start()
        grpc, admin, indexer = _free(3, avoid=(port, redis.port))
        common = ("--host", HOST, "--redis", redis.url, *flags)
        follows = (*common, "--policies", str(documents), "--indexer-admin-port", str(indexer))
        ports = ("--grpc-port", str(grpc), "--admin-port", str(admin))
        picks = (*common, "--policies", str(documents), *ports, *picker_flags)
        programs = [
            *(_pod(ip, port) for ips in IPS.values() for ip in ips),
            _program("indexer", "extproc", "indexer", *follows, ready=f"http://{HOST}:{indexer}/readyz"),
            _program("picker", "extproc", "extproc", *picks, ready=f"http://{HOST}:{admin}/readyz"),
        ]
        await stack.enter_async_context(supervised(programs, folder))
        endpoints = {SERVICES[pool].cluster: [f"{ip}:{port}" for ip in IPS[pool]] for pool in IPS}
        endpoints[PICKER.cluster] = [f"{HOST}:{grpc}"]
        proxied = running_proxy(gateway(), folder, endpoints=endpoints, avoid=(port, grpc, admin, indexer, redis.port))
        proxy = await stack.enter_async_context(proxied)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        mesh = PoolsMesh(
            gateway=proxy.listeners["0.0.0.0_80"],
            admin=f"http://{HOST}:{admin}",
            indexer_admin=f"http://{HOST}:{indexer}",
            redis_port=redis.port,
            documents=documents,
            port=port,
            http=http,
        )
        for host in ("chat.example.com", "code.example.com"):
            await eventually(partial(mesh.complete, host, "hello"), lambda answer: answer.status == 200)
        yield mesh


def _pod(ip: str, port: int) -> ProcessSpec:
    flags = ("--host", ip, "--sim-port", str(port), "--inter-token-ms", "20")
    return _program(f"pod-{ip}", "podsim", *flags, ready=f"http://{ip}:{port}/health")


def write_documents(folder: Path, name: str, *documents: Mapping[str, Any]) -> None:
    """Put a file into the folder, at once and whole."""
    path = folder / f".{name}.tmp"
    path.write_text(yaml.safe_dump_all(documents), encoding="utf-8")
    path.rename(folder / f"{name}.yaml")


def gateway() -> Proxy:
    """Return the gateway with our installation on it."""
    routes = [
        GatewayRoute(name="chat.route.0", host="chat.example.com", prefix="/", to={SERVICES[CHAT]: 1}),
        GatewayRoute(name="code.route.0", host="code.example.com", prefix="/", to={SERVICES[CODE]: 1}),
        GatewayRoute(name="both.route.0", host="both.example.com", prefix="/", to=dict.fromkeys(SERVICES.values(), 50)),
    ]
    targets = {pool: PoolTarget(namespace=pool.split("/")[0], name="llama", port=8000) for pool in IPS}
    selector = {"gateway.networking.k8s.io/gateway-name": "inference-gateway"}
    plan = InstallPlan(
        istio=IstioVersion(minor=MINOR),
        pools=tuple(targets.values()),
        routes=(
            RouteTarget(host="chat.example.com", pool=targets[CHAT]),
            RouteTarget(host="code.example.com", pool=targets[CODE]),
            RouteTarget(host="both.example.com", pool=targets[CHAT]),
        ),
        gateways=(
            GatewayTarget(
                namespace="istio-ingress",
                name="inference-gateway",
                selector=selector,
                service_account="inference-gateway-istio",
            ),
        ),
    )
    rendered = render(plan)
    release = RELEASES[f"1.{MINOR}"]
    rules = documents_of(rendered, "DestinationRule")
    proxy = gateway_proxy(release, routes=routes, services=[*SERVICES.values(), PICKER], rules=rules)
    applied = apply_envoy_filters(proxy, documents_of(rendered, "EnvoyFilter"), release=release)
    assert applied.unmatched() == []
    return applied.proxy


def pool_documents(pool: str, *, port: int, ips: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return a pool and its pods as the API has them."""
    namespace, _, name = pool.partition("/")
    declared = {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"app": name}}, "targetPorts": [{"number": port}]},
    }
    pods = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": f"{name}-{ip}", "namespace": namespace, "uid": ip, "labels": {"app": name}},
            "spec": {"containers": [{"name": "vllm"}]},
            "status": {"phase": "Running", "podIP": ip, "conditions": [{"type": "Ready", "status": "True"}]},
        }
        for ip in (IPS[pool] if ips is None else ips)
    ]
    return [declared, *pods]


def mesh_policy() -> dict[str, Any]:
    """Return the policy of the whole mesh: the model that all pods serve, and where its tokenizer is."""
    served = {"name": MODEL, "tokenizer": str(simulated_tokenizer())}
    return inference_policy("mesh", "istio-system", models={"served": [served]})


def inference_policy(name: str, namespace: str, **spec: Any) -> dict[str, Any]:
    """Return a policy."""
    return {
        "apiVersion": "kvmesh.io/v1alpha1",
        "kind": "InferencePolicy",
        "metadata": {"name": name, "namespace": namespace, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": spec,
    }


def _program(name: str, module: str, *arguments: str, ready: str) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", module, *arguments),
        environment={"PYTHONUNBUFFERED": "1", "PATH": os.environ["PATH"]},
        ready=(HttpReady(url=ready),),
        ready_within_seconds=START_SECONDS,
    )


def _free(count: int, *, avoid: Sequence[int]) -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        ports.append(pick_free_port(host=HOST, avoid=[*avoid, *ports]))
    return ports
