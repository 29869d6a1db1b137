"""Reads the admin pages of a running picker, an indexer and an Envoy. Read-only, no judgement."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from extproc.models.models import ModelTable, TokensFrom
from extproc.pages.picker_state import PickerState
from extproc.pods.endpoint import Role
from extproc.pods.pod_ranks import pod_of
from extproc.prompts.folder_checks import TokenState, TokenVerdict
from operate.doctor.facts import (
    EnvoyCluster,
    EnvoyFacts,
    EnvoyHost,
    ExtProcFilter,
    IndexerFacts,
    IndexerFinding,
    PickerFacts,
    PoolRoute,
    RefusedResource,
)
from operate.doctor.questions import Client, ask_health
from operate.install.envoy_filters import UNPICKED_FILTER

EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
PER_ROUTE = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
POOL_KEY = "x-kvmesh-pool"
KINDS = {"ListenersConfigDump": "listener", "ClustersConfigDump": "cluster", "RoutesConfigDump": "route"}
UPDATES = {"listener_manager.lds.": "listener", "cluster_manager.cds.": "cluster", ".rds.": "route"}  # by counter name
NOT_IN_FORCE = frozenset({"error_state", "warming_state", "draining_state"})  # sections of a config dump
NOT_COMPARED = TokenState(TokenVerdict.UNVERIFIED, "the picker has not compared its folder with a pod yet")
COMPARED_PAUSE_SECONDS = 0.2  # between looks for the picker's comparison
MAX_PICKERS = 16  # per cluster, for health checks


async def gather_picker(client: Client, url: str, *, grpc_port: int) -> PickerFacts:
    """Return the facts of a single-pool picker."""
    url = url.rstrip("/")
    readiness = await client.ask_admin(f"{url}/readyz")
    page = await client.ask_admin(f"{url}/state")
    endpoints, index = page.field("endpoints"), page.field("index")
    if not isinstance(endpoints, list):
        answer = readiness.problem or page.problem or page.refusal or f"/state answers {page.status}"
        return PickerFacts(url=url, problem=answer if page.status != 200 else "/state is not what a picker answers")
    problem = index.get("problem") if isinstance(index, Mapping) else None
    picker = await _gather_health(client, url, ready=readiness.status == 200, problem=problem, grpc_port=grpc_port)
    return replace(
        picker,
        endpoints=frozenset(pod_of(str(each.get("address"))) for each in endpoints if isinstance(each, Mapping)),
        prefill_pods=sum(isinstance(each, Mapping) and each.get("role") == Role.PREFILL for each in endpoints),
    )


async def gather_pools_picker(
    client: Client, url: str, *, grpc_port: int
) -> tuple[PickerFacts, Mapping[str, int] | None]:
    """Return the facts of a multi-pool picker, and its endpoint counts by pool (or None)."""
    url = url.rstrip("/")
    readiness = await client.ask_admin(f"{url}/readyz")
    page = await client.ask_admin(f"{url}/pools")
    content = page.content
    lines = content.get("pools") if isinstance(content, Mapping) else content
    if not isinstance(lines, list):
        answer = page.problem or page.refusal or f"/pools answers {page.status}: is this a picker with pools?"
        return PickerFacts(url=url, problem=answer), None
    state: Any = readiness.json()
    problem = state.get("index_problem") if isinstance(state, Mapping) else None
    ready = readiness.status == 200
    picker = await _gather_health(client, url, ready=ready, problem=problem, grpc_port=grpc_port)
    served = {str(line.get("pool")): line.get("endpoints") for line in lines if isinstance(line, Mapping)}
    prefill = sum(
        count for line in lines if isinstance(line, Mapping) and isinstance(count := line.get("prefill"), int)
    )
    picker = replace(picker, prefill_pods=prefill)
    return picker, {name: count for name, count in served.items() if isinstance(count, int)}


async def with_picker_tokens(
    client: Client, picker: PickerFacts, models: ModelTable, *, within_seconds: float, pool: str = ""
) -> PickerFacts:
    """Return a picker's facts with its verdicts on the tokens of one pool.

    A picker that has just started gets `within_seconds` for its first comparison with a pod.
    """
    query = f"?pool={quote(pool, safe='')}" if pool else ""
    missing = {model.name: NOT_COMPARED for model in models.served if model.tokens_from is TokensFrom.TOKENIZER}
    deadline = time.monotonic() + within_seconds
    while True:
        page = await client.ask_admin(f"{picker.url}/state{query}")
        with suppress(msgspec.ValidationError):
            told = msgspec.convert(page.content, PickerState)
            states = {name: TokenState(TokenVerdict(found), why) for name, (found, why) in told.token_states.items()}
            picker = replace(picker, token_states=missing | states, token_sources=told.token_sources)
        waits = any(state.verdict is TokenVerdict.UNVERIFIED for state in picker.token_states.values())
        if not waits or time.monotonic() >= deadline:
            return picker
        await asyncio.sleep(COMPARED_PAUSE_SECONDS)


async def _gather_health(client: Client, url: str, *, ready: bool, problem: object, grpc_port: int) -> PickerFacts:
    """Check the health of the picker's gRPC port; `problem` is its index problem."""
    host = urlsplit(url).hostname or "127.0.0.1"
    address = f"[{host}]:{grpc_port}" if ":" in host else f"{host}:{grpc_port}"
    health = await ask_health(address, timeout_seconds=client.timeout_seconds)
    return PickerFacts(url=url, ready=ready, index_problem=str(problem or ""), grpc_address=address, grpc_health=health)


async def gather_indexer(client: Client, url: str) -> IndexerFacts:
    """Return the indexers' shared findings from one indexer's admin page."""
    url = url.rstrip("/")
    page = await client.ask_admin(f"{url}/sources")
    findings = page.field("findings")
    if not isinstance(findings, list):
        status = f"/sources answers {page.status}" if page.status != 200 else "it is no indexer"
        return IndexerFacts(url=url, problem=page.problem or page.refusal or status)
    return IndexerFacts(
        url=url,
        findings=tuple(
            IndexerFinding(
                endpoint=_subject(each), reason=str(each.get("reason", "")), message=str(each.get("message", ""))
            )
            for each in findings
            if isinstance(each, Mapping)
        ),
    )


def _subject(finding: Mapping[str, Any]) -> str:
    rank = finding.get("dp_rank")
    return str(finding.get("endpoint", "")) + ("" if rank is None else f"#{rank}")


async def gather_envoy(client: Client, url: str) -> EnvoyFacts:
    """Return configuration and state of the Envoy at this admin address."""
    url = url.rstrip("/")
    dump, clusters, info, stats = await asyncio.gather(
        client.ask(f"{url}/config_dump"),
        client.ask(f"{url}/clusters?format=json"),
        client.ask(f"{url}/server_info"),
        client.ask(f"{url}/stats?format=json&filter=update_rejected$"),
    )
    configs = dump.content
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
        enabling_filters=frozenset(read_enabling_filters(configs)),
        asked_by_routes=frozenset(read_asked_by_routes(configs)),
        refused=tuple(read_refused(configs)),
        rejected_updates=read_rejected(stats.json()),
    )
    picking = facts.picking_filter()
    cluster = facts.cluster(picking.cluster) if picking is not None else None
    addresses = sorted(cluster.addresses)[:MAX_PICKERS] if cluster is not None else []
    health = await asyncio.gather(*(ask_health(each, timeout_seconds=client.timeout_seconds) for each in addresses))
    return replace(facts, picker_health=dict(zip(addresses, health, strict=True)))


def read_filters(configs: Mapping[str, Any]) -> Iterator[ExtProcFilter]:
    """Yield every ext_proc filter of every listener, including those within matchers."""
    for section in _sections(configs, "ListenersConfigDump"):
        for listener in _typed(section, "envoy.config.listener.v3.Listener"):
            for manager in _typed(listener, MANAGER):
                for entry in _list(manager, "http_filters"):
                    for config in _typed(entry, EXT_PROC):
                        yield ExtProcFilter(
                            name=str(entry.get("name", "")),
                            config=config,
                            manager=manager,
                            listener=listener,
                            is_disabled=entry.get("disabled") is True,
                        )


def read_clusters(configs: Mapping[str, Any], clusters: object) -> Iterator[EnvoyCluster]:
    """Join each cluster's configuration with its current hosts."""
    hosts = {str(each.get("name")): tuple(_hosts(each)) for each in _list(clusters, "cluster_statuses")}
    for section in _sections(configs, "ClustersConfigDump"):
        for config in _typed(section, "envoy.config.cluster.v3.Cluster"):
            name = str(config.get("name", ""))
            yield EnvoyCluster(name=name, config=config, hosts=hosts.get(name, ()))


def read_routes(configs: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Return the actions of all routes to a cluster."""
    return (action for *_, action in _routes(configs))


def read_pool_routes(configs: Mapping[str, Any]) -> Iterator[PoolRoute]:
    """Yield the routes that name a pool. A route overrides its virtual host, which overrides the route table."""
    for table, host, route, action in _routes(configs):
        pool, fails_open = "", None
        for level in (table, host, route):
            for overrides in _overrides(level):
                pool = _pool_of(overrides) or pool
                allow = overrides.get("failure_mode_allow")
                fails_open = allow if isinstance(allow, bool) else fails_open
            if UNPICKED_FILTER in (level.get("typed_per_filter_config") or {}):
                fails_open = False
        if pool:
            name = str(route.get("name") or host.get("name") or table.get("name") or "")
            limit = route.get("request_body_buffer_limit", host.get("request_body_buffer_limit"))
            yield PoolRoute(
                name=name,
                pool=pool,
                clusters=_led_to(action),
                fails_open=fails_open,
                buffer_bytes=None if limit is None else _count(str(limit)),
            )


def read_enabling_filters(configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the filters enabled by per-filter settings of a route, virtual host or route table."""
    for *levels, _ in _routes(configs):
        for level in levels:
            settings = level.get("typed_per_filter_config")
            for name, config in settings.items() if isinstance(settings, Mapping) else ():
                if isinstance(config, Mapping) and config.get("disabled") is not True:
                    yield name


def read_asked_by_routes(configs: Mapping[str, Any]) -> Iterator[str]:
    """Yield the ext_proc clusters that routes name, as Istio writes them for InferencePools."""
    for *levels, _ in _routes(configs):
        for overrides in (each for level in levels for each in _overrides(level)):
            service = overrides.get("grpc_service")
            envoy = service.get("envoy_grpc") if isinstance(service, Mapping) else None
            if isinstance(envoy, Mapping) and envoy.get("cluster_name"):
                yield str(envoy["cluster_name"])


def read_refused(configs: Mapping[str, Any]) -> list[RefusedResource]:
    """Return the resources that Envoy last rejected. Their `failed_configuration` in the dump is not in force."""
    found = list(_error_states(configs))
    named = {each.details for each in found if each.name}
    return [each for each in found if each.name or each.details not in named]  # some are listed twice


def _error_states(configs: Mapping[str, Any]) -> Iterator[RefusedResource]:
    for section in _list(configs, "configs"):
        kind = KINDS.get(str(section.get("@type", "")).rpartition(".")[2], "")
        for state in (each for part in section if kind for each in _list(section, part)):
            if isinstance(error := state.get("error_state"), Mapping):
                yield RefusedResource(
                    kind=kind,
                    name=str(state.get("name", "")),
                    details=str(error.get("details", "it does not say why")),
                    has_earlier=any(isinstance(state.get(name), Mapping) for name in ("active_state", kind)),
                )


def read_rejected(stats: object) -> Mapping[str, int]:
    """Return the rejected updates by kind, without zeros."""
    counts: Counter[str] = Counter()
    for each in _list(stats, "stats"):
        name, value = str(each.get("name", "")), each.get("value")
        kind = next((kind for part, kind in UPDATES.items() if part in name), None)
        if kind is not None and isinstance(value, int):
            counts[kind] += value
    return {kind: count for kind, count in counts.items() if count}


def _routes(configs: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], ...]]:
    """Yield each route to a cluster as (route table, virtual host, route, action)."""
    for section in _sections(configs, "RoutesConfigDump"):
        for table in _typed(section, "envoy.config.route.v3.RouteConfiguration"):
            for host in _list(table, "virtual_hosts"):
                for route in _list(host, "routes"):
                    if isinstance(action := route.get("route"), Mapping):
                        yield table, host, route, action


def _overrides(level: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    configs = level.get("typed_per_filter_config")
    for config in configs.values() if isinstance(configs, Mapping) else ():
        for each in _typed(config, PER_ROUTE):
            overrides = each.get("overrides")
            if isinstance(overrides, Mapping):
                yield overrides


def _pool_of(overrides: Mapping[str, Any]) -> str:
    """Return the pool that the route names to the picker, without the port that `install` appends."""
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
    """Yield the outermost messages of a type at any depth, except in sections that are not in force."""
    if isinstance(value, Mapping):
        if str(value.get("@type", "")).rpartition("/")[2] == type_name:
            yield value
            return
        for name, inner in value.items():
            if name not in NOT_IN_FORCE:
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
    """Extract the version from `…/1.40.0/Clean/RELEASE/BoringSSL`."""
    text = info.get("version") if isinstance(info, Mapping) else None
    parts = text.split("/") if isinstance(text, str) else []
    return parts[1] if len(parts) > 1 else ""
