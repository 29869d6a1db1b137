"""Two pools behind one gateway, one picker, one indexer and one Redis; who is where is read from a folder of documents.

The gateway is an Envoy that a real istiod configures, with what `kvmesh install` renders. Pods are simulated, each on a
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

from operate.install.plan import GatewayTarget, InstallPlan, IstioVersion, PoolTarget, RouteTarget
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec
from tests.e2e.pool_documents import MODEL, inference_pool, mesh_policy, write_documents
from tests.e2e.stack import Answer, eventually
from tests.e2e.supervised import HOST, START_SECONDS, supervised
from tests.integration.kv_redis import RedisServer
from tests.mesh.conformance_mesh import free_at_all
from tests.mesh.installations import installed, shown_upstream
from tests.mesh.mesh_objects import (
    Object,
    gateway,
    gateway_labels,
    http_route,
    kubernetes_object,
    rule,
    service,
    slices,
)
from tests.mesh.real_way import running_gateway

CHAT, CODE = "chat/llama", "code/llama"  # the same model in two namespaces
IPS: Mapping[str, Sequence[str]] = {CHAT: ("127.0.0.2", "127.0.0.3"), CODE: ("127.0.0.4", "127.0.0.5")}
GATEWAY = ("istio-ingress", "inference-gateway")
API_PORT = 8000  # of the Services
MINOR = 31


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
            url, body = f"{self.admin}/v1/explain", {"model": MODEL, "prompt": prompt}
            query = {"path": "/v1/completions", "pool": pool}
            async with self.http.post(url, json=body, params=query) as response:
                return json.loads(await response.read())

        await eventually(explained, lambda answer: any(each["indexed_tokens"] for each in answer["candidates"]))


@asynccontextmanager
async def pools_mesh(
    folder: Path, *, secrets: Path, flags: Sequence[str] = (), picker_flags: Sequence[str] = ()
) -> AsyncIterator[PoolsMesh]:
    """Start everything, picker and indexer with further flags; yield when both pools serve."""
    port = free_at_all([ip for ips in IPS.values() for ip in ips], count=1)[0]
    documents = folder / "documents"
    documents.mkdir()
    write_documents(documents, "pools", *pool_documents(port))
    write_documents(documents, "policy", mesh_policy())
    async with AsyncExitStack() as stack:
        redis = RedisServer(folder)
        stack.callback(redis.kill)
        redis.start()
        grpc, admin, indexer, entry = _free(4, avoid=(port, redis.port))
        common = ("--host", HOST, "--redis", redis.url, *flags)
        follows = (*common, "--policies", str(documents), "--indexer-admin-port", str(indexer))
        ports = ("--grpc-port", str(grpc), "--admin-port", str(admin))
        picks = (*common, "--policies", str(documents), *ports, *picker_flags)
        programs = [
            *(_pod(ip, port) for ips in IPS.values() for ip in ips),
            _program("indexer", "operate", "indexer", *follows, ready=f"http://{HOST}:{indexer}/readyz"),
            _program("picker", "operate", "extproc", *picks, ready=f"http://{HOST}:{admin}/readyz"),
        ]
        await stack.enter_async_context(supervised(programs, folder))
        objects = _objects(entry, port, grpc)
        await stack.enter_async_context(running_gateway(GATEWAY, objects, folder, secrets=secrets))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)))
        mesh = PoolsMesh(
            gateway=f"http://{HOST}:{entry}",
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


def pool_documents(port: int, ips: Mapping[str, Sequence[str]] = IPS) -> list[dict[str, Any]]:
    """Return the pools and their pods as the API has them."""
    return [each for pool in ips for each in inference_pool(pool, port=port, ips=ips[pool])]


def _pod(ip: str, port: int) -> ProcessSpec:
    flags = ("--host", ip, "--sim-port", str(port), "--inter-token-ms", "20")
    return _program(f"pod-{ip}", "podsim", *flags, ready=f"http://{ip}:{port}/health")


def _objects(mesh_port: int, pod_port: int, grpc_port: int) -> list[Object]:
    """Return all that istiod has to know: both pools, their gateway with its routes, and our installation."""
    targets = {
        pool: PoolTarget(namespace=pool.split("/")[0], name="llama", port=API_PORT, in_mesh=False) for pool in IPS
    }
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
                namespace=GATEWAY[0],
                name=GATEWAY[1],
                selector=gateway_labels(GATEWAY[1]),
                service_account=f"{GATEWAY[1]}-istio",
            ),
        ),
    )
    pools = [
        each
        for number, (pool, target) in enumerate(targets.items(), start=1)
        for each in (
            service(target.namespace, target.name, port=API_PORT, number=number),
            *slices(target.namespace, target.name, [f"{ip}:{pod_port}" for ip in IPS[pool]]),
        )
    ]
    routes = [
        http_route(
            target.namespace,
            target.namespace,
            gateway=GATEWAY,
            hosts=[f"{target.namespace}.example.com"],
            rules=[rule("/", target.name, API_PORT)],
        )
        for target in targets.values()
    ]
    both = [
        {"name": target.name, "namespace": target.namespace, "port": API_PORT, "weight": 50}
        for target in targets.values()
    ]
    routes.append(
        http_route("chat", "both", gateway=GATEWAY, hosts=["both.example.com"], rules=[{"backendRefs": both}])
    )
    grant = {
        "from": [{"group": "gateway.networking.k8s.io", "kind": "HTTPRoute", "namespace": "chat"}],
        "to": [{"group": "", "kind": "Service"}],
    }
    granted = kubernetes_object("gateway.networking.k8s.io/v1beta1", "ReferenceGrant", "code", "both", spec=grant)
    return [
        *installed(plan, picker=f"{HOST}:{grpc_port}"),
        *gateway(*GATEWAY, {80: mesh_port}, ip=HOST),
        *pools,
        *routes,
        granted,
        shown_upstream(),
    ]


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
