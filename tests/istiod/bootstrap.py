"""A proxy's configuration as a file for a real Envoy: routes and endpoints put in where istiod would send them.

What stands outside the mesh's control plane is replaced and nothing else: addresses, the sources of routes and
endpoints, and TLS sockets, because there is no certificate authority (tests look at those in the configuration).
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from extproc.local.envoy_config import SocketAddress
from extproc.local.ports import pick_free_port
from extproc.local.processes import HttpReady, ProcessSpec, Supervisor, find_envoy
from tests.istiod.base import Proxy
from tests.istiod.envoy_api import to_json

HOST = "127.0.0.1"
START_SECONDS = 60.0
END_SECONDS = 30.0
VALIDATE_SECONDS = 60.0
SHOWN_UPSTREAM = {  # tells a test who served
    "header": {"key": "x-kvmesh-upstream", "value": "%UPSTREAM_REMOTE_ADDRESS%"},
    "append_action": "OVERWRITE_IF_EXISTS_OR_ADD",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProxy:
    """Where the proxy answers."""

    listeners: Mapping[str, str]  # http://host:port by the listener's name
    admin: str


def bootstrap(
    proxy: Proxy,
    *,
    ports: Mapping[str, int] | None = None,
    endpoints: Mapping[str, Sequence[str]],
    admin_port: int = 0,
    host: str = HOST,
) -> dict[str, Any]:
    """Return Envoy's file; `ports` of listeners by name (others: any), `endpoints` as ip:port by cluster."""
    routes = {each.name: to_json(each) for each in proxy.routes}
    return {
        "admin": {"address": address(SocketAddress(host=HOST, port=admin_port))},
        "static_resources": {
            "listeners": [
                _listener(to_json(each), routes, SocketAddress(host=host, port=(ports or {}).get(each.name, 0)))
                for each in proxy.listeners
            ],
            "clusters": [_cluster(to_json(each), endpoints.get(each.name, ())) for each in proxy.clusters],
        },
    }


def _listener(listener: dict[str, Any], routes: Mapping[str, Any], at: SocketAddress) -> dict[str, Any]:
    for chain in listener["filter_chains"]:
        chain.get("filter_chain_match", {}).pop("server_names", None)  # TLS ends before
        for network_filter in chain["filters"]:
            manager = network_filter["typed_config"]
            if "rds" in manager:
                named = routes[manager.pop("rds")["route_config_name"]]
                manager["route_config"] = named | {
                    "response_headers_to_add": [*named.get("response_headers_to_add", ()), SHOWN_UPSTREAM]
                }
    return listener | {"address": address(at), "enable_reuse_port": False}


def _cluster(cluster: dict[str, Any], endpoints: Sequence[str]) -> dict[str, Any]:
    cluster.pop("transport_socket", None)
    if cluster.get("type") == "EDS":
        del cluster["eds_cluster_config"]
        listed = [{"endpoint": {"address": address(SocketAddress.parse(each))}} for each in endpoints]
        cluster["type"] = "STATIC"
        cluster["load_assignment"] = {"cluster_name": cluster["name"], "endpoints": [{"lb_endpoints": listed}]}
    return cluster


def address(of: SocketAddress) -> dict[str, Any]:
    """Write an address as Envoy reads it."""
    return {"socket_address": {"address": of.host, "port_value": of.port}}


async def refusal_of(config: Mapping[str, Any], folder: Path) -> str | None:
    """Let a real Envoy judge the file; return its words, None if it accepts."""
    path = folder / "validate.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(str(find_envoy()), "--mode", "validate", "-c", str(path)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(VALIDATE_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    words = output.decode()
    return words if process.returncode != 0 or "deprecated" in words.lower() else None


@asynccontextmanager
async def running_proxy(
    proxy: Proxy, folder: Path, *, endpoints: Mapping[str, Sequence[str]], avoid: Sequence[int] = ()
) -> AsyncIterator[RunningProxy]:
    """Start Envoy with it; its log is `folder/proxy.log`."""
    names = [each.name for each in proxy.listeners]
    free: list[int] = []
    while len(free) <= len(names):
        free.append(pick_free_port(host=HOST, avoid={*avoid, *free}))
    ports, admin = dict(zip(names, free, strict=False)), free[-1]
    config = bootstrap(proxy, ports=ports, endpoints=endpoints, admin_port=admin)
    async with running_envoy(config, folder, name="proxy", admin_port=admin):
        yield RunningProxy(
            listeners={name: f"http://{HOST}:{port}" for name, port in ports.items()}, admin=f"http://{HOST}:{admin}"
        )


@asynccontextmanager
async def running_envoy(config: Mapping[str, Any], folder: Path, *, name: str, admin_port: int) -> AsyncIterator[None]:
    """Start Envoy with this file and wait until it is ready; its log is `folder/NAME.log`."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    spec = ProcessSpec(
        name=name,
        argv=(str(find_envoy()), "-c", str(path), "--disable-hot-restart", "--concurrency", "1"),
        ready=(HttpReady(url=f"http://{HOST}:{admin_port}/ready"),),
        ready_within_seconds=START_SECONDS,
    )
    async with supervised([spec], folder):
        yield


@asynccontextmanager
async def supervised(specs: Sequence[ProcessSpec], folder: Path) -> AsyncIterator[None]:
    """Run processes until the block ends, all started at once; their logs are in the folder."""
    ready = asyncio.Event()

    async def when_ready() -> None:
        ready.set()
        await asyncio.Event().wait()

    names = ", ".join(spec.name for spec in specs)
    run = asyncio.create_task(
        Supervisor(log_directory=folder).run([specs], environment=os.environ, when_ready=when_ready),
        name=f"supervisor of {names}",
    )
    began = asyncio.create_task(ready.wait(), name=f"{names}: ready")
    try:
        await asyncio.wait({run, began}, timeout=2 * START_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        if run.done():
            run.result()
        assert ready.is_set(), f"not ready: {names}"
        yield
    finally:
        began.cancel()
        run.cancel()
        with suppress(asyncio.CancelledError):
            async with asyncio.timeout(END_SECONDS):
                await run
