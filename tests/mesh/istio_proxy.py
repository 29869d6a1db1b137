"""Envoys that are told by istiod what to do, as istio-proxy is: its minors, without the extensions that it lacks."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from operate.local.envoy_config import SocketAddress
from operate.local.processes import HttpReady, ProcessSpec
from tests.e2e.stack import eventually, free_ports
from tests.e2e.supervised import HOST, START_SECONDS, address, supervised
from tests.mesh.istio_envoys import NEWEST, envoy_of, without_what_istio_proxy_lacks
from tests.mesh.istiod import Istiod
from tests.mesh.secrets_server import spiffe_name


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Whom a proxy stands for: what istio-agent tells istiod of it."""

    namespace: str
    name: str
    service_account: str
    labels: Mapping[str, str]
    is_gateway: bool = False
    ip: str = HOST
    istio_version: str = "1.31.0"
    pod: str = ""  # its name where there is such an object

    @property
    def identity(self) -> str:
        """Return its name in certificates."""
        return spiffe_name(self.namespace, self.service_account)

    @property
    def node(self) -> dict[str, Any]:
        kind = "router" if self.is_gateway else "sidecar"
        return {
            "id": f"{kind}~{self.ip}~{self.pod or self.name}.{self.namespace}~{self.namespace}.svc.cluster.local",
            "cluster": f"{self.name}.{self.namespace}",
            "metadata": {
                "ISTIO_VERSION": self.istio_version,
                "NAMESPACE": self.namespace,
                "LABELS": dict(self.labels),
                "CLUSTER_ID": "Kubernetes",
                "SERVICE_ACCOUNT": self.service_account,
                "INTERCEPTION_MODE": "NONE",  # no iptables: listeners have ports of their own
            },
        }


@dataclass(frozen=True, kw_only=True)
class IstioProxy:
    """A running proxy."""

    admin: str
    http: aiohttp.ClientSession

    async def stats(self, prefix: str) -> dict[str, int]:
        """Return its counters and gauges that begin so."""
        async with self.http.get(f"{self.admin}/stats", params={"filter": f"^{prefix}"}) as response:
            lines = (await response.text()).splitlines()
        pairs = [line.rpartition(": ") for line in lines]
        return {name: int(value) for name, _, value in pairs if value.isdigit()}

    async def configured(self) -> None:
        """Return when istiod's answer for the listeners was taken, or refused."""

        async def judged() -> int:
            stats = await self.stats("listener_manager.lds.update_(success|rejected)")
            return sum(stats.values())

        await eventually(judged, bool)
        await eventually(partial(self.stats, "listener_manager.total_listeners_warming"), lambda s: not any(s.values()))

    async def clusters(self) -> dict[str, dict[str, Any]]:
        """Return the clusters that istiod has given it, by name."""
        found = await self._dump("dynamic_active_clusters")
        return {each["cluster"]["name"]: each["cluster"] for each in found}

    async def routes(self) -> dict[str, dict[str, Any]]:
        """Return the routes of all hosts, by name."""
        found = await self._dump("dynamic_route_configs")
        hosts = [host for each in found for host in each["route_config"].get("virtual_hosts", ())]
        return {route.get("name", ""): route for host in hosts for route in host["routes"]}

    async def _dump(self, part: str) -> list[dict[str, Any]]:
        async with self.http.get(f"{self.admin}/config_dump", params={"resource": part}) as response:
            configs: list[dict[str, Any]] = (await response.json()).get("configs", [])
            return configs

    async def refused(self) -> dict[str, str]:
        """Return the words of Envoy for each resource of istiod's that it has refused."""
        async with self.http.get(f"{self.admin}/config_dump", params={"include_eds": ""}) as response:
            dump = await response.json()
        states = [state for part in dump["configs"] for key in part for state in _entries(part[key])]
        return {each.get("name", "?"): each["error_state"]["details"] for each in states if "error_state" in each}


def _entries(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


@asynccontextmanager
async def running_istio_proxy(
    workload: Workload, istiod: Istiod, folder: Path, *, secrets: Path, minor: str = NEWEST, name: str = "proxy"
) -> AsyncIterator[IstioProxy]:
    """Start a proxy; yield when it has its listeners. Its certificates come from the socket `secrets`."""
    (admin,) = free_ports(1)
    config = folder / f"{name}.json"
    config.write_text(json.dumps(_bootstrap(workload, istiod, admin_port=admin, secrets=secrets)), encoding="utf-8")
    flags = ("--disable-hot-restart", "--concurrency", "1", *without_what_istio_proxy_lacks())
    spec = ProcessSpec(
        name=name,
        argv=(str(envoy_of(minor)), "-c", str(config), *flags),
        ready=(HttpReady(url=f"http://{HOST}:{admin}/ready"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder), aiohttp.ClientSession() as http:
        yield IstioProxy(admin=f"http://{HOST}:{admin}", http=http)


def _bootstrap(workload: Workload, istiod: Istiod, *, admin_port: int, secrets: Path) -> dict[str, Any]:
    ads = {"ads": {}, "initial_fetch_timeout": "0s", "resource_api_version": "V3"}
    pipe = {"pipe": {"path": str(secrets)}}
    return {
        "node": workload.node,
        "admin": {"address": address(SocketAddress(host=HOST, port=admin_port))},
        "dynamic_resources": {
            "lds_config": ads,
            "cds_config": ads,
            "ads_config": {
                "api_type": "DELTA_GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": True,
                "grpc_services": [
                    {
                        "envoy_grpc": {"cluster_name": "xds-grpc"},
                        # in place of the certificate that istio-agent shows
                        "initial_metadata": [{"key": "x-forwarded-client-cert", "value": f"URI={workload.identity}"}],
                    }
                ],
            },
        },
        "static_resources": {
            "clusters": [
                _static_cluster("xds-grpc", address(SocketAddress.parse(istiod.xds))),
                _static_cluster("sds-grpc", pipe),
                _static_cluster("agent", address(SocketAddress(host=HOST, port=1))),
                _static_cluster("prometheus_stats", address(SocketAddress(host=HOST, port=admin_port))),
            ]
        },
    }


def _static_cluster(name: str, at: Mapping[str, Any]) -> dict[str, Any]:
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {
        "@type": f"type.googleapis.com/{options}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {options: http2} if name.endswith("-grpc") else {},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at}}]}]},
    }
