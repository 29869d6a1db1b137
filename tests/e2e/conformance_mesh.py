"""The cluster of the conformance tests on one machine: pods on loopback addresses of their own, gateways, one picker.

The gateways are Envoys with istiod's configuration and what `kvmesh install` renders; the picker is `kvmesh extproc`
with a folder of the pools' documents. Two things stand for parts that are not ours: the header that pins a request
becomes the protocol's subset hint (a filter before ours), and the gateway tells the client who served.
"""

import asyncio
import itertools
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

from extproc.install.plan import FailureMode, GatewayTarget, InstallPlan, IstioVersion, PoolTarget, RouteTarget
from extproc.install.render import render
from extproc.local.envoy_config import SocketAddress
from extproc.local.ports import pick_free_port
from extproc.local.processes import HttpReady, ProcessSpec
from tests.e2e.echo_pod import MODEL, echo_pod
from tests.istiod.apply import apply_envoy_filters
from tests.istiod.base import GatewayRoute, Proxy, gateway_proxy
from tests.istiod.bootstrap import HOST, address, running_envoy, running_proxy, supervised
from tests.istiod.clusters import MeshService
from tests.istiod.filters import documents_of
from tests.istiod.installs import PICKER
from tests.istiod.releases import RELEASES

FOLDER = Path(__file__).parents[1] / "data" / "conformance"
NAMESPACE = "inference-conformance-app-backend"
GATEWAYS_NAMESPACE = "inference-conformance-infra"
MINOR = 30
PIN_HEADER, SERVED_HEADER = "test-epp-endpoint-selection", "x-conformance-test-served-endpoint"
SUBSET = {"metadata_namespace": "envoy.lb.subset_hint", "key": "x-gateway-destination-endpoint-subset"}
PROTOCOL_HEADER = "x-protocol"
START_SECONDS = 60.0
APPS = ("primary-inference-model-server", "secondary-inference-model-server", "dp-inference-model-server")
PODS_OF_AN_APP = 3
PORTS = (3000, 3001, 3002, 3004)
H2C_PORT = 3001


@dataclass(frozen=True, slots=True, kw_only=True)
class Pod:
    """One echo pod; it listens on all ports."""

    app: str
    name: str
    ip: str

    def document(self) -> dict[str, Any]:
        """Return it as the API has it."""
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": NAMESPACE, "uid": self.name, "labels": {"app": self.app}},
            "spec": {"containers": [{"name": "echo"}]},
            "status": {"phase": "Running", "podIP": self.ip, "conditions": [{"type": "Ready", "status": "True"}]},
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a client got."""

    status: int
    pod: str  # "" where none answered
    port: str
    protocol: str
    served: str  # as the gateway reports it


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The running parts."""

    pods: Mapping[str, Sequence[Pod]]  # by app
    ports: Mapping[int, int]  # the port of the documents: the port on this machine
    gateways: Mapping[str, str]
    admin: str  # of the picker
    http: aiohttp.ClientSession
    stop_picker: Callable[[], Awaitable[None]]

    def address(self, pod: Pod, port: int = 3000) -> str:
        return f"{pod.ip}:{self.ports[port]}"

    async def send(
        self,
        host: str,
        path: str = "/",
        *,
        pin: Iterable[str] = (),
        gateway: str = "conformance-primary",
        method: str = "POST",
    ) -> Answer:
        """Send the request that all conformance tests send, pinned to these addresses."""
        headers = {"Host": host, "content-type": "application/json"}
        if pinned := ",".join(pin):
            headers[PIN_HEADER] = pinned
        body = {"model": MODEL, "prompt": "Write as if you were a critic: San Francisco"} if method == "POST" else None
        url = f"{self.gateways[gateway]}{path}"
        async with self.http.request(method, url, headers=headers, json=body) as response:
            facts = await response.json() if response.status == 200 else {}
            return Answer(
                status=response.status,
                pod=facts.get("pod", ""),
                port=facts.get("httpPort", ""),
                protocol=facts.get("protocol", ""),
                served=response.headers.get(SERVED_HEADER, ""),
            )

    async def send_many(self, count: int, *, concurrency: int, **request: Any) -> Counter[Answer]:
        """Send the same request many times."""
        gate = asyncio.Semaphore(concurrency)

        async def one() -> Answer:
            async with gate:
                return await self.send(**request)

        return Counter(await asyncio.gather(*(one() for _ in range(count))))


@asynccontextmanager
async def conformance_cluster(
    folder: Path, *, failure_mode: FailureMode, has_picker: bool = True
) -> AsyncIterator[Cluster]:
    """Start everything; yield when the picker knows all pools. Without a picker there is no Service of it either."""
    async with AsyncExitStack() as stack, AsyncExitStack() as picker:
        pods = _pods()
        ports = dict(zip(PORTS, free_at_all([pod.ip for pod in pods], count=len(PORTS)), strict=True))
        for pod, port in itertools.product(pods, set(ports) - {H2C_PORT}):
            await stack.enter_async_context(_echo(pod, port=port, listen=ports[port]))
        await stack.enter_async_context(_h2c(pods, ports, folder))
        documents = folder / "documents"
        documents.mkdir()
        pools = _documents("pools.yaml", ports=ports)
        (documents / "all.yaml").write_text(yaml.safe_dump_all([*pools, *(pod.document() for pod in pods)]))
        grpc_port, admin_port = _two_ports(ports.values())
        admin = f"http://{HOST}:{admin_port}"
        if has_picker:
            await picker.enter_async_context(_picker(documents, folder, grpc_port=grpc_port, admin_port=admin_port))
        gateways = {}
        for name in ("conformance-primary", "conformance-secondary"):
            own = folder / name
            own.mkdir()
            proxy = gateway(name, pools=pools, failure_mode=failure_mode, has_picker=has_picker)
            running = await stack.enter_async_context(
                running_proxy(
                    proxy,
                    own,
                    endpoints=_endpoints(pools, pods) | {PICKER.cluster: [f"{HOST}:{grpc_port}"]},
                    avoid=[*ports.values(), grpc_port, admin_port],
                )
            )
            gateways[name] = running.listeners["0.0.0.0_80"]
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        cluster = Cluster(
            pods={app: [pod for pod in pods if pod.app == app] for app in APPS},
            ports=ports,
            gateways=gateways,
            admin=admin,
            http=http,
            stop_picker=picker.aclose,
        )
        yield cluster


def gateway(name: str, *, pools: Sequence[Mapping[str, Any]], failure_mode: FailureMode, has_picker: bool) -> Proxy:
    """Return one gateway of the tests with our installation on it."""
    services = {pool["metadata"]["name"]: _service(pool) for pool in pools}
    routes = [
        GatewayRoute(
            name=f"{NAMESPACE}.{document['metadata']['name']}.{i}",
            host=document["spec"]["hostnames"][0],
            prefix=rule.get("matches", [{"path": {"value": "/"}}])[0]["path"]["value"],
            to={services[to["name"]]: to.get("weight", 1) for to in rule["backendRefs"]},
        )
        for document in _documents("routes.yaml", ports={})
        if document["spec"]["parentRefs"][0]["name"] == name
        for i, rule in enumerate(document["spec"]["rules"])
    ]
    targets = {
        service.name: PoolTarget(namespace=NAMESPACE, name=service.name, port=3000) for service in services.values()
    }
    used = {service.name for route in routes for service in route.to}
    plan = InstallPlan(
        istio=IstioVersion(minor=MINOR),
        pools=tuple(target for target in targets.values() if target.name in used),
        routes=tuple(
            RouteTarget(host=route.host, route=route.name, pool=targets[next(iter(route.to)).name]) for route in routes
        ),
        gateways=(
            GatewayTarget(
                namespace=GATEWAYS_NAMESPACE,
                name=name,
                selector={"gateway.networking.k8s.io/gateway-name": name},
                service_account=f"{name}-istio",
            ),
        ),
        failure_mode=failure_mode,
    )
    rendered = render(plan)
    proxy = gateway_proxy(
        RELEASES[f"1.{MINOR}"],
        namespace=GATEWAYS_NAMESPACE,
        name=name,
        routes=routes,
        services=[*services.values(), *([PICKER] if has_picker else [])],
        rules=documents_of(rendered, "DestinationRule"),
    )
    filters = [*documents_of(rendered, "EnvoyFilter"), _stand_ins()]
    applied = apply_envoy_filters(proxy, filters, release=RELEASES[f"1.{MINOR}"])
    unmatched = [each.apply_to for each in applied.outcomes if each.is_for_version and not each.where]
    # A picker that does not exist has no cluster whose limits could be patched.
    assert unmatched == ([] if has_picker else ["CLUSTER"])
    return applied.proxy


def _stand_ins() -> dict[str, Any]:
    """Return a filter for what the tests' own picker does: pinned requests, and the report of who served."""
    to_metadata = {
        "name": "conformance.pin",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.header_to_metadata.v3.Config",
            "request_rules": [{"header": PIN_HEADER, "on_header_present": SUBSET, "remove": True}],
        },
    }
    served = "%DYNAMIC_METADATA(envoy.lb:x-gateway-destination-endpoint-served)%"
    shown = {"header": {"key": SERVED_HEADER, "value": served}, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
    chain = {"filterChain": {"filter": {"name": "envoy.filters.network.http_connection_manager"}}}
    patches: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
        ("HTTP_FILTER", {"listener": chain}, "INSERT_FIRST", to_metadata),
        ("ROUTE_CONFIGURATION", {}, "MERGE", {"response_headers_to_add": [shown]}),
    ]
    return {
        "apiVersion": "networking.istio.io/v1alpha3",
        "kind": "EnvoyFilter",
        "metadata": {"name": "conformance", "namespace": GATEWAYS_NAMESPACE},
        "spec": {
            "configPatches": [
                {
                    "applyTo": apply_to,
                    "match": {"context": "GATEWAY", **match},
                    "patch": {"operation": operation, "value": value},
                }
                for apply_to, match, operation, value in patches
            ]
        },
    }


def _service(pool: Mapping[str, Any]) -> MeshService:
    is_http2 = pool["spec"].get("appProtocol") == "kubernetes.io/h2c"
    return MeshService(namespace=NAMESPACE, name=pool["metadata"]["name"], port=3000, is_http2=is_http2)


def _endpoints(pools: Sequence[Mapping[str, Any]], pods: Sequence[Pod]) -> dict[str, list[str]]:
    """Return what istiod would send as endpoints: every port of every pod that the selector takes."""
    return {
        _service(pool).cluster: [
            f"{pod.ip}:{port['number']}"
            for pod in pods
            if pod.app == pool["spec"]["selector"]["matchLabels"]["app"]
            for port in pool["spec"]["targetPorts"]
        ]
        for pool in pools
    }


def _documents(name: str, *, ports: Mapping[int, int]) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))
    for document in documents:
        for port in document["spec"].get("targetPorts", ()):
            port["number"] = ports[port["number"]]
    return documents


def _pods() -> list[Pod]:
    hosts = itertools.count(2)
    return [Pod(app=app, name=f"{app}-{i}", ip=f"127.0.0.{next(hosts)}") for app in APPS for i in range(PODS_OF_AN_APP)]


def free_at_all(ips: Sequence[str], *, count: int) -> list[int]:
    """Return ports that are free at all these addresses."""
    found: list[int] = []
    while len(found) < count:
        port = pick_free_port(host="0.0.0.0", avoid=found)
        with suppress(OSError):
            for ip in ips:
                socket.create_server((ip, port)).close()
            found.append(port)
    return found


def _two_ports(avoid: Iterable[int]) -> tuple[int, int]:
    first = pick_free_port(host=HOST, avoid=list(avoid))
    return first, pick_free_port(host=HOST, avoid=[*avoid, first])


@asynccontextmanager
async def _echo(pod: Pod, *, port: int, listen: int) -> AsyncIterator[None]:
    """Serve what the picker asks of a pod, and tell everybody else who answers."""

    async def echo(request: web.Request) -> web.Response:
        await request.read()
        own = {"pod": pod.name, "namespace": NAMESPACE, "httpPort": str(port)}
        return web.json_response(own | {"protocol": request.headers.get(PROTOCOL_HEADER, "HTTP/1.1")})

    async with echo_pod(pod.ip, listen, echo):
        yield


@asynccontextmanager
async def _h2c(pods: Sequence[Pod], ports: Mapping[int, int], folder: Path) -> AsyncIterator[None]:
    """Let the pods speak HTTP/2 without TLS at port 3001: an Envoy before each, because aiohttp cannot."""
    url = "type.googleapis.com/envoy.extensions.filters"
    router = {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{url}.http.router.v3.Router"}}
    listeners, clusters = [], []
    for pod in pods:
        route = {"match": {"prefix": "/"}, "route": {"cluster": pod.name, "timeout": "0s"}}
        told = {"header": {"key": PROTOCOL_HEADER, "value": "%PROTOCOL%"}}
        hosts = [{"name": "pod", "domains": ["*"], "routes": [route], "request_headers_to_add": [told]}]
        manager = {
            "@type": f"{url}.network.http_connection_manager.v3.HttpConnectionManager",
            "stat_prefix": "h2c",
            "codec_type": "AUTO",  # the picker asks for metrics in HTTP/1.1
            "http_filters": [router],
            "route_config": {"virtual_hosts": hosts},
        }
        filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
        own = {"name": pod.name, "filter_chains": [{"filters": filters}]}
        listeners.append(own | {"address": address(SocketAddress(host=pod.ip, port=ports[H2C_PORT]))})
        behind = {"endpoint": {"address": address(SocketAddress(host=pod.ip, port=ports[3000]))}}
        assignment = {"cluster_name": pod.name, "endpoints": [{"lb_endpoints": [behind]}]}
        clusters.append({"name": pod.name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment})
    admin = pick_free_port(host=HOST, avoid=list(ports.values()))
    config = {
        "admin": {"address": address(SocketAddress(host=HOST, port=admin))},
        "static_resources": {"listeners": listeners, "clusters": clusters},
    }
    async with running_envoy(config, folder, name="h2c", admin_port=admin):
        yield


@asynccontextmanager
async def _picker(documents: Path, folder: Path, *, grpc_port: int, admin_port: int) -> AsyncIterator[None]:
    """Run `kvmesh extproc` on the folder; without Redis, because nothing is cached here."""
    nobody = pick_free_port(host=HOST, avoid=[grpc_port, admin_port])
    flags = ("--host", HOST, "--grpc-port", str(grpc_port), "--admin-port", str(admin_port))
    further = ("--policies", str(documents), "--redis", f"redis://{HOST}:{nobody}/0", "--drain-seconds", "0")
    spec = ProcessSpec(
        name="picker",
        argv=(sys.executable, "-m", "extproc", "extproc", *flags, *further),
        ready=(HttpReady(url=f"http://{HOST}:{admin_port}/readyz"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder):
        yield
