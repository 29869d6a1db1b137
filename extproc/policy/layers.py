"""Where each policy takes part: its level, the pools that it covers, the targets that are not there. Pure.

Called by `mesh_policy` when policies, routes, gateways or the set of pools have changed.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from extproc.policy.inference_policy import InferencePolicy
from extproc.policy.intake import Held
from extproc.policy.merge import Layer, Level
from extproc.policy.outcomes import PoolLayer
from extproc.policy.reach import LEVELS, SERVICE, Reach
from kvmesh.documents.documents import DocumentKey

UNLABELLED = ', or is no pool (label kvmesh.io/pool: "true")'


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which pools one policy covers, and how."""

    pools: Mapping[str, Level] = field(default_factory=dict)
    missing: tuple[str, ...] = ()  # "HTTPRoute a/b is not there"
    has_target: bool = True  # it has no targetRefs, or one of them is there
    emptiness: str = ""  # why it covers nothing though all is there


UNCOVERED = Coverage()  # of what was never understood


def coverage_of(policy: InferencePolicy, reach: Reach, *, root_namespace: str) -> Coverage:
    """Return what a policy covers: the mesh, its namespace, or what its targets lead to."""
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
        level, pools, words = Level.MESH, reach.all_pools, "covers no pool: there is none in the mesh"
    else:
        level, pools = Level.NAMESPACE, reach.by_namespace.get(namespace, frozenset())
        words = f"covers no pool: there is none in the namespace {namespace}"
    return Coverage(pools=dict.fromkeys(sorted(pools), level), emptiness="" if pools else words)


@dataclass(slots=True)
class LayerBook:
    """Coverage and layers as last made: what has not changed is the same object."""

    root_namespace: str
    _reach: Reach | None = None
    _coverages: dict[str, tuple[int, Coverage]] = field(default_factory=dict)  # by policy, with its version
    _layers: dict[tuple[str, int, Level], PoolLayer] = field(default_factory=dict)

    def cover(self, policies: Mapping[str, Held[InferencePolicy]], reach: Reach) -> dict[str, Coverage]:
        """Return what each policy covers that was understood once."""
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
        """Return the layers of each pool, in no order, by the coverage of last time."""
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
    assert policy is not None  # only what was understood once covers anything
    return PoolLayer(
        layer=Layer(source=held.source, level=level, created_at=policy.created_at or None, fields=policy.fields),
        version=held.version,
        generation=held.good_generation,
    )
