"""Whatever happens in whatever order: no half-applied policy, and the same outcome as a fresh start has."""

import random
from typing import Any

from extproc.reach.mesh_policy import MeshPolicy
from extproc.reach.outcomes import Extensions, merge_pool
from kvmesh.documents.documents import Document
from tests.unit.extproc_reach.mesh_documents import (
    Mesh,
    gateway,
    inference_policy,
    inference_pool,
    objective,
    pod,
    route,
    told,
)

POOLS = ("a/one", "a/two", "b/one")
TARGETS: tuple[dict[str, str], ...] = ({}, {}, {"InferencePool": "one"}, {"HTTPRoute": "route"}, {"Gateway": "public"})


def valid_spec(chance: random.Random) -> dict[str, Any]:
    """Specs that agree with one another, whatever others say."""
    scoring: dict[str, Any] = {
        "strategy": chance.choice(["kv-aware", "prefix-aware", "round-robin"]),
        "weights": {chance.choice(["session", "lora"]): chance.randint(1, 3)},
        "fallbacks": chance.randint(0, 3),
    }
    parts: dict[str, Any] = {
        "scoring": {name: value for name, value in scoring.items() if chance.random() < 0.6},
        "failureMode": chance.choice(["FailOpen", "FailClose"]),
        "priorities": {"classes": [{"name": chance.choice(["gold", "batch"]), "priority": chance.randint(-9, 9)}]},
        "observability": {"sampleShare": chance.choice([0.1, 0.2])},
    }
    return {name: value for name, value in parts.items() if chance.random() < 0.5}


def contradicting_spec(chance: random.Random) -> dict[str, Any]:
    """Specs that are valid by themselves, or not at all, and often contradict others."""
    return chance.choice(
        [
            {"priorities": {"classes": [{"name": chance.choice("xyz"), "reservedShare": 0.6}]}},
            {"priorities": {"rules": [{"priorityClass": chance.choice("xyz"), "pathPrefix": "/p"}]}},
            {"priorities": {"defaultClass": chance.choice("xyz")}},
            {"autoscale": {"both": {"minReplicas": chance.choice([1, 90])}}},
            {"autoscale": {"both": {"maxReplicas": chance.choice([2, 100])}}},
            {"scoring": {"weights": {"prefix": "much"}}},
            {"scoring": None},
            {"targetRefs": "all"},
        ]
    )


def step(mesh: Mesh, chance: random.Random, generation: int, *, contradicting: float) -> None:
    kind = chance.random()
    document: Document
    if kind < 0.6:
        namespace = chance.choice(["istio-system", "a", "b"])
        spec = contradicting_spec(chance) if chance.random() < contradicting else valid_spec(chance)
        name = f"{namespace}/{chance.choice('pqr')}"
        day = 1 + sum(map(ord, name)) % 5  # an object keeps its age
        document = inference_policy(name, spec, day=day, generation=generation, **chance.choice(TARGETS))
    elif kind < 0.75:
        document = inference_pool(chance.choice(POOLS))
    elif kind < 0.85:
        document = route("a/route", to=chance.choice(POOLS), via=chance.choice(["", "a/public"]))
    elif kind < 0.9:
        document = gateway("a/public")
    elif kind < 0.95:
        document = pod(f"a/{chance.choice('xy')}", app="one", ip="10.0.0.1", ready=chance.random() < 0.5)
    else:
        document = objective("a/chat", pool="one", priority=chance.randint(-9, 200))
    mesh.put(document)
    if chance.random() < 0.25:
        mesh.remove(mesh.documents[chance.choice(sorted(mesh.documents))])


def test_following_changes_comes_to_what_a_fresh_start_comes_to() -> None:
    for seed in range(4):
        chance = random.Random(seed)
        mesh = Mesh()
        for generation in range(1, 40):
            step(mesh, chance, generation, contradicting=0.0)
            state = mesh.update()
            fresh = MeshPolicy().update(mesh.snapshot(), now=mesh.now)
            assert state.configs == fresh.configs
            assert {name: told(state, name) for name in state.statuses} == {
                name: told(fresh, name) for name in fresh.statuses
            }
            assert state.problems == fresh.problems
            assert mesh.policy.explain(None)["pools"] == _explained(mesh)


def _explained(mesh: Mesh) -> list[Any]:
    fresh = MeshPolicy()
    fresh.update(mesh.snapshot(), now=mesh.now)
    pools: list[Any] = fresh.explain(None)["pools"]
    return pools


def test_contradictions_and_nonsense_never_leave_a_policy_half_applied() -> None:
    refused = 0
    for seed in range(6):
        chance = random.Random(seed)
        mesh = Mesh()
        for generation in range(1, 40):
            step(mesh, chance, generation, contradicting=0.5)
            state = mesh.update()
            for pool, outcome in state.settled.outcomes.items():
                whole = merge_pool(pool, outcome.layers, Extensions())  # raises if what is in force contradicts itself
                config = state.configs[pool]
                priorities = config.policy.priorities
                assert whole.policy.weights == config.policy.weights
                assert whole.policy.priorities.classes == priorities.classes
                assert whole.policy.priorities.rules == priorities.rules
                assert whole.merged.fields == outcome.merged.fields
                # whoever is not said to be held back is in force as he last was good
                held_back = {fault.source for fault in outcome.faults}
                there = {(each.layer.source, each.layer.level, each.version) for each in outcome.layers}
                for source, coverage in state.settled.coverages.items():
                    if pool in coverage.pools and source not in held_back:
                        version = mesh.policy._policies.held[source].version
                        assert (source, coverage.pools[pool], version) in there
            for source, status in state.statuses.items():
                assert status.conditions[0].type == "Accepted"
                refused += told(state, source)["Accepted"][0] == "False Invalid"
            out = {fault.source for outcome in state.settled.outcomes.values() for fault in outcome.faults}
            assert all(told(state, source)["Accepted"][0] == "False Invalid" for source in out)
    assert refused > 30
