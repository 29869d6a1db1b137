"""From documents to what each pool is served with."""

import pytest

from extproc.policy.values import PRESETS, PickPolicy, PoolConfig, Strategy
from extproc.reach.mesh_policy import MeshPolicy
from extproc.reach.outcomes import OutcomeBook
from kvmesh.documents.documents import DocumentKey
from kvmesh.documents.pools import PoolEndpoint
from tests.unit.extproc_reach.mesh_documents import (
    IN_FORCE,
    NOT_ACCEPTED,
    Mesh,
    gateway,
    inference_policy,
    inference_pool,
    model_rewrite,
    objective,
    pod,
    route,
    service,
    told,
)


def fallbacks(count: int) -> dict[str, object]:
    return {"scoring": {"fallbacks": count}}


def test_without_any_policy_a_pool_has_the_defaults() -> None:
    state = Mesh().update(inference_pool("a/llama"), pod("a/one", app="llama", ip="10.0.0.1"))
    endpoint = PoolEndpoint(address="10.0.0.1:8000", pod="a/one", labels={"app": "llama"})
    assert state.configs == {"a/llama": PoolConfig(name="a/llama", endpoints=(endpoint,))}
    assert (state.configs["a/llama"].policy, state.statuses, state.problems) == (PickPolicy(), {}, ())


def test_every_level_reaches_its_pools_and_the_more_specific_one_wins() -> None:
    mesh = Mesh()
    mesh.put(
        *(inference_pool(name) for name in ("a/by-pool", "a/by-route", "a/by-gateway", "a/other", "b/llama")),
        gateway("infra/public"),
        route("a/through", to="a/by-route", via="infra/public"),
        route("a/plain", to="a/by-gateway", via="infra/public"),
        route("a/last", to="a/by-pool", via="infra/public"),
        inference_policy("istio-system/mesh", fallbacks(1)),
        inference_policy("a/namespace", fallbacks(2)),
        inference_policy("infra/gateway", fallbacks(3), Gateway="public"),
        inference_policy("a/route", fallbacks(4), HTTPRoute="through"),
        inference_policy("a/pool", fallbacks(5), InferencePool="by-pool"),
    )
    state = mesh.update()
    assert {name: config.policy.fallbacks for name, config in state.configs.items()} == {
        "a/by-gateway": 3,
        "a/by-pool": 5,
        "a/by-route": 4,
        "a/other": 2,
        "b/llama": 1,
    }
    assert state.configs["a/by-route"].origins == {"spec.scoring.fallbacks": "a/route"}
    assert {source: told(state, source) for source in state.statuses} == dict.fromkeys(state.statuses, IN_FORCE)


def test_fields_of_several_levels_come_together_with_their_origins() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_policy("istio-system/mesh", {"failureMode": "FailOpen", "scoring": {"strategy": "kv-aware"}}),
        inference_policy("a/team", {"scoring": {"weights": {"session": 2}}, "observability": {"sampleShare": 0.5}}),
    )
    config = state.configs["a/llama"]
    assert config.policy.weights == {**PRESETS[Strategy.KV_AWARE], "session": 2.0}
    assert (config.failure_mode, config.sample_share) == ("FailOpen", 0.5)
    assert config.origins == {
        "spec.failureMode": "istio-system/mesh",
        "spec.scoring.strategy": "istio-system/mesh",
        "spec.scoring.weights.session": "a/team",
        "spec.observability.sampleShare": "a/team",
    }


def test_the_flags_of_the_picker_lie_below_every_policy() -> None:
    mesh = Mesh(policy=MeshPolicy(settings={"scoring": {"fallbacks": 7, "sessionSeconds": 9.0}}))
    state = mesh.update(inference_pool("a/llama"), inference_policy("istio-system/mesh", fallbacks(1)))
    config = state.configs["a/llama"]
    assert (config.policy.fallbacks, config.policy.session_seconds) == (1, 9.0)
    assert config.origins["spec.scoring.sessionSeconds"] == "settings"


def test_another_root_namespace_makes_its_policies_mesh_wide() -> None:
    mesh = Mesh(policy=MeshPolicy(root_namespace="ops"))
    state = mesh.update(
        inference_pool("a/llama"),
        inference_policy("ops/mesh", fallbacks(5)),
        inference_policy("istio-system/one", fallbacks(6)),
    )
    assert state.configs["a/llama"].policy.fallbacks == 5
    assert told(state, "istio-system/one")["Warning"] == (
        "CheckPolicy",
        "covers no pool: there is none in the namespace istio-system",
    )


def test_targets_in_the_root_namespace_are_no_mesh_wide_policy() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_pool("istio-system/own"),
        inference_policy("istio-system/one", fallbacks(5), InferencePool="own"),
    )
    assert {name: config.policy.fallbacks for name, config in state.configs.items()} == {
        "a/llama": 2,
        "istio-system/own": 5,
    }


def test_a_policy_never_reaches_a_pool_of_another_namespace_by_its_name() -> None:
    state = Mesh().update(inference_pool("a/llama"), inference_policy("b/thief", fallbacks(5), InferencePool="llama"))
    assert state.configs["a/llama"].policy.fallbacks == 2
    assert told(state, "b/thief") == {
        "Accepted": ("False TargetNotFound", "InferencePool b/llama is not there"),
        "Programmed": ("False TargetNotFound", NOT_ACCEPTED),
    }


@pytest.mark.parametrize(("resolved", "count"), [(None, 2), (False, 2), (True, 5)])
def test_a_route_leads_into_another_namespace_only_where_a_gateway_has_let_it(
    resolved: bool | None, count: int
) -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        route("b/route", to="a/llama", resolved=resolved),
        inference_policy("b/policy", fallbacks(5), HTTPRoute="route"),
    )
    assert state.configs["a/llama"].policy.fallbacks == count


def test_a_service_with_the_label_is_a_pool_and_a_target() -> None:
    state = Mesh().update(
        service("a/vllm"),
        route("a/route", to="a/vllm", kind="Service"),
        inference_policy("a/by-service", fallbacks(5), Service="vllm"),
        inference_policy("a/by-route", {"scoring": {"sessionSeconds": 7}}, HTTPRoute="route"),
    )
    policy = state.configs["a/vllm"].policy
    assert (policy.fallbacks, policy.session_seconds) == (5, 7.0)


def test_a_target_that_comes_later_is_taken_up_then() -> None:
    mesh = Mesh()
    state = mesh.update(inference_policy("a/own", fallbacks(5), InferencePool="llama"))
    assert told(state, "a/own")["Accepted"][0] == "False TargetNotFound"
    state = mesh.update(inference_pool("a/llama"))
    assert (told(state, "a/own"), state.configs["a/llama"].policy.fallbacks) == (IN_FORCE, 5)
    mesh.remove(inference_pool("a/llama"))
    state = mesh.update()
    assert (told(state, "a/own")["Accepted"][0], state.configs) == ("False TargetNotFound", {})


def test_a_change_of_pods_changes_that_pool_only_and_costs_no_merge() -> None:
    mesh = Mesh()
    before = mesh.update(
        inference_pool("a/llama"), inference_pool("a/qwen"), inference_policy("istio-system/mesh", fallbacks(1))
    )
    merges = mesh.policy.book.merges
    after = mesh.update(pod("a/one", app="llama", ip="10.0.0.1"))
    assert after.configs["a/llama"].endpoints == (
        PoolEndpoint(address="10.0.0.1:8000", pod="a/one", labels={"app": "llama"}),
    )
    assert after.configs["a/llama"].policy is before.configs["a/llama"].policy
    assert after.configs["a/qwen"] is before.configs["a/qwen"]
    assert (mesh.policy.book.merges, after.statuses) == (merges, before.statuses)


def test_a_change_of_a_policy_merges_only_what_it_touches() -> None:
    mesh = Mesh()
    mesh.put(*(inference_pool(f"{namespace}/{name}") for namespace in "abc" for name in ("one", "two")))
    mesh.put(*(inference_policy(f"{namespace}/own", fallbacks(1)) for namespace in "abc"))
    before = mesh.update()
    assert mesh.policy.book.merges == 3  # pools with the same policies share the merge
    after = mesh.update(inference_policy("b/own", fallbacks(4), generation=2))
    assert mesh.policy.book.merges == 4
    changed = {name for name in after.configs if after.configs[name] is not before.configs[name]}
    assert changed == {"b/one", "b/two"}


def test_a_policy_that_goes_takes_its_fields_along() -> None:
    mesh = Mesh()
    policy = inference_policy("a/own", fallbacks(5))
    mesh.update(inference_pool("a/llama"), policy)
    mesh.remove(policy)
    state = mesh.update()
    assert (state.configs["a/llama"].policy.fallbacks, state.statuses) == (2, {})


def test_objectives_get_a_class_by_priority_and_policies_go_before_them() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        inference_pool("a/other"),
        objective("a/chat", pool="llama", priority=150),
        objective("a/batch", pool="llama", priority=-7),
        objective("a/mine", pool="llama", priority=-7),
        inference_policy("a/own", {"priorities": {"objectives": [{"name": "mine", "priorityClass": "critical"}]}}),
    )
    assert state.configs["a/llama"].policy.priorities.objectives == {
        "mine": "critical",
        "chat": "critical",
        "batch": "sheddable",
    }
    assert state.configs["a/other"].policy.priorities.objectives == {"mine": "critical"}
    assert state.configs["a/llama"].origins["spec.priorities.objectives[chat]"] == "InferenceObjective a/chat"


def test_model_rewrites_are_rules_for_the_names_that_no_policy_has_a_rule_for() -> None:
    rules = [
        {"matches": [{"model": {"value": "chat"}}], "targets": [{"modelRewrite": "llama-8b"}]},
        {"matches": [{"model": {"value": "draft"}}], "targets": [{"modelRewrite": "llama-1b"}]},
    ]
    mesh = Mesh()
    state = mesh.update(
        inference_pool("a/llama"),
        model_rewrite("a/names", pool="llama", rules=rules),
        inference_policy("a/own", {"models": {"rules": [{"model": "chat", "targets": [{"model": "llama-70b"}]}]}}),
    )
    served = {rule.model: [target.model for target in rule.targets] for rule in state.configs["a/llama"].models.rules}
    assert served == {"chat": ["llama-70b"], "draft": ["llama-1b"]}
    assert state.configs["a/llama"].origins["spec.models.rules[draft]"] == "InferenceModelRewrite"


def test_a_bad_objective_is_a_problem_and_its_last_good_state_stays() -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), objective("a/chat", pool="llama", priority=150))
    bad = objective("a/chat", pool="llama", priority=150)
    state = mesh.update(bad | {"spec": {"priority": "high", "poolRef": {"name": "llama"}}})
    assert state.configs["a/llama"].policy.priorities.objectives == {"chat": "critical"}
    assert [(problem.where, problem.words.partition(":")[0]) for problem in state.problems] == [
        ("InferenceObjective a/chat", "spec.priority")
    ]


def test_of_two_objectives_of_one_name_in_both_groups_the_older_counts_and_it_is_said() -> None:
    mesh = Mesh()
    old = objective("a/chat", pool="llama", priority=150, day=2, group="llm-d.ai")
    young = objective("a/chat", pool="llama", priority=-7, day=3, group="inference.networking.x-k8s.io")
    state = mesh.update(inference_pool("a/llama"), young, old)
    assert state.configs["a/llama"].policy.priorities.objectives == {"chat": "critical"}
    assert [(problem.reason, problem.where) for problem in state.problems] == [
        ("document-twice", "InferenceObjective a/chat")
    ]
    assert "inference.networking.x-k8s.io and in llm-d.ai" in state.problems[0].words

    bad = old | {"spec": {"priority": "high", "poolRef": {"name": "llama"}}}
    state = mesh.update(inference_pool("a/llama"), young, bad)
    assert state.configs["a/llama"].policy.priorities.objectives == {"chat": "critical"}  # its last good state

    mesh.remove(bad)
    state = mesh.update()
    assert state.configs["a/llama"].policy.priorities.objectives == {"chat": "sheddable"}
    assert state.problems == ()


def test_hosts_of_policies_and_annotations_lead_to_one_pool_each() -> None:
    state = Mesh().update(
        inference_pool("a/llama", hosts="llama.example.com:80, LLM.example.com, no/host"),
        inference_pool("a/qwen"),
        inference_policy("a/old", {"hosts": ["qwen.example.com"]}, day=2, InferencePool="qwen"),
        inference_policy("a/young", {"hosts": ["qwen.example.com", "llm.example.com"]}, day=3, InferencePool="llama"),
    )
    assert {name: config.hosts for name, config in state.configs.items()} == {
        "a/llama": {"llama.example.com", "llm.example.com"},
        "a/qwen": {"qwen.example.com"},
    }
    assert told(state, "a/young")["Programmed"][1].endswith("spec.hosts[qwen.example.com] (by a/old)")
    assert [problem.words for problem in state.problems] == [
        "metadata.annotations[kvmesh.io/hosts]: 'no/host' is no host's name",
        "spec.hosts: qwen.example.com belongs to a/old, the first claim",
    ]


def test_a_status_of_an_older_route_lets_nothing_into_another_namespace() -> None:
    stale = route("b/route", to="a/llama", resolved=True)
    stale = {**stale, "metadata": {**stale["metadata"], "generation": 2}}
    state = Mesh().update(
        inference_pool("a/llama"), stale, inference_policy("b/policy", fallbacks(5), HTTPRoute="route")
    )
    assert state.configs["a/llama"].policy.fallbacks == 2


def test_a_policy_that_reaches_a_pool_in_two_ways_counts_at_the_stronger_level() -> None:
    state = Mesh().update(
        inference_pool("a/llama"),
        gateway("a/public"),
        route("a/route", to="a/llama", via="a/public"),
        inference_policy("a/both", fallbacks(5), InferencePool="llama", Gateway="public"),
        inference_policy("a/route", fallbacks(4), HTTPRoute="route"),
    )
    assert state.configs["a/llama"].policy.fallbacks == 5


def test_after_a_defect_in_the_middle_of_an_update_the_next_snapshot_starts_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = Mesh()
    before = mesh.update(inference_pool("a/llama"))

    def break_down(*_: object) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as broken:
        broken.setattr(OutcomeBook, "settle", break_down)
        with pytest.raises(RuntimeError):
            mesh.update(inference_policy("a/own", fallbacks(5)))
    assert mesh.policy.state is before
    state = mesh.update()
    assert (state.configs["a/llama"].policy.fallbacks, told(state, "a/own")) == (5, IN_FORCE)


def test_after_a_defect_while_a_route_came_the_statuses_are_those_of_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama"), inference_policy("a/own", fallbacks(5), HTTPRoute="route"))

    def break_down(*_: object) -> None:
        raise RuntimeError("a defect")

    for defect in ("extproc.reach.outcomes.OutcomeBook.settle", "extproc.reach.mesh_policy.reach_of"):
        with monkeypatch.context() as broken:
            broken.setattr(defect, break_down)
            with pytest.raises(RuntimeError):
                mesh.update(route("a/route", to="a/llama"))
        state = mesh.update()
        assert (state.configs["a/llama"].policy.fallbacks, told(state, "a/own")) == (5, IN_FORCE)
        mesh.remove(mesh.documents[DocumentKey("gateway.networking.k8s.io", "HTTPRoute", "a", "route")])
        assert told(mesh.update(), "a/own")["Accepted"][0] == "False TargetNotFound"


@pytest.mark.parametrize(
    ("reference", "service_name"),
    [
        ({"name": "picker-a", "port": {"number": 9002}}, "a/picker-a"),
        ({"group": "", "kind": "Service", "name": "picker-a"}, "a/picker-a"),
        ({"group": "example.com", "kind": "Picker", "name": "picker-a"}, ""),
        ({"name": 1}, ""),
        ("picker-a", ""),
        (None, ""),
    ],
)
def test_a_pool_knows_the_service_of_its_endpoint_picker(reference: object, service_name: str) -> None:
    mesh = Mesh()
    mesh.update(inference_pool("a/llama", picker={"name": "another"}))
    state = mesh.update(inference_pool("a/llama", picker=reference))
    assert state.configs["a/llama"].endpoint_picker == service_name
