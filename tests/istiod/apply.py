"""Applies EnvoyFilters to a proxy's configuration as istiod does, and says of each patch what came of it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.istiod import match as matching
from tests.istiod.base import Proxy
from tests.istiod.envoy_api import CONNECTION_MANAGER, clone, pack, unpack
from tests.istiod.filters import Patch, RefusedFilterError, is_for, patches_for
from tests.istiod.merge import merge, merge_any
from tests.istiod.releases import Release

HCM = "envoy.filters.network.http_connection_manager"

__all__ = ["HCM", "Applied", "Outcome", "RefusedFilterError", "apply_envoy_filters"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one patch."""

    patch: str  # namespace/name[index]
    apply_to: str
    where: tuple[str, ...]  # what it changed; nothing: it matched nothing here, or is for proxies of other versions
    dropped: tuple[str, ...]  # fields that this release does not know
    is_for_version: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """A proxy's configuration with the filters on it."""

    proxy: Proxy
    outcomes: tuple[Outcome, ...]

    def unmatched(self) -> list[str]:
        """Return the patches that are meant for this proxy and changed nothing."""
        return [each.patch for each in self.outcomes if each.is_for_version and not each.where]

    def dropped(self) -> dict[str, tuple[str, ...]]:
        """Return the fields that were dropped, by patch."""
        return {each.patch: each.dropped for each in self.outcomes if each.is_for_version and each.dropped}


@dataclass(kw_only=True)
class _Work:
    proxy: Proxy
    release: Release
    patches: Sequence[Patch]
    where: dict[str, list[str]] = field(default_factory=dict)

    def of(self, apply_to: str, *, at: str, operations: Iterable[str] | None = None) -> list[Patch]:
        """Return the patches of a kind in the context of the listener, routes or cluster `at`."""
        context = matching.context_of(self.proxy, at)
        return [
            patch
            for patch in self.patches
            if patch.apply_to == apply_to
            and patch.context in ("ANY", context)
            and (operations is None or patch.operation in operations)
        ]

    def note(self, patch: Patch, where: str) -> None:
        self.where.setdefault(patch.name, []).append(where)


def apply_envoy_filters(proxy: Proxy, documents: Iterable[Mapping[str, Any]], *, release: Release) -> Applied:
    """Return the patched configuration; raise RefusedFilterError if istiod's webhook would refuse a document."""
    patches = patches_for(proxy, documents, release=release)
    work = _Work(proxy=proxy, release=release, patches=[patch for patch in patches if is_for(patch, proxy)])
    changed = proxy.with_parts(
        listeners=_listeners(work, [clone(each) for each in proxy.listeners]),
        routes=[_routes(work, clone(each)) for each in proxy.routes],
        clusters=_clusters(work, [clone(each) for each in proxy.clusters]),
    )
    outcomes = tuple(
        Outcome(
            patch=patch.name,
            apply_to=patch.apply_to,
            where=tuple(work.where.get(patch.name, ())),
            dropped=patch.dropped,
            is_for_version=is_for(patch, proxy),
        )
        for patch in patches
    )
    return Applied(proxy=changed, outcomes=outcomes)


# --- listeners --------------------------------------------------------------------------------------------------------


def _listeners(work: _Work, listeners: list[Any]) -> list[Any]:
    kept = []
    for listener in listeners:
        meant = [
            patch
            for patch in work.of("LISTENER", at=listener.name, operations=("MERGE", "REMOVE"))
            if matching.listener_matches(patch.match, listener, apply_to="LISTENER")
        ]
        for patch in meant:
            work.note(patch, listener.name)
            if patch.operation == "MERGE":
                merge(listener, patch.value)
        if not any(patch.operation == "REMOVE" for patch in meant):
            _filter_chains(work, listener)
            kept.append(listener)
    for patch in work.of("LISTENER", at="", operations=("ADD",)):
        kept.append(clone(patch.value))
        work.note(patch, patch.value.name)
    return kept


def _filter_chains(work: _Work, listener: Any) -> None:
    def meant(patch: Patch, chain: Any) -> bool:
        return matching.listener_matches(patch.match, listener, apply_to=patch.apply_to) and matching.chain_matches(
            patch.match, listener, chain
        )

    for chain in listener.filter_chains:
        for patch in work.of("FILTER_CHAIN", at=listener.name, operations=("MERGE",)):
            if meant(patch, chain):
                merge(chain, patch.value)
                work.note(patch, f"{listener.name}/{chain.name}")
        network = [patch for patch in work.of("NETWORK_FILTER", at=listener.name) if meant(patch, chain)]
        _change_filters(work, chain.filters, network, named=matching.network_filter_name, at=listener.name)
        http = [patch for patch in work.of("HTTP_FILTER", at=listener.name) if meant(patch, chain)]
        for network_filter in chain.filters:
            if network_filter.name == HCM:
                _http_filters(work, network_filter, http, at=listener.name)


def _http_filters(work: _Work, network_filter: Any, patches: list[Patch], *, at: str) -> None:
    meant = [patch for patch in patches if matching.network_filter_name(patch.match) in (None, HCM)]
    manager = unpack(network_filter.typed_config)
    assert manager.DESCRIPTOR.full_name == CONNECTION_MANAGER
    _change_filters(work, manager.http_filters, meant, named=matching.http_filter_name, at=at)
    pack(manager, network_filter.typed_config)


def _change_filters(
    work: _Work, filters: Any, patches: list[Patch], *, named: Callable[[Mapping[str, Any]], str | None], at: str
) -> None:
    """Insert, replace and remove first, then merge: also into what has just been inserted."""
    changed = list(filters)
    for patch in patches:
        if patch.operation != "MERGE" and _place(changed, patch, named(patch.match)):
            work.note(patch, at)
    for patch in patches:
        for each in changed if patch.operation == "MERGE" else ():
            if named(patch.match) in (None, each.name):
                _merge_filter(each, patch.value)
                work.note(patch, f"{at}/{each.name}")
    copies = [clone(each) for each in changed]
    del filters[:]
    filters.extend(copies)


def _place(filters: list[Any], patch: Patch, name: str | None) -> bool:
    """Do one operation on a list of filters; tell whether it did something."""
    found = next((i for i, each in enumerate(filters) if each.name == name), None)
    if patch.operation in ("REMOVE", "REPLACE") and found is not None:
        filters[found : found + 1] = [] if patch.operation == "REMOVE" else [clone(patch.value)]
        return True
    positions = {"ADD": len(filters), "INSERT_FIRST": 0}
    if name is None:
        positions |= {"INSERT_BEFORE": 0, "INSERT_AFTER": len(filters)}
    elif found is not None:
        positions |= {"INSERT_BEFORE": found, "INSERT_AFTER": found + 1}
    if patch.operation not in positions:
        return False
    filters.insert(positions[patch.operation], clone(patch.value))
    return True


def _merge_filter(into: Any, value: Any) -> None:
    """A filter's name is taken over, its configuration merged; nothing else of it (`disabled`, `is_optional`)."""
    if value.name:
        into.name = value.name
    if value.HasField("typed_config"):
        merge_any(into.typed_config, value.typed_config)


# --- routes -----------------------------------------------------------------------------------------------------------


def _routes(work: _Work, routes: Any) -> Any:
    def meant(apply_to: str, *operations: str) -> list[Patch]:
        return [
            patch
            for patch in work.of(apply_to, at=routes.name, operations=operations or None)
            if matching.routes_match(patch.match, routes, work.proxy)
        ]

    for patch in meant("ROUTE_CONFIGURATION", "MERGE"):
        merge(routes, patch.value)
        work.note(patch, routes.name)
    hosts = []
    for host in routes.virtual_hosts:
        kept: Any = host
        for patch in meant("VIRTUAL_HOST", "MERGE", "REMOVE", "REPLACE"):
            if kept is not None and matching.host_matches(patch.match, kept, release=work.release):
                work.note(patch, f"{routes.name}/{kept.name}")
                kept = _changed_host(kept, patch)
        if kept is not None:
            _http_routes(work, kept, meant("HTTP_ROUTE"), at=routes.name)
            hosts.append(clone(kept))
    for patch in meant("VIRTUAL_HOST", "ADD"):
        hosts.append(clone(patch.value))
        work.note(patch, f"{routes.name}/{patch.value.name}")
    del routes.virtual_hosts[:]
    routes.virtual_hosts.extend(hosts)
    return routes


def _changed_host(host: Any, patch: Patch) -> Any:
    if patch.operation == "REMOVE":
        return None
    if patch.operation == "REPLACE":
        return clone(patch.value)
    merge(host, patch.value)
    return host


def _http_routes(work: _Work, host: Any, patches: list[Patch], *, at: str) -> None:
    meant = [patch for patch in patches if matching.host_matches(patch.match, host, release=work.release)]
    kept = []
    for route in host.routes:
        for patch in meant:
            if patch.operation in ("MERGE", "REMOVE") and matching.route_matches(patch.match, route):
                work.note(patch, f"{at}/{host.name}/{route.name}")
                if patch.operation == "MERGE":
                    merge(route, patch.value)
                else:
                    break
        else:
            kept.append(clone(route))
    for patch in meant:
        _add_route(work, kept, patch, at=f"{at}/{host.name}")
    del host.routes[:]
    host.routes.extend(kept)


def _add_route(work: _Work, routes: list[Any], patch: Patch, *, at: str) -> None:
    found = next((i for i, each in enumerate(routes) if matching.route_matches(patch.match, each)), None)
    positions = {"ADD": len(routes)}
    if not matching.names_a_route(patch.match):
        positions |= {"INSERT_FIRST": 0, "INSERT_BEFORE": 0, "INSERT_AFTER": len(routes)}
    elif found is not None:
        positions |= {"INSERT_FIRST": 0, "INSERT_BEFORE": found, "INSERT_AFTER": found + 1}
    if patch.operation in positions:
        routes.insert(positions[patch.operation], clone(patch.value))
        work.note(patch, at)


# --- clusters ---------------------------------------------------------------------------------------------------------


def _clusters(work: _Work, clusters: list[Any]) -> list[Any]:
    kept = []
    for cluster in clusters:
        for patch in work.of("CLUSTER", at=cluster.name, operations=("MERGE", "REMOVE")):
            if matching.cluster_matches(patch.match, cluster):
                work.note(patch, cluster.name)
                if patch.operation == "REMOVE":
                    break
                if not _merges_transport_socket(cluster, patch.value):
                    merge(cluster, patch.value)
        else:
            kept.append(cluster)
    # "" is outbound or the gateway's: where ANY adds, too
    for patch in work.of("CLUSTER", at="", operations=("ADD",)):
        kept.append(clone(patch.value))
        work.note(patch, patch.value.name)
    return kept


def _merges_transport_socket(cluster: Any, value: Any) -> bool:
    """A patch with a transport socket merges that and nothing else; tell whether this is one."""
    if not value.HasField("transport_socket"):
        return False
    name = value.transport_socket.name
    if cluster.transport_socket_matches:
        own = [each.transport_socket for each in cluster.transport_socket_matches if each.transport_socket.name == name]
        if own:
            merge_any(own[0].typed_config, value.transport_socket.typed_config)
    elif cluster.HasField("transport_socket") and cluster.transport_socket.name == name:
        merge_any(cluster.transport_socket.typed_config, value.transport_socket.typed_config)
    else:
        cluster.transport_socket.CopyFrom(value.transport_socket)
    return True
