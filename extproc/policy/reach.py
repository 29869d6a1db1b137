"""Which pools a policy's target leads to: itself, an HTTPRoute through its backends, a Gateway through its routes.

Pure; called by `mesh_policy` when a route, a gateway or the set of pools has changed. Routes and gateways are read
leniently, whoever has written them: what is not understood leads nowhere.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from extproc.policy.merge import Level
from kvmesh.documents.documents import Document, DocumentKey, document_key
from kvmesh.documents.pools import Pool

GATEWAY_GROUP, POOL_GROUP, CORE_GROUP = "gateway.networking.k8s.io", "inference.networking.k8s.io", ""
GATEWAY, ROUTE, POOL, SERVICE = "Gateway", "HTTPRoute", "InferencePool", "Service"
GROUPS: Mapping[str, str] = {GATEWAY: GATEWAY_GROUP, ROUTE: GATEWAY_GROUP, POOL: POOL_GROUP, SERVICE: CORE_GROUP}
LEVELS: Mapping[str, Level] = {
    GATEWAY: Level.GATEWAY,
    ROUTE: Level.ROUTE,
    POOL: Level.POOL,
    SERVICE: Level.POOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Pools by what leads to them. An empty set: it is there and leads to none."""

    by_target: Mapping[DocumentKey, frozenset[str]]
    by_namespace: Mapping[str, frozenset[str]]
    all_pools: frozenset[str]
    pool_documents: Mapping[DocumentKey, Document]  # and those of Services that are no pools


def pool_key(pool: Pool) -> DocumentKey:
    """Return the key of a pool's document."""
    namespace, _, name = pool.name.partition("/")
    return DocumentKey(GROUPS.get(pool.kind, CORE_GROUP), pool.kind, namespace, name)


def reach_of(documents: Mapping[str, tuple[Document, ...]], pools: Mapping[str, Pool]) -> Reach:
    """Follow Gateways, HTTPRoutes and backends to the pools (by name, "namespace/name")."""
    by_target: defaultdict[DocumentKey, set[str]] = defaultdict(set)
    by_namespace: defaultdict[str, set[str]] = defaultdict(set)
    for kind in (POOL, SERVICE, GATEWAY, ROUTE):
        for document in documents.get(kind, ()):
            by_target[document_key(document)] = set()
    for name, pool in pools.items():
        key = pool_key(pool)
        by_namespace[key.namespace].add(name)
        by_target[key].add(name)
    for route in documents.get(ROUTE, ()):
        key = document_key(route)
        for backend in _backends(route, key.namespace):
            by_target[key] |= by_target.get(backend, set())
        for gateway in _gateways(route, key.namespace):
            if gateway in by_target:
                by_target[gateway] |= by_target[key]
    return Reach(
        by_target={key: frozenset(reached) for key, reached in by_target.items()},
        by_namespace={namespace: frozenset(names) for namespace, names in by_namespace.items()},
        all_pools=frozenset(pools),
        pool_documents={
            document_key(document): document for kind in (POOL, SERVICE) for document in documents.get(kind, ())
        },
    )


def _backends(route: Document, namespace: str) -> Iterator[DocumentKey]:
    may_cross = _has_resolved_refs(route)
    for rule in _mappings(_part(route, "spec").get("rules")):
        for ref in _mappings(rule.get("backendRefs")):
            kind = str(ref.get("kind") or SERVICE)
            there = str(ref.get("namespace") or namespace)
            if there == namespace or may_cross:
                yield DocumentKey(str(ref.get("group") or CORE_GROUP), kind, there, str(ref.get("name")))


def _has_resolved_refs(route: Document) -> bool:
    """Tell whether a gateway has let the route's references pass.

    Into another namespace they need a ReferenceGrant there: without, anybody's route, and a policy for it, would reach
    anybody's pool. The gateway's controller checks it and writes the status, which the route's owner cannot.
    """
    generation = _part(route, "metadata").get("generation")
    return any(
        condition.get("type") == "ResolvedRefs"
        and condition.get("status") == "True"
        and condition.get("observedGeneration") == generation
        for parent in _mappings(_part(route, "status").get("parents"))
        for condition in _mappings(parent.get("conditions"))
    )


def _gateways(route: Document, namespace: str) -> Iterator[DocumentKey]:
    for ref in _mappings(_part(route, "spec").get("parentRefs")):
        if str(ref.get("kind") or GATEWAY) == GATEWAY and str(ref.get("group") or GATEWAY_GROUP) == GATEWAY_GROUP:
            yield DocumentKey(GATEWAY_GROUP, GATEWAY, str(ref.get("namespace") or namespace), str(ref.get("name")))


def _part(document: Document, name: str) -> Mapping[str, Any]:
    part = document.get(name)
    return part if isinstance(part, Mapping) else {}


def _mappings(value: Any) -> Iterable[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
