"""The pools that a policy covers (the mesh, its namespace, or its targets), and the layers of each pool. Pure.

A target is a pool itself, an HTTPRoute through its backends, or a Gateway through its routes. Routes and gateways may
come from any tenant and are read leniently: malformed parts lead to no pool.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from extproc.policy.inference_policy import InferencePolicy
from extproc.policy.merge import Layer, Level
from extproc.policy.spec import CORE_GROUP, GATEWAY_GROUP, GROUPS
from extproc.reach.intake import Held
from extproc.reach.outcomes import PoolLayer
from kvmesh.documents.documents import Document, DocumentKey, document_key
from kvmesh.documents.pools import Pool

GATEWAY, ROUTE, POOL, SERVICE = "Gateway", "HTTPRoute", "InferencePool", "Service"
LEVELS: Mapping[str, Level] = {
    GATEWAY: Level.GATEWAY,
    ROUTE: Level.ROUTE,
    POOL: Level.POOL,
    SERVICE: Level.POOL,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Pools by the objects that lead to them. An empty set: the object exists and leads to no pool."""

    by_target: Mapping[DocumentKey, frozenset[str]]
    by_namespace: Mapping[str, frozenset[str]]
    all_pools: frozenset[str]
    pool_documents: Mapping[DocumentKey, Document]  # including Services that are not pools


def pool_key(pool: Pool) -> DocumentKey:
    """Return the key of a pool's document."""
    namespace, _, name = pool.name.partition("/")
    return DocumentKey(GROUPS.get(pool.kind, CORE_GROUP), pool.kind, namespace, name)


def endpoint_picker_of(pool: Pool, reach: Reach) -> str:
    """Return "namespace/name" of the endpoint picker's Service that an InferencePool names, or ""."""
    if pool.kind != POOL:
        return ""
    spec = reach.pool_documents.get(pool_key(pool), {}).get("spec")
    reference = spec.get("endpointPickerRef") if isinstance(spec, Mapping) else None
    if not isinstance(reference, Mapping) or reference.get("group") or reference.get("kind", SERVICE) != SERVICE:
        return ""
    name = reference.get("name")
    return f"{pool.name.partition('/')[0]}/{name}" if isinstance(name, str) and name else ""


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
    """Tell whether a gateway has accepted the route's references.

    A reference into another namespace needs a ReferenceGrant there: otherwise any tenant's route, with a policy for it,
    would reach any pool. The gateway's controller checks this and writes the status, which the route's owner cannot.
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


# --- policies ---------------------------------------------------------------------------------------------------------


UNLABELLED = ', or is no pool (label kvmesh.io/pool: "true")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """The pools that one policy covers, each with the level."""

    pools: Mapping[str, Level] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # "HTTPRoute a/b is not there"
    has_target: bool = True  # it has no targetRefs, or one of them exists
    emptiness: str = ""  # why it covers no pool although its targets exist


UNCOVERED = Coverage()  # of a policy that was never valid


def coverage_of(policy: InferencePolicy, reach: Reach, *, root_namespace: str) -> Coverage:
    """Return a policy's coverage: the mesh, its namespace, or the pools of its targets."""
    if not policy.target_refs:
        return _of_namespace(policy.namespace, reach, root_namespace=root_namespace)
    pools: dict[str, Level] = {}
    missing: list[str] = []
    idle: list[str] = []
    for ref in policy.target_refs:
        target = DocumentKey(ref.group, ref.kind, policy.namespace, ref.name)
        reached = reach.by_target.get(target)
        if reached is None:
            missing.append(f"{target} is not there{UNLABELLED if ref.kind == SERVICE else ''}")
        elif not reached:
            idle.append(str(target))
        for pool in reached or ():
            pools[pool] = max(LEVELS[ref.kind], pools.get(pool, Level.SETTINGS))
    return Coverage(
        pools=pools,
        missing=tuple(missing),
        has_target=len(missing) < len(policy.target_refs),
        emptiness="" if pools or not idle else f"covers no pool: {', '.join(idle)} leads to none",
    )


def _of_namespace(namespace: str, reach: Reach, *, root_namespace: str) -> Coverage:
    if namespace == root_namespace:
        level, pools, message = Level.MESH, reach.all_pools, "covers no pool: there is none in the mesh"
    else:
        level, pools = Level.NAMESPACE, reach.by_namespace.get(namespace, frozenset())
        message = f"covers no pool: there is none in the namespace {namespace}"
    return Coverage(pools=dict.fromkeys(sorted(pools), level), emptiness="" if pools else message)


@dataclass(slots=True)
class LayerBook:
    """The last coverages and layers: an unchanged one stays the same object."""

    root_namespace: str
    _reach: Reach | None = None
    _coverages: dict[str, tuple[int, Coverage]] = field(default_factory=dict)  # policy -> its version, its coverage
    _layers: dict[tuple[str, int, Level], PoolLayer] = field(default_factory=dict)

    def cover(self, policies: Mapping[str, Held[InferencePolicy]], reach: Reach) -> dict[str, Coverage]:
        """Return the coverage of each policy that was ever valid."""
        before = self._coverages if reach is self._reach else {}
        self._reach, self._coverages = reach, {}
        for source, held in policies.items():
            if held.good is None:
                continue
            known = before.get(source)
            if known is None or known[0] != held.version:
                known = (held.version, coverage_of(held.good, reach, root_namespace=self.root_namespace))
            self._coverages[source] = known
        return {source: coverage for source, (_, coverage) in self._coverages.items()}

    def layers(
        self, policies: Mapping[str, Held[InferencePolicy]], *, pools: Iterable[str], settings: Sequence[PoolLayer]
    ) -> dict[str, list[PoolLayer]]:
        """Return the layers of each pool, unordered, by the last call of `cover`."""
        before, self._layers = self._layers, {}
        found: dict[str, list[PoolLayer]] = {pool: list(settings) for pool in pools}
        for source, (version, coverage) in self._coverages.items():
            for pool, level in coverage.pools.items():
                key = (source, version, level)
                if key not in self._layers:
                    self._layers[key] = before.get(key) or _layer(policies[source], level)
                found[pool].append(self._layers[key])
        return found


def _layer(held: Held[InferencePolicy], level: Level) -> PoolLayer:
    policy = held.good
    assert policy is not None  # only policies that were ever valid have a coverage
    return PoolLayer(
        layer=Layer(source=held.source, level=level, created_at=policy.created_at or None, fields=policy.fields),
        version=held.version,
        generation=held.good_generation,
    )
