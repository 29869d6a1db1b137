"""A bad document, or a merge that contradicts itself, never replaces what was good."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from extproc.reach import outcomes as policy_outcomes
from extproc.reach.mesh_policy import MeshPolicy
from extproc.reach.outcomes import Extensions, Outcome, PoolLayer, merge_pool
from tests.unit.extproc_reach.mesh_documents import (
    IN_FORCE,
    Mesh,
    inference_policy,
    inference_pool,
    model_rewrite,
    told,
)

GOLD = {"priorities": {"classes": [{"name": "gold", "priority": 50}]}}
RULE_FOR_GOLD = {"priorities": {"rules": [{"priorityClass": "gold", "pathPrefix": "/gold"}]}}
HALF = {"priorities": {"classes": [{"name": "gold", "priority": 50, "reservedShare": 0.6}]}}
OTHER_HALF = {"priorities": {"classes": [{"name": "silver", "priority": 40, "reservedShare": 0.6}]}}


def scoring(**fields: Any) -> dict[str, Any]:
    return {"scoring": fields}


def test_a_bad_document_keeps_its_last_good_version_and_says_which_field_is_wrong() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", scoring(fallbacks=5), generation=3))
    state = mesh.update(inference_policy("a/own", scoring(fallback=6), generation=4))
    assert state.configs["a/llama"].policy.fallbacks == 5
    reason, message = told(state, "a/own")["Accepted"]
    assert reason == "False Invalid"
    assert message.startswith("spec.scoring.fallback: ")
    assert message.endswith("; what it said before (generation 3) stays in force")
    assert state.statuses["a/own"].observed_generation == 4
    state = mesh.update(inference_policy("a/own", scoring(fallbacks=6), generation=5))
    assert (state.configs["a/llama"].policy.fallbacks, told(state, "a/own")) == (6, IN_FORCE)


def test_a_document_that_was_never_good_has_no_effect() -> None:
    state = Mesh().update(inference_pool("a/llama"), inference_policy("a/own", scoring(fallbacks="many")))
    assert state.configs["a/llama"].policy.fallbacks == 2
    assert told(state, "a/own")["Accepted"][1].endswith("; nothing of it is in force")


def test_nothing_is_left_of_a_policy_that_was_deleted_and_made_anew_badly() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", scoring(fallbacks=5), uid="first"))
    state = mesh.update(inference_policy("a/own", scoring(fallbacks="many"), uid="second"))
    assert state.configs["a/llama"].policy.fallbacks == 2
    assert told(state, "a/own")["Accepted"][1].endswith("; nothing of it is in force")


def test_a_bad_policy_does_not_hold_up_the_others() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/bad", {"nonsense": 1}), inference_policy("a/good", {}))
    state = mesh.update(inference_policy("a/good", scoring(fallbacks=5), generation=2))
    assert state.configs["a/llama"].policy.fallbacks == 5


def test_a_merge_that_contradicts_itself_keeps_what_the_changed_policy_said_before() -> None:
    mesh = Mesh()
    mesh.update(
        inference_pool("a/llama"),
        inference_policy("istio-system/mesh", HALF),
        inference_policy("a/own", scoring(fallbacks=5), generation=1),
    )
    state = mesh.update(inference_policy("a/own", {**OTHER_HALF, **scoring(fallbacks=6)}, generation=2))
    policy = state.configs["a/llama"].policy
    assert (policy.fallbacks, set(policy.priorities.classes)) == (5, {"critical", "standard", "sheddable", "gold"})
    assert told(state, "istio-system/mesh")["Accepted"] == IN_FORCE["Accepted"]
    reason, message = told(state, "a/own")["Accepted"]
    assert reason == "False Invalid"
    assert message.startswith("not in force at a/llama: spec.priorities.classes: the reserved shares add up to 1.25")
    assert message.endswith("; generation 1 of it stays in force there")


def test_a_policy_whose_protocol_has_no_races_is_left_out_where_another_one_wants_them() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("istio-system/mesh", {"disaggregation": {"raceShare": 0.1}}),
        inference_policy("a/own", {"disaggregation": {"enabled": True, "protocol": "sidecar"}}),
    )
    policy = state.configs["a/llama"].policy.disaggregation
    assert (policy.enabled, policy.race_share) == (False, 0.1)
    reason, message = told(state, "a/own")["Accepted"]
    assert reason == "False Invalid"
    assert "spec.disaggregation.raceShare: legs of the protocols sglang and sidecar cannot race" in message


def test_while_one_policy_is_held_back_others_go_on_changing() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("istio-system/mesh", HALF))
    mesh.update(inference_policy("a/own", OTHER_HALF))
    state = mesh.update(inference_policy("istio-system/mesh", {**HALF, **scoring(fallbacks=7)}, generation=2))
    assert state.configs["a/llama"].policy.fallbacks == 7
    assert told(state, "istio-system/mesh")["Accepted"][0] == "True Accepted"
    assert told(state, "a/own")["Accepted"][0] == "False Invalid"


def test_a_policy_that_was_held_back_comes_into_force_when_the_contradiction_is_gone() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("istio-system/mesh", HALF))
    mesh.update(inference_policy("a/own", {**OTHER_HALF, **scoring(fallbacks=6)}))
    state = mesh.update(inference_policy("istio-system/mesh", {}, generation=2))
    assert state.configs["a/llama"].policy.fallbacks == 6
    assert told(state, "a/own")["Accepted"][0] == "True Accepted"


def test_of_two_policies_that_never_agreed_the_older_one_is_in_force() -> None:
    for older, younger in (("a", "b"), ("b", "a")):
        state = Mesh().update(
            inference_pool("a/llama"),
            inference_policy(f"a/{older}", {**HALF, **scoring(fallbacks=5)}, day=1),
            inference_policy(f"a/{younger}", {**OTHER_HALF, **scoring(sessionSeconds=7)}, day=2),
        )
        policy = state.configs["a/llama"].policy
        assert (policy.fallbacks, policy.session_seconds) == (5, 300.0)
        assert told(state, f"a/{older}")["Accepted"][0] == "True Accepted"
        assert told(state, f"a/{younger}")["Accepted"][1].endswith("; it is left out there")


def test_several_that_contradict_at_once_are_taken_by_age_and_what_needs_a_later_one_is_tried_again() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("a/needs-gold", {**RULE_FOR_GOLD, **scoring(fallbacks=5)}, day=1),
        inference_policy("a/gold", GOLD, day=2),
        inference_policy("a/half", OTHER_HALF, day=3),
        inference_policy("a/too-much", {"priorities": {"classes": [{"name": "x", "reservedShare": 0.5}]}}, day=4),
        inference_policy("a/much-too-much", {"priorities": {"classes": [{"name": "y", "reservedShare": 0.9}]}}, day=5),
    )
    accepted = {source: told(state, source)["Accepted"][0] for source in state.statuses}
    assert accepted == {
        "a/needs-gold": "True Accepted",
        "a/gold": "True Accepted",
        "a/half": "True Accepted",
        "a/too-much": "False Invalid",
        "a/much-too-much": "False Invalid",
    }
    assert state.configs["a/llama"].policy.fallbacks == 5


def test_a_removal_that_others_cannot_do_without_leaves_the_pool_as_it_was() -> None:
    mesh = Mesh()
    gold = inference_policy("istio-system/gold", GOLD)
    before = mesh.update(inference_pool("a/llama"), gold, inference_policy("a/own", RULE_FOR_GOLD))
    mesh.remove(gold)
    state = mesh.update()
    assert state.configs == before.configs
    reason, message = told(state, "a/own")["Accepted"]
    assert (reason, message) == (
        "False Invalid",
        "not in force at a/llama: spec.priorities.rules[0].priorityClass: there is no class 'gold'; the nearest valid "
        "one is 'standard'; what was in force there before stays",
    )


def test_while_a_removed_policy_is_still_needed_all_other_changes_come_into_force() -> None:
    mesh = Mesh()
    gold, spare = inference_policy("istio-system/gold", GOLD), inference_policy("a/spare", scoring(sessionSeconds=9))
    mesh.update(inference_pool("a/llama"), gold, spare, inference_policy("a/own", RULE_FOR_GOLD))
    mesh.remove(gold)
    mesh.update()
    mesh.remove(spare)  # which nobody needs
    state = mesh.update(inference_policy("a/other", scoring(fallbacks=6)))
    policy = state.configs["a/llama"].policy
    assert (policy.fallbacks, policy.session_seconds, policy.priorities.classes["gold"].priority) == (6, 300.0, 50)
    assert told(state, "a/other") == IN_FORCE
    assert told(state, "a/own")["Accepted"][0] == "False Invalid"
    state = mesh.update(inference_policy("a/late", HALF))
    assert state.configs["a/llama"].origins["spec.priorities.classes[gold].priority"] == "a/late"
    assert told(state, "a/own") == IN_FORCE


def test_only_those_who_need_a_removed_policy_are_blamed() -> None:
    mesh = Mesh()
    gold = inference_policy("istio-system/gold", GOLD)
    two = [inference_policy(f"a/{name}", RULE_FOR_GOLD, InferencePool="llama") for name in ("one", "two")]
    default = inference_policy("a/default", {"priorities": {"defaultClass": "gold"}})
    mesh.update(
        inference_pool("a/llama"), gold, *two, default, inference_policy("istio-system/mesh", scoring(fallbacks=6))
    )
    mesh.remove(gold)
    state = mesh.update(inference_policy("a/new", scoring(sessionSeconds=9)))
    assert {source: told(state, source)["Accepted"][0] for source in state.statuses} == {
        "a/one": "False Invalid",
        "a/two": "False Invalid",
        "a/default": "False Invalid",
        "a/new": "True Accepted",
        "istio-system/mesh": "True Accepted",
    }
    assert state.configs["a/llama"].policy.session_seconds == 9.0


def test_a_model_rewrite_that_contradicts_the_policies_leaves_the_others_in_force() -> None:
    mesh = Mesh()
    listed = {"models": {"onlyListed": True, "served": [{"name": "m"}]}}
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", listed))
    rules = {name: {"matches": [{"model": {"value": name}}], "targets": [{"modelRewrite": name}]} for name in "mx"}
    state = mesh.update(
        *(model_rewrite(f"a/to-{name}", pool="llama", rules=[rule]) for name, rule in rules.items()),
    )
    assert [rule.model for rule in state.configs["a/llama"].models.rules] == ["m"]
    assert [problem.where for problem in state.problems] == ["InferenceModelRewrite a/to-x"]


def test_one_bad_policy_for_the_mesh_costs_no_search_at_each_of_its_pools() -> None:
    mesh = Mesh()
    pools = [f"a/p{i}" for i in range(40)]
    mesh.put(*(inference_pool(name) for name in pools))
    mesh.put(*(inference_policy(f"a/of-{name[2:]}", scoring(fallbacks=3), InferencePool=name[2:]) for name in pools))
    mesh.put(*(inference_policy(f"istio-system/m{i}", scoring(sessionSeconds=i + 1), day=2) for i in range(20)))
    state = mesh.update(inference_policy("istio-system/bad", {"priorities": {"defaultClass": "nobody"}}))
    assert mesh.policy.book.merges < 6 * len(pools)
    assert {config.policy.fallbacks for config in state.configs.values()} == {3}
    refused = [source for source in state.statuses if told(state, source)["Accepted"][0] != "True Accepted"]
    assert refused == ["istio-system/bad"]


def test_many_policies_that_all_contradict_are_not_all_merged_with_each_other_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged: list[int] = []

    def counted(pool: str, layers: Sequence[PoolLayer], extensions: Extensions) -> Outcome:
        merged.append(len(layers))
        return merge_pool(pool, layers, extensions)

    monkeypatch.setattr(policy_outcomes, "merge_pool", counted)
    mesh = Mesh()
    mesh.put(inference_pool("a/llama"), inference_policy("a/good", scoring(fallbacks=5)))
    state = mesh.update(*(inference_policy(f"a/p{i}", {"priorities": {"defaultClass": f"x{i}"}}) for i in range(64)))
    assert sum(merged) < 64 * 64 / 2
    assert state.configs["a/llama"].policy.fallbacks == 5


def test_a_defect_that_one_policy_meets_holds_back_this_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pool: str, layers: Sequence[PoolLayer], extensions: Extensions) -> Outcome:
        if any(each.layer.fields.get("observability") == {"sampleShare": 0.25} for each in layers):
            raise RuntimeError("a defect")
        return merge_pool(pool, layers, extensions)

    monkeypatch.setattr(policy_outcomes, "merge_pool", broken)
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_pool("b/qwen"), inference_policy("a/own", scoring(fallbacks=5)))
    state = mesh.update(
        inference_policy("a/own", {"observability": {"sampleShare": 0.25}}, generation=2),
        inference_policy("istio-system/mesh", scoring(sessionSeconds=7)),
    )
    assert {name: (c.policy.fallbacks, c.policy.session_seconds) for name, c in state.configs.items()} == {
        "a/llama": (5, 7.0),
        "b/qwen": (2, 7.0),
    }
    assert told(state, "a/own")["Accepted"] == (
        "False Invalid",
        "not in force at a/llama: cannot be merged: RuntimeError; generation 1 of it stays in force there",
    )
    assert told(state, "istio-system/mesh") == IN_FORCE


def test_a_contradiction_at_one_pool_leaves_the_others_alone() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_pool("b/qwen"), inference_policy("a/own", OTHER_HALF))
    state = mesh.update(inference_policy("istio-system/mesh", {**HALF, **scoring(fallbacks=7)}))
    assert {name: config.policy.fallbacks for name, config in state.configs.items()} == {"a/llama": 2, "b/qwen": 7}
    assert told(state, "istio-system/mesh")["Accepted"][1].startswith("not in force at a/llama: ")
    assert told(state, "a/own")["Accepted"][0] == "True Accepted"


def test_settings_are_never_held_back() -> None:
    mesh = Mesh(policy=MeshPolicy(settings={"priorities": {"classes": {"x": {"reservedShare": 0.7}}}}))
    state = mesh.update(inference_pool("a/llama"), inference_policy("a/own", HALF))
    assert set(state.configs["a/llama"].policy.priorities.classes) == {"critical", "standard", "sheddable", "x"}
    assert told(state, "a/own")["Accepted"][0] == "False Invalid"


NONSENSE: tuple[Any, ...] = (None, 0, -1, "", "x", [], {}, [None], [{}], {"x": 1}, [[1]], True, 1e400, "\0")


@pytest.mark.parametrize(
    "kind", ["InferencePolicy", "HTTPRoute", "Gateway", "InferenceObjective", "InferenceModelRewrite"]
)
def test_documents_of_any_shape_change_nothing_and_break_nothing(kind: str) -> None:
    chance = random.Random(kind)
    mesh = Mesh()
    good = mesh.update(inference_pool("a/llama"), inference_policy("a/own", scoring(fallbacks=5)))
    for i in range(300):
        document = {"apiVersion": "kvmesh.io/v1alpha1", "kind": kind, "metadata": {"namespace": "a", "name": f"n{i}"}}
        document |= {part: _shape(chance, 3) for part in ("spec", "status") if chance.random() < 0.9}
        mesh.put(document)
    state = mesh.update()
    assert state.configs["a/llama"].policy == good.configs["a/llama"].policy


WORDS = ("rules", "backendRefs", "parentRefs", "parents", "conditions", "name", "namespace", "kind", "group", "type")


def _shape(chance: random.Random, depth: int) -> Any:
    pick = chance.random()
    if depth and pick < 0.4:
        return {chance.choice(WORDS): _shape(chance, depth - 1) for _ in range(3)}
    if depth and pick < 0.7:
        return [_shape(chance, depth - 1) for _ in range(2)]
    return chance.choice(NONSENSE)


def test_whatever_order_changes_come_in_the_outcome_of_valid_policies_is_the_same() -> None:
    documents = [
        inference_policy("istio-system/mesh", scoring(fallbacks=1, strategy="prefix-aware")),
        inference_policy("a/one", scoring(fallbacks=3), day=3),
        inference_policy("a/two", scoring(fallbacks=4, sessionSeconds=8), day=2),
        inference_policy("a/pool", scoring(weights={"lora": 2}), InferencePool="llama"),
        inference_pool("a/llama"),
    ]
    outcomes: list[Mapping[str, Any]] = []
    for seed in range(20):
        order = documents[:]
        random.Random(seed).shuffle(order)
        mesh = Mesh()
        for document in order:
            state = mesh.update(document)
        outcomes.append({"configs": state.configs, "told": {source: told(state, source) for source in state.statuses}})
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert outcomes[0]["configs"]["a/llama"].policy.fallbacks == 4
