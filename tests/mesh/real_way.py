"""One installation on a real istiod and an Envoy like istio-proxy, before the picker, index and simulated pods."""

import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from operate.install.plan import InstallPlan, Mode, RouteSettings
from tests.e2e.stack import Stack, free_ports
from tests.e2e.supervised import HOST
from tests.kube_api.certificates import Authority
from tests.mesh.install_checks import Way
from tests.mesh.installations import CLIENT_LABELS, DENIED_PATH, POOL, SHOP, Installation, installed, shown_upstream
from tests.mesh.istio_envoys import NEWEST
from tests.mesh.istio_proxy import IstioProxy, Workload, running_istio_proxy
from tests.mesh.istiod import Istiod, running_istiod
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

NOBODY = f"{HOST}:1"  # a free port may be taken by another test meanwhile, which would not refuse
GATEWAY = "inference-gateway"


@dataclass(frozen=True, kw_only=True)
class RealWay:
    """The way into the mesh, and who is on it."""

    way: Way
    istiod: Istiod
    proxy: IstioProxy


@dataclass(frozen=True, kw_only=True)
class MeshCase:
    """One installation on one Envoy, with what people have configured beside it."""

    installation: Installation
    envoy: str = NEWEST
    beside: Sequence[Object] = ()
    has_picker: bool = True  # one answers
    has_rule: bool = False  # people have a DestinationRule for the pool
    route_settings: RouteSettings = RouteSettings.KEEP
    mesh_config: Mapping[str, Any] = field(default_factory=dict)
    further_listeners: Mapping[int, int] = field(default_factory=dict)  # of the gateway: port, and the proxy's own
    route_port: int | None = None  # the one listener of the pool's routes; None: they are of all

    def __str__(self) -> str:
        return f"{self.installation}-envoy-{self.envoy}"

    @property
    def gateway_namespace(self) -> str:
        """Where the gateway is."""
        return self.installation.plan().gateways[0].namespace

    @property
    def is_sidecar(self) -> bool:
        """Whether clients ask through a proxy of their own."""
        return self.installation.mode is Mode.SIDECAR

    def plan(self, port: int) -> InstallPlan:
        """Return the plan: the pods have no sidecars, and a client's proxy listens on the pool's `port` itself."""
        pool = replace(POOL, in_mesh=False, has_rule=self.has_rule, port=port if self.is_sidecar else POOL.port)
        plan = replace(self.installation.plan(), pools=(pool,), route_settings=self.route_settings)
        return replace(plan, routes=tuple(replace(each, pool=pool) for each in plan.routes))

    def objects(self, stack: Stack, *, port: int, authority: Authority) -> list[Object]:
        """Return all that istiod has to know; clients reach the proxy at `port`."""
        pool_port = port if self.is_sidecar else POOL.port
        picker = stack.ready["extproc"] if self.has_picker else NOBODY
        return [
            *installed(self.plan(port), picker=picker),
            service(POOL.namespace, POOL.name, port=pool_port, number=1),
            *slices(POOL.namespace, POOL.name, stack.ready["endpoints"]),
            service(SHOP.namespace, SHOP.name, port=pool_port, number=2),
            *slices(SHOP.namespace, SHOP.name, [NOBODY]),
            shown_upstream(),
            *([] if self.is_sidecar else self._gateway(port, authority)),
            *self.beside,
        ]

    def workload(self) -> Workload:
        """Return whose proxy clients ask through."""
        if self.is_sidecar:
            return Workload(namespace="llm-clients", name="chat", service_account="chat", labels=CLIENT_LABELS)
        return Workload(
            namespace=self.gateway_namespace,
            name=GATEWAY,
            service_account=f"{GATEWAY}-istio",
            labels=gateway_labels(GATEWAY),
            is_gateway=True,
        )

    def _gateway(self, port: int, authority: Authority) -> list[Object]:
        namespace = self.gateway_namespace
        listeners = {443 if self.installation.is_https else 80: port, **self.further_listeners}
        at = (namespace, GATEWAY)
        prefixes = ("/v1", DENIED_PATH, "/slow")
        denied = {
            "selector": {"matchLabels": gateway_labels(GATEWAY)},
            "action": "DENY",
            "rules": [{"to": [{"operation": {"paths": [f"{DENIED_PATH}*"]}}]}],
        }
        host = self.installation.host
        pair = authority.issue(host, subject="/O=tests", names=f"DNS:{host}")
        files = {"tls.crt": pair.cert, "tls.key": pair.key}
        secret = {name: base64.b64encode(file.read_bytes()).decode() for name, file in files.items()}
        return [
            *gateway(*at, listeners, tls_secret="public" if 443 in listeners else "", ip=HOST),
            kubernetes_object("v1", "Secret", namespace, "public", type="kubernetes.io/tls", data=secret),
            http_route(
                POOL.namespace,
                "llm-route",
                gateway=at,
                port=self.route_port,
                hosts=[self.installation.host],
                rules=[rule(each, POOL.name, POOL.port) for each in prefixes],
            ),
            http_route(
                SHOP.namespace,
                SHOP.name,
                gateway=at,
                hosts=[self.installation.other_host],
                rules=[rule("/", SHOP.name, SHOP.port)],
            ),
            kubernetes_object("security.istio.io/v1", "AuthorizationPolicy", namespace, "denied", spec=denied),
        ]


@asynccontextmanager
async def real_way(
    case: MeshCase, stack: Stack, folder: Path, *, secrets: Path, authority: Authority
) -> AsyncIterator[RealWay]:
    """Start istiod and the proxy; yield when the proxy listens, or has refused to."""
    (port,) = free_ports(1)
    objects = case.objects(stack, port=port, authority=authority)
    async with (
        running_istiod(objects, folder, mesh_config=case.mesh_config) as istiod,
        running_istio_proxy(case.workload(), istiod, folder, secrets=secrets, minor=case.envoy) as proxy,
    ):
        await proxy.configured()
        scheme = "https" if case.installation.is_https else "http"
        way = Way(name=str(case), installation=case.installation, url=f"{scheme}://{HOST}:{port}", stack=stack)
        yield RealWay(way=way, istiod=istiod, proxy=proxy)


@asynccontextmanager
async def running_gateway(
    at: tuple[str, str], objects: Sequence[Object], folder: Path, *, secrets: Path
) -> AsyncIterator[None]:
    """Start istiod with these objects, and a gateway's proxy, which must take all of it; `at`: namespace and name."""
    workload = Workload(
        namespace=at[0], name=at[1], service_account=f"{at[1]}-istio", labels=gateway_labels(at[1]), is_gateway=True
    )
    async with (
        running_istiod(objects, folder) as istiod,
        running_istio_proxy(workload, istiod, folder, secrets=secrets) as proxy,
    ):
        await proxy.configured()
        assert await proxy.refused() == {}
        assert await istiod.filter_errors() == {}
        yield
