"""InferenceObjectives become objectives of a pool, InferenceModelRewrites its model rules."""

import json
import random
from typing import Any

import pytest

from extproc.models.models import ModelTable, ModelTarget, resolve
from extproc.policy.inference_extension import (
    Objective,
    RewriteRule,
    model_rules_of,
    objectives_of,
    read_model_rewrite,
    read_objective,
)
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import DEFAULT_CLASSES, PriorityClass
from extproc.policy.reading import PolicyDocumentError
from tests.unit.extproc_policy.policy_documents import path_exists
from tests.unit.extproc_policy.policy_mutations import mutated

POOL = "prod/llama"


def resource(
    kind: str, name: str, spec: Any, *, age: str = "2026-01-01T00:00:00Z", group: str = "llm-d.ai"
) -> dict[str, Any]:
    if isinstance(spec, dict):
        spec = {"poolRef": {"name": "llama"}} | spec
    metadata = {"name": name, "namespace": "prod", "creationTimestamp": age, "uid": "1", "managedFields": []}
    return {"apiVersion": f"{group}/v1alpha2", "kind": kind, "metadata": metadata, "spec": spec, "status": {}}


def objective(name: str, priority: int | None, **more: Any) -> Objective:
    return read_objective(
        resource("InferenceObjective", name, {} if priority is None else {"priority": priority}, **more)
    )


def rewrite(name: str, *rules: tuple[list[str], list[str]], age: str = "2026-01-01T00:00:00Z") -> Any:
    written = [
        {
            "matches": [{"model": {"type": "Exact", "value": model}} for model in models],
            "targets": [{"modelRewrite": target} for target in targets],
        }
        for models, targets in rules
    ]
    return read_model_rewrite(resource("InferenceModelRewrite", name, {"rules": written}, age=age))


@pytest.mark.parametrize("group", ["llm-d.ai", "inference.networking.x-k8s.io"])
def test_an_objective_is_read_from_both_groups_that_had_it(group: str) -> None:
    assert objective("fast", 7, group=group) == Objective(
        namespace="prod", name="fast", created_at="2026-01-01T00:00:00Z", pools=(POOL,), priority=7
    )


@pytest.mark.parametrize(
    ("priority", "found"),
    [
        (None, "standard"),
        (7, "standard"),
        (100, "critical"),
        (5000, "critical"),
        (-1, "sheddable"),
        (-5000, "sheddable"),
    ],
)
def test_an_objective_means_the_most_important_class_that_is_no_more_important(
    priority: int | None, found: str
) -> None:
    assert objectives_of(POOL, [objective("o", priority)], DEFAULT_CLASSES) == {"o": found}


def test_objectives_of_other_pools_and_younger_ones_of_the_same_name_do_not_count() -> None:
    classes = {"high": PriorityClass(priority=9), "low": PriorityClass()}
    objectives = [objective("o", 9, age="2026-02-01T00:00:00Z"), objective("o", 0), objective("p", 9)]
    assert objectives_of(POOL, objectives, classes) == {"o": "low", "p": "high"}
    assert objectives_of("prod/other", objectives, classes) == {}
    assert objectives_of(POOL, objectives, {}) == {}


def test_a_rewrite_is_read_with_weights_of_one_target_added_up() -> None:
    document = resource(
        "InferenceModelRewrite",
        "r",
        {
            "rules": [
                {
                    "targets": [
                        {"modelRewrite": "a", "weight": 3},
                        {"modelRewrite": "b"},
                        {"modelRewrite": "a", "weight": 2},
                    ]
                }
            ]
        },
    )
    assert read_model_rewrite(document).rules == (
        RewriteRule(models=(), targets=(ModelTarget(model="a", weight=5.0), ModelTarget(model="b", weight=1.0))),
    )


def test_exact_goes_before_generic_then_the_oldest_then_the_first() -> None:
    rewrites = [
        rewrite("young", (["chat"], ["young"]), (["code"], ["coder"]), age="2026-03-01T00:00:00Z"),
        rewrite("old", ([], ["rest"]), (["chat"], ["first"]), (["chat"], ["second"])),
    ]
    _, table = pick_policy({}, rewrites=model_rules_of(POOL, rewrites))
    assert {name: model_for(name, table) for name in ("chat", "code", "anything")} == {
        "chat": "first",
        "code": "coder",
        "anything": "rest",
    }
    assert table.names() == {"chat", "code"}
    assert model_rules_of("prod/other", rewrites) == []


def model_for(name: str, table: ModelTable) -> str | None:
    return resolve(name, table=table, user=None, headers={}, draw=0.5).model


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        ("InferenceObjective", {"priority": "high"}, 'spec.priority: must be a whole number, not "high"'),
        ("InferenceObjective", {"priority": 2**31}, "spec.priority: must be between -2147483648 and "),
        ("InferenceObjective", {"poolRef": {}}, "spec.poolRef.name: is missing"),
        (
            "InferenceObjective",
            {"poolRef": {"name": "a", "kind": "Service"}},
            "spec.poolRef.kind: must be one of InferencePool, not ",
        ),
        ("InferenceObjective", None, "spec: must be an object, not null"),
        ("InferenceModelRewrite", {}, "spec.rules: is missing"),
        (
            "InferenceModelRewrite",
            {"rules": [{"targets": []}]},
            "spec.rules[0].targets: must have 1 to 10000 items, not 0",
        ),
        (
            "InferenceModelRewrite",
            {"rules": [{"targets": [{"modelRewrite": "a", "weight": 0}]}]},
            "spec.rules[0].targets[0].weight: must be between 1 and 1000000, not 0",
        ),
        (
            "InferenceModelRewrite",
            {"rules": [{"matches": [{"model": {"type": "Regex", "value": "a"}}], "targets": [{"modelRewrite": "a"}]}]},
            "spec.rules[0].matches[0].model.type: must be one of Exact, not ",
        ),
    ],
)
def test_a_wrong_resource_is_refused_with_its_path(kind: str, spec: Any, message: str) -> None:
    read = read_objective if kind == "InferenceObjective" else read_model_rewrite
    with pytest.raises(PolicyDocumentError) as refused:
        read(resource(kind, "a", spec))
    assert str(refused.value).startswith(message)


def test_an_objective_of_version_1_may_name_several_pools() -> None:
    document = resource("InferenceObjective", "fast", {"priority": 7}) | {"apiVersion": "llm-d.ai/v1"}
    references = [{"name": "llama"}, {"group": "inference.networking.k8s.io", "name": "qwen"}]
    found = read_objective(document | {"spec": {"priority": 7, "poolRefs": references}})
    assert (found.pools, found.priority) == (("prod/llama", "prod/qwen"), 7)
    assert all(objectives_of(pool, [found], DEFAULT_CLASSES) for pool in found.pools)
    with pytest.raises(PolicyDocumentError, match=r"^spec\.poolRef: is missing; in v1 poolRefs "):
        read_objective(document | {"spec": {"poolSelector": {"matchLabels": {"app": "llama"}}}})


def test_other_versions_and_groups_are_refused() -> None:
    document = resource("InferenceObjective", "a", {})
    for version in ("llm-d.ai/v2", "inference.networking.x-k8s.io/v1", "example.org/v1alpha2", "v1"):
        with pytest.raises(PolicyDocumentError, match=r"apiVersion: must be llm-d\.ai/v1alpha2 or "):
            read_objective(document | {"apiVersion": version})


@pytest.mark.parametrize("kind", ["InferenceObjective", "InferenceModelRewrite"])
def test_a_damaged_resource_is_refused_with_a_path_of_its_own_or_read(kind: str) -> None:
    rule: dict[str, Any] = {
        "matches": [{"model": {"type": "Exact", "value": "chat"}}],
        "targets": [{"modelRewrite": "a", "weight": 3}, {"modelRewrite": "b"}],
    }
    is_objective = kind == "InferenceObjective"
    document = json.dumps(
        resource(kind, "a", {"priority": 3} if is_objective else {"rules": [rule, {"targets": [rule["targets"][1]]}]})
    )
    chance = random.Random(9)
    read = 0
    for _ in range(2000):
        damaged = mutated(document, chance, most=2)
        try:
            if is_objective:
                objectives_of(POOL, [read_objective(damaged)], DEFAULT_CLASSES)
            else:
                pick_policy({}, rewrites=model_rules_of(POOL, [read_model_rewrite(damaged)]))
            read += 1
        except PolicyDocumentError as error:
            assert path_exists(damaged, error.path), (str(error), damaged)
    assert 100 < read < 1900
