"""The cluster of the conformance tests on one machine: pods on loopback addresses of their own, gateways, one picker.

The gateways are Envoys with what `kvmesh install` renders, by a real istiod; the picker is `kvmesh extproc` with a
folder of the pools' documents. Two things stand for parts that are not ours: the header that pins a request becomes
the protocol's subset hint (a filter before ours), and the gateway tells the client who served.
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

from operate.install.plan import FailureMode, GatewayTarget, InstallPlan, IstioVersion, PoolTarget, RouteTarget
from operate.local.envoy_config import SocketAddress
from operate.local.ports import pick_free_port
from operate.local.processes import HttpReady, ProcessSpec
from tests.e2e.echo_pod import MODEL, echo_pod
from tests.e2e.supervised import HOST, address, running_envoy, supervised
from tests.mesh.installations import installed
from tests.mesh.mesh_objects import Object, gateway, gateway_labels, http_route, kubernetes_object, service, slices
from tests.mesh.real_way import running_gateway

FOLDER = Path(__file__).parents[1] / "data" / "conformance"
NAMESPACE = "inference-conformance-app-backend"
GATEWAYS_NAMESPACE = "inference-conformance-infra"
MINOR = 31
SERVICE_PORT = 3000
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
    folder: Path, *, secrets: Path, failure_mode: FailureMode, has_picker: bool = True
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
        gateways: dict[str, int] = {}
        taken = [*ports.values(), grpc_port, admin_port]
        for name in ("conformance-primary", "conformance-secondary"):
            own = folder / name
            own.mkdir()
            at, port = (GATEWAYS_NAMESPACE, name), pick_free_port(host=HOST, avoid=[*taken, *gateways.values()])
            picker_at = f"{HOST}:{grpc_port}" if has_picker else None
            objects = _objects(name, pools=pools, pods=pods, failure_mode=failure_mode, picker=picker_at, port=port)
            await stack.enter_async_context(running_gateway(at, objects, own, secrets=secrets))
            gateways[name] = port
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)))
        cluster = Cluster(
            pods={app: [pod for pod in pods if pod.app == app] for app in APPS},
            ports=ports,
            gateways={name: f"http://{HOST}:{port}" for name, port in gateways.items()},
            admin=admin,
            http=http,
            stop_picker=picker.aclose,
        )
        yield cluster


def _objects(
    name: str,
    *,
    pools: Sequence[Mapping[str, Any]],
    pods: Sequence[Pod],
    failure_mode: FailureMode,
    picker: str | None,
    port: int,
) -> list[Object]:
    """Return all that istiod has to know for one gateway, which listens on `port`; a pool is a Service here."""
    routes = [each for each in _documents("routes.yaml", ports={}) if each["spec"]["parentRefs"][0]["name"] == name]
    targets = {
        pool["metadata"]["name"]: PoolTarget(
            namespace=NAMESPACE, name=pool["metadata"]["name"], port=SERVICE_PORT, in_mesh=False
        )
        for pool in pools
    }
    asked = [
        RouteTarget(
            host=route["spec"]["hostnames"][0],
            route=f"{NAMESPACE}.{route['metadata']['name']}.{number}",
            pool=targets[rule["backendRefs"][0]["name"]],
        )
        for route in routes
        for number, rule in enumerate(route["spec"]["rules"])
    ]
    used = {each["name"] for route in routes for rule in route["spec"]["rules"] for each in rule["backendRefs"]}
    plan = InstallPlan(
        istio=IstioVersion(minor=MINOR),
        pools=tuple(target for target in targets.values() if target.name in used),
        routes=tuple(asked),
        gateways=(
            GatewayTarget(
                namespace=GATEWAYS_NAMESPACE,
                name=name,
                selector=gateway_labels(name),
                service_account=f"{name}-istio",
            ),
        ),
        failure_mode=failure_mode,
    )
    return [
        *installed(plan, picker=picker),
        _stand_ins(),
        *gateway(GATEWAYS_NAMESPACE, name, {80: port}, ip=HOST),
        *(each for number, pool in enumerate(pools) for each in _services(pool, pods, number=number + 1)),
        *(_to_services(route, name) for route in routes),
    ]


def _to_services(route: Mapping[str, Any], gateway_name: str) -> Object:
    """Return an HTTPRoute to Services in place of pools."""
    rules = [
        {**rule, "backendRefs": [{"port": SERVICE_PORT, **_backend(each)} for each in rule["backendRefs"]]}
        for rule in route["spec"]["rules"]
    ]
    return http_route(
        NAMESPACE,
        route["metadata"]["name"],
        gateway=(GATEWAYS_NAMESPACE, gateway_name),
        hosts=route["spec"]["hostnames"],
        rules=rules,
    )


def _backend(backend: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in backend.items() if key in ("name", "weight")}


def _services(pool: Mapping[str, Any], pods: Sequence[Pod], *, number: int) -> list[Object]:
    """Return a pool's Service with every port of every pod that the selector takes."""
    name, app = pool["metadata"]["name"], pool["spec"]["selector"]["matchLabels"]["app"]
    port_name = "http2" if pool["spec"].get("appProtocol") == "kubernetes.io/h2c" else "http"
    ports = [each["number"] for each in pool["spec"]["targetPorts"]]
    addresses = [f"{pod.ip}:{port}" for pod in pods if pod.app == app for port in ports]
    return [
        service(NAMESPACE, name, port=SERVICE_PORT, port_name=port_name, number=number),
        *slices(NAMESPACE, name, addresses, port_name=port_name),
    ]


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
    config = [
        {
            "applyTo": apply_to,
            "match": {"context": "GATEWAY", **match},
            "patch": {"operation": operation, "value": value},
        }
        for apply_to, match, operation, value in patches
    ]
    spec = {"configPatches": config}
    return kubernetes_object("networking.istio.io/v1alpha3", "EnvoyFilter", GATEWAYS_NAMESPACE, "stand-ins", spec=spec)


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
        argv=(sys.executable, "-m", "operate", "extproc", *flags, *further),
        ready=(HttpReady(url=f"http://{HOST}:{admin_port}/readyz"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder):
        yield
