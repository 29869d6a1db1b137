"""Asks an Envoy's admin page for its configuration and its clusters. Changes nothing there, judges nothing."""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import aiohttp

from extproc.doctor.facts import EnvoyCluster, EnvoyFacts, EnvoyHost, ExtProcFilter, PoolRoute
from extproc.doctor.grpc_health_check import ask_health
from extproc.doctor.http_page import ask

EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
PER_ROUTE = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
POOL_KEY = "x-kvmesh-pool"
MAX_PICKERS = 16  # of one cluster that are asked for their health


async def gather_envoy(http: aiohttp.ClientSession, url: str, *, timeout_seconds: float) -> EnvoyFacts:
    """Return what the Envoy at this admin address has been told and sees."""
    url = url.rstrip("/")
    dump, clusters, info = await asyncio.gather(
        ask(http, f"{url}/config_dump", timeout_seconds=timeout_seconds),
        ask(http, f"{url}/clusters?format=json", timeout_seconds=timeout_seconds),
        ask(http, f"{url}/server_info", timeout_seconds=timeout_seconds),
    )
    configs = dump.json() if dump.status == 200 else None
    if not isinstance(configs, Mapping) or not isinstance(configs.get("configs"), list):
        why = dump.problem or f"/config_dump answers {dump.status}"
        return EnvoyFacts(url=url, problem=why if dump.status != 200 else "/config_dump is not what Envoy answers")
    facts = EnvoyFacts(
        url=url,
        version=_version(info.json()),
        filters=tuple(read_filters(configs)),
        clusters=tuple(read_clusters(configs, clusters.json())),
        routes=tuple(read_routes(configs)),
        pool_routes=tuple(read_pool_routes(configs)),
    )
    picking = facts.picking_filter()
    cluster = facts.cluster(picking.cluster) if picking is not None else None
    addresses = sorted(cluster.addresses)[:MAX_PICKERS] if cluster is not None else []
    health = await asyncio.gather(*(ask_health(address, timeout_seconds=timeout_seconds) for address in addresses))
    return replace(facts, picker_health=dict(zip(addresses, health, strict=True)))


def read_filters(configs: Mapping[str, Any]) -> Iterator[ExtProcFilter]:
    """Find every ext_proc filter of every listener, those within matchers included."""
    for section in _sections(configs, "ListenersConfigDump"):
        for listener in _typed(section, "envoy.config.listener.v3.Listener"):
            for manager in _typed(listener, MANAGER):
                for entry in _list(manager, "http_filters"):
                    for config in _typed(entry, EXT_PROC):
                        yield ExtProcFilter(
                            name=str(entry.get("name", "")), config=config, manager=manager, listener=listener
                        )


def read_clusters(configs: Mapping[str, Any], clusters: object) -> Iterator[EnvoyCluster]:
    """Join each cluster's configuration with the addresses that Envoy has for it now."""
    hosts = {str(each.get("name")): tuple(_hosts(each)) for each in _list(clusters, "cluster_statuses")}
    for section in _sections(configs, "ClustersConfigDump"):
        for config in _typed(section, "envoy.config.cluster.v3.Cluster"):
            name = str(config.get("name", ""))
            yield EnvoyCluster(name=name, config=config, hosts=hosts.get(name, ()))


def read_routes(configs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the actions of all routes that lead to a cluster."""
    for section in _sections(configs, "RoutesConfigDump"):
        for found in _typed(section, "envoy.config.route.v3.RouteConfiguration"):
            for host in _list(found, "virtual_hosts"):
                for route in _list(host, "routes"):
                    action = route.get("route")
                    if isinstance(action, Mapping):
                        yield action


def read_pool_routes(configs: Mapping[str, Any]) -> Iterator[PoolRoute]:
    """Return the routes that name a pool; what a route says goes before what its host and the whole table say."""
    for section in _sections(configs, "RoutesConfigDump"):
        for found in _typed(section, "envoy.config.route.v3.RouteConfiguration"):
            for host in _list(found, "virtual_hosts"):
                for route in _list(host, "routes"):
                    action = route.get("route")
                    if not isinstance(action, Mapping):
                        continue
                    pool, fails_open = "", None
                    for level in (found, host, route):
                        for overrides in _overrides(level):
                            pool = _pool_of(overrides) or pool
                            said = overrides.get("failure_mode_allow")
                            fails_open = said if isinstance(said, bool) else fails_open
                    if pool:
                        name = str(route.get("name") or host.get("name") or found.get("name") or "")
                        yield PoolRoute(name=name, pool=pool, clusters=_led_to(action), fails_open=fails_open)


def _overrides(level: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    configs = level.get("typed_per_filter_config")
    for config in configs.values() if isinstance(configs, Mapping) else ():
        for each in _typed(config, PER_ROUTE):
            overrides = each.get("overrides")
            if isinstance(overrides, Mapping):
                yield overrides


def _pool_of(overrides: Mapping[str, Any]) -> str:
    """Return the pool that the picker is told, `namespace/name`: `install` adds the port."""
    for entry in _list(overrides, "grpc_initial_metadata"):
        if entry.get("key") == POOL_KEY:
            namespace, _, name = str(entry.get("value", "")).partition("/")
            return f"{namespace}/{name.partition(':')[0]}"
    return ""


def _led_to(action: Mapping[str, Any]) -> frozenset[str]:
    weighted = [each.get("name") for each in _list(action.get("weighted_clusters"), "clusters")]
    return frozenset(str(name) for name in (action.get("cluster"), *weighted) if name)


def _sections(configs: Mapping[str, Any], kind: str) -> Iterator[Mapping[str, Any]]:
    return (each for each in _list(configs, "configs") if str(each.get("@type", "")).endswith(f".{kind}"))


def _typed(value: object, type_name: str) -> Iterator[Mapping[str, Any]]:
    """Return the outermost messages of one type, at any depth."""
    if isinstance(value, Mapping):
        if str(value.get("@type", "")).rpartition("/")[2] == type_name:
            yield value
            return
        for inner in value.values():
            yield from _typed(inner, type_name)
    elif isinstance(value, list):
        for inner in value:
            yield from _typed(inner, type_name)


def _list(value: object, name: str) -> list[Mapping[str, Any]]:
    items = value.get(name) if isinstance(value, Mapping) else None
    return [each for each in items if isinstance(each, Mapping)] if isinstance(items, list) else []


def _hosts(status: Mapping[str, Any]) -> Iterator[EnvoyHost]:
    for host in _list(status, "host_statuses"):
        address = host.get("address")
        socket = address.get("socket_address") if isinstance(address, Mapping) else None
        if not isinstance(socket, Mapping):
            continue  # a pipe, or an internal listener
        ip, health = str(socket.get("address")), host.get("health_status")
        numbers = {str(each.get("name")): str(each.get("value", "0")) for each in _list(host, "stats")}
        yield EnvoyHost(
            address=f"[{ip}]:{socket.get('port_value')}" if ":" in ip else f"{ip}:{socket.get('port_value')}",
            healthy=_is_healthy(health if isinstance(health, Mapping) else {}),
            connections_failed=_count(numbers.get("cx_connect_fail")),
            connections_made=_count(numbers.get("cx_total")),
        )


def _is_healthy(status: Mapping[str, Any]) -> bool:
    eds = status.get("eds_health_status", "HEALTHY")
    return eds in ("HEALTHY", "UNKNOWN", "DEGRADED") and not any(
        value is True for name, value in status.items() if name.startswith("failed_")
    )


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _version(info: object) -> str:
    """Read `…/1.40.0/Clean/RELEASE/BoringSSL`."""
    text = info.get("version") if isinstance(info, Mapping) else None
    parts = text.split("/") if isinstance(text, str) else []
    return parts[1] if len(parts) > 1 else ""
