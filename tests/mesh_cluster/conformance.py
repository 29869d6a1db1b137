"""What the conformance suite of the inference extension finds in a cluster: gateways, echo pods, a picker.

Its pods are not run by a kubelet. Each address of a model server is served from here, as the suite's echo server does
it; the pickers of its pools are one picker of ours.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from operate.local.processes import HttpReady, ProcessSpec
from tests.e2e.echo_pod import echo_pod
from tests.e2e.supervised import supervised
from tests.mesh.go_programs import go_program
from tests.mesh.istio_proxy import Workload, running_istio_proxy
from tests.mesh.kube import Kube
from tests.mesh.mesh_objects import gateway_labels, kubernetes_object, namespace
from tests.mesh_cluster.cluster import ISTIOD, START_SECONDS, pods_eventually

INFRA, APP = "inference-conformance-infra", "inference-conformance-app-backend"
GATEWAYS = {"conformance-primary": 18080, "conformance-secondary": 18081}  # the port at which the proxy listens
POLL_SECONDS = 0.1
ADMIN_PORT = 19090
SUITE_SECONDS = 400.0  # it takes 40; a case that fails waits for 200


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the suite says of its cases."""

    passed: frozenset[str]
    failed: frozenset[str]
    words: str


async def run_suite(kube: Kube, log: Path, *flags: str) -> Verdict:
    """Run the suite to its end; what it prints is in the log."""
    with log.open("wb") as printed:
        process = await asyncio.create_subprocess_exec(
            *(str(go_program("conformance")), "-gateway-class=istio", "-allow-crds-mismatch", "-test.v", *flags),
            env=os.environ | {"KUBECONFIG": str(kube.kubeconfig)},
            stdout=printed,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            async with asyncio.timeout(SUITE_SECONDS):
                await process.wait()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    words = log.read_text(encoding="utf-8")
    cases: dict[str, set[str]] = {"PASS": set(), "FAIL": set()}
    for line in words.splitlines():
        kind, _, case = line.strip().removeprefix("--- ").partition(": TestConformance/")
        if kind in cases and case and "/" not in case:
            cases[kind].add(case.partition(" ")[0])
    return Verdict(passed=frozenset(cases["PASS"]), failed=frozenset(cases["FAIL"]), words=words)


@asynccontextmanager
async def conformance_parts(kube: Kube, folder: Path, *, secrets: Path) -> AsyncIterator[None]:
    """Run what the suite expects to be there, until the block ends."""
    kube.apply(namespace(INFRA), namespace(APP))
    async with AsyncExitStack() as stack:
        for name, port in GATEWAYS.items():
            await stack.enter_async_context(_gateway(kube, folder, name, port=port, secrets=secrets))
        await stack.enter_async_context(_echo_pods(kube))
        await stack.enter_async_context(supervised([_picker(kube)], folder))
        yield


def _picker(kube: Kube) -> ProcessSpec:
    flags = ("--kubernetes", "--namespaces", APP, "--host", "0.0.0.0", "--grpc-port", "9002", "--drain-seconds", "0")
    further = ("--admin-port", str(ADMIN_PORT), "--redis", "redis://127.0.0.1:1/0")  # nothing is cached here
    return ProcessSpec(
        name="pinned-picker",
        argv=(sys.executable, "-m", "tests.mesh_cluster.pinned_picker", "extproc", *flags, *further),
        environment={"KUBECONFIG": str(kube.kubeconfig)},
        ready=(HttpReady(url=f"http://127.0.0.1:{ADMIN_PORT}/readyz"),),
        ready_within_seconds=START_SECONDS,
    )


@asynccontextmanager
async def _gateway(kube: Kube, folder: Path, name: str, *, port: int, secrets: Path) -> AsyncIterator[None]:
    """Deploy a gateway as Istio would: a pod, a Service with an address of a load balancer's, the proxy."""
    labels = gateway_labels(name)
    container = {"name": "istio-proxy", "image": "docker.io/istio/proxyv2:1.31.0"}
    pod = kubernetes_object("v1", "Pod", INFRA, f"{name}-1", labels=labels, spec={"containers": [container]})
    ports = [{"name": "http", "port": 80, "targetPort": port}]
    spec = {"type": "LoadBalancer", "selector": labels, "ports": ports}
    kube.apply(pod, kubernetes_object("v1", "Service", INFRA, f"{name}-istio", spec=spec))
    [(pod_name, address)] = (await pods_eventually(kube, INFRA, labels, count=1)).items()
    status = json.dumps({"status": {"loadBalancer": {"ingress": [{"ip": address}]}}})
    patch = ("patch", "service", "-n", INFRA, f"{name}-istio", "--subresource=status", "--type=merge", "-p", status)
    await asyncio.to_thread(kube.kubectl, *patch)
    workload = Workload(
        namespace=INFRA,
        name=name,
        service_account=f"{name}-istio",
        labels=labels,
        is_gateway=True,
        ip=address,
        pod=pod_name,
    )
    # all pods have one network here, in which another gateway has port 80
    relay = await asyncio.start_server(partial(_relay, port), address, 80, reuse_port=True)
    async with relay, running_istio_proxy(workload, ISTIOD, folder, secrets=secrets, name=name):
        yield


async def _relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def _echo_pods(kube: Kube) -> AsyncIterator[None]:
    """Answer at each container port of each model server's pod, as soon as there is one."""

    async def serve() -> None:
        seen: set[str] = set()
        async with AsyncExitStack() as stack:
            while True:
                words = await asyncio.to_thread(kube.kubectl, "get", "pods", "-n", APP, "-o", "json")
                for pod in json.loads(words)["items"]:
                    address = pod["status"].get("podIP", "")
                    if address and address not in seen and "model-server" in pod["metadata"]["name"]:
                        seen.add(address)
                        for container in pod["spec"]["containers"]:
                            for port in container.get("ports", ()):
                                await stack.enter_async_context(_echo(pod, address, port["containerPort"]))
                await asyncio.sleep(POLL_SECONDS)

    task = asyncio.create_task(serve(), name="echo pods")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


@asynccontextmanager
async def _echo(pod: Mapping[str, Any], address: str, port: int) -> AsyncIterator[None]:
    """Serve what the picker asks of a pod, and tell everybody else what has come."""
    meta = pod["metadata"]

    async def echo(request: web.Request) -> web.Response:
        await request.read()
        came = {"path": request.raw_path, "host": request.host, "method": request.method, "proto": "HTTP/1.1"}
        own = {"pod": meta["name"], "namespace": meta["namespace"], "httpPort": str(port)}
        headers = {name: request.headers.getall(name) for name in request.headers}
        told = json.dumps(came | own | {"headers": headers}).encode()
        return web.Response(body=told, headers={"Content-Type": "application/json"})  # nothing else is read as JSON

    async with echo_pod(address, port, echo):
        yield
