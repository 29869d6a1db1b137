"""What an InferencePolicy says, and how one that says it wrongly is refused."""

import copy
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, StickyBy, TokensFrom
from extproc.policy.inference_policy import parse_inference_policy, read_policy_file, read_section
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import (
    DEFAULT_CLASSES,
    ClassRule,
    DegradationStep,
    PriorityClass,
    Quota,
    StepKind,
)
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.spec import TargetRef
from extproc.policy.targets import NamedTargets, Tolerance
from extproc.policy.values import PickPolicy, Strategy
from tests.unit.extproc_policy.policy_documents import policy


def test_metadata_and_targets_are_read() -> None:
    found = parse_inference_policy(policy())
    assert (found.key, found.created_at, found.generation, found.target_refs) == (
        "prod/chat",
        "2026-01-31T12:00:00Z",
        3,
        (TargetRef(group="inference.networking.k8s.io", kind="InferencePool", name="llama"),),
    )


def test_a_document_from_a_file_needs_no_namespace_and_no_age() -> None:
    document = policy({})
    document["metadata"] = {"name": "mine"}
    found = parse_inference_policy(document)
    assert (found.key, found.created_at, found.generation, found.target_refs, found.fields) == (
        "default/mine",
        "",
        0,
        (),
        {},
    )


def test_a_policy_says_nothing_of_what_it_leaves_out() -> None:
    found = parse_inference_policy(
        policy({"load": {"overload": {"kvUsage": 0.9}}, "observability": {"sampleShare": 1}})
    )
    assert found.fields == {"load": {"overload": {"kvUsage": 0.9}}, "observability": {"sampleShare": 1}}


def test_null_is_the_same_as_left_out_as_the_api_server_has_it() -> None:
    found = parse_inference_policy(policy({"scoring": None, "load": {"health": None, "staleAfterSeconds": 3}}))
    assert found.fields == {"load": {"staleAfterSeconds": 3}}


def test_every_section_reaches_the_picker() -> None:
    picked, _ = pick_policy(parse_inference_policy(policy()).fields)
    default = PickPolicy()
    classes = picked.priorities.classes
    assert picked.strategy is Strategy.PREFIX_AWARE
    assert (picked.weights["prefix"], "turn" in picked.weights) == (2.0, False)
    assert (picked.fallbacks, picked.session_seconds) == (1, 60.0)
    assert (picked.alert_hit_ratio, picked.tier_weights["CPU"]) == (0.5, 0.7)
    assert (picked.recent_prefix_seconds, picked.copy_hot_prefixes) == (3.0, False)
    assert (picked.stale_after_seconds, picked.prefill_tokens_per_second) == (3.0, 5000.0)
    assert (picked.priorities.overload.kv_usage, picked.health.avoid_seconds) == (0.9, 4.0)
    assert classes["critical"] == DEFAULT_CLASSES["critical"]
    assert classes["standard"] == msgspec.structs.replace(
        DEFAULT_CLASSES["standard"], named_targets=NamedTargets.LLAMA2_70B_INTERACTIVE, ttft_seconds=2.0, ceiling=0.8
    )
    assert classes["batch"] == PriorityClass(
        priority=-50,
        sheddable=True,
        tolerance=Tolerance.HOURS,
        named_targets=NamedTargets.LLAMA3_405B,
        ttft_seconds=100.0,
        inter_token_seconds=1.0,
        queue_seconds=60.0,
        queue_requests=50,
        reserved_share=0.1,
        ceiling=0.5,
        refusal_status=429,
        degrade=(
            DegradationStep(step=StepKind.CAP_OUTPUT, tokens=500, enter=0.7, leave=0.5, least_seconds=3.0),
            DegradationStep(step=StepKind.SMALLER_MODEL, model="small", enter=1.5, leave=1.0),
            DegradationStep(step=StepKind.REJECT, enter=3.0, leave=2.0),
        ),
    )
    assert picked.priorities.rules == (
        ClassRule(
            priority_class="batch",
            headers={"x-team": "nightly"},
            path_prefix="/v1/chat",
            models=("org/llama", "fast"),
            claims={"org.plan": "*"},
            trust_objective=True,
        ),
        ClassRule(priority_class="critical", headers={"x-team": "on-call"}),
    )
    assert picked.priorities.objectives == {"nightly": "batch"}
    assert (picked.priorities.tenant_header, picked.priorities.tenant_claim) == ("x-tenant", "sub")
    assert picked.priorities.engine_priority
    assert picked.priorities.quotas == (
        Quota(
            tenant="nightly",
            requests_per_minute=60.0,
            prompt_tokens_per_minute=600000.0,
            generated_tokens_per_minute=30000.0,
            concurrent_requests=20,
            burst_seconds=60.0,
        ),
        Quota(model="org/llama", requests_per_minute=600.0),
    )
    assert (picked.cordoned, picked.roles) == (default.cordoned, default.roles)


def test_models_reach_the_picker_with_template_arguments_as_json_or_text() -> None:
    _, models = pick_policy(parse_inference_policy(policy()).fields)
    assert models == ModelTable(
        served=(
            ServedModel(
                name="org/llama",
                aliases=frozenset({"llama"}),
                adapters=frozenset({"sql-lora"}),
                tokens_from=TokensFrom.TOKENIZER,
                tokenizer_folder=Path("/models/llama"),
                chat_template=Path("/models/llama.jinja"),
                chat_template_kwargs={"enable_thinking": False, "effort": "high"},
                max_model_len=8192,
            ),
            ServedModel(name="small"),
        ),
        rules=(
            ModelRule(
                model="fast",
                targets=(ModelTarget(model="org/llama", weight=9.0), ModelTarget(model="small")),
                sticky_by=StickyBy.HEADER,
                sticky_header="x-tenant",
                fallbacks=("small",),
            ),
        ),
        only_listed=True,
    )


def test_sections_are_kept_as_they_are_written() -> None:
    document = policy()
    fields = parse_inference_policy(document).fields
    for name in ("failureMode", "hosts", "disaggregation"):
        assert fields[name] == document["spec"][name]
    for role in ("both", "prefill"):
        assert fields["autoscale"][role] == document["spec"]["autoscale"][role]


VARIANT = {"name": "a", "selector": [{"name": "gpu", "value": "h100"}], "podHourPrice": 1}


@pytest.mark.parametrize(
    "document",
    [
        {"scoring": {"fallbacks": 1}},
        policy({"scoring": {"fallbacks": 1}}),
        {"spec": {"scoring": {"fallbacks": 1}}, "apiVersion": "kvmesh.io/v1alpha1", "kind": "InferencePolicy"},
    ],
)
def test_a_policy_file_is_a_resource_or_its_spec_alone(document: Any) -> None:
    assert read_policy_file(document) == {"scoring": {"fallbacks": 1}}
    assert read_policy_file(None) == read_policy_file({}) == {}
    assert read_section("priorities", {"defaultClass": "critical"}) == {"priorities": {"defaultClass": "critical"}}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"scoring": {"strategyy": "kv-aware"}}, "spec.scoring.strategyy: unknown field; the nearest valid one is"),
        ({"kind": "InferencePolicy", "spec": {}}, "apiVersion: must be kvmesh.io/v1alpha1, not null"),
        (policy(), "spec.targetRefs: this file holds for all pools of the picker"),
        ([], "spec: must be an object, not a list"),
    ],
)
def test_a_policy_file_that_cannot_be_used_is_refused_with_what_to_do(document: Any, message: str) -> None:
    with pytest.raises(PolicyDocumentError) as refused:
        read_policy_file(document)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"scoring": {"weights": {"prefx": 1}}},
            "spec.scoring.weights.prefx: unknown field; the nearest valid one is 'prefix'",
        ),
        ({"scoring": {"strategy": "kv_aware"}}, "spec.scoring.strategy: must be one of round-robin, least-request, "),
        ({"load": {"overload": {"kvUsage": 95}}}, "spec.load.overload.kvUsage: must be above 0 and at most 1, not 95"),
        (
            {"load": {"overload": {"waitingRequests": 1.5}}},
            "spec.load.overload.waitingRequests: must be a whole number, not 1.5",
        ),
        ({"load": {"health": {"avoidSeconds": 99}}, "quotas": [{"tenant": "a"}]}, "spec.quotas[0]: limits nothing: "),
        ({"prefixCache": {"alertHitRatio": "0.5"}}, 'spec.prefixCache.alertHitRatio: must be a number, not "0.5"'),
        ({"prefixCache": {"tierWeights": {"NVME": 1}}}, "spec.prefixCache.tierWeights.NVME: unknown field; "),
        ({"failureMode": "open"}, "spec.failureMode: must be one of FailClose, FailOpen, not "),
        ({"priorities": {"classes": [{"priority": 1}]}}, "spec.priorities.classes[0].name: is missing"),
        (
            {"priorities": {"classes": [{"name": "a"}, {"name": "b"}, {"name": "a"}]}},
            'spec.priorities.classes[2]: "a" is already in spec.priorities.classes[0]',
        ),
        (
            {"priorities": {"classes": [{"name": "a", "degrade": [{"step": "reject", "enter": 1, "leave": 1}]}]}},
            "spec.priorities.classes[0].degrade[0].leave: leave must be below enter",
        ),
        (
            {"priorities": {"classes": [{"name": "a", "degrade": [{"step": "cap-output", "enter": 2, "leave": 1}]}]}},
            "spec.priorities.classes[0].degrade[0].step: cap-output and limit-prompt need tokens, ",
        ),
        (
            {
                "priorities": {
                    "classes": [
                        {"name": "a", "sheddable": False, "degrade": [{"step": "reject", "enter": 2, "leave": 1}]}
                    ]
                }
            },
            "spec.priorities.classes[0].degrade: only sheddable classes may be refused",
        ),
        ({"priorities": {"rules": [{"priorityClass": "a"}]}}, "spec.priorities.rules[0]: matches every request: "),
        (
            {"priorities": {"rules": [{"priorityClass": "a", "headers": [{"name": "X-A", "value": "*"}]}]}},
            "spec.priorities.rules[0].headers[0].name: must be a header's name in lower case, not ",
        ),
        (
            {"priorities": {"rules": [{"priorityClass": "a", "headers": [{"name": ":path", "value": "/"}]}]}},
            "spec.priorities.rules[0].headers[0].name: the picker reads ",
        ),
        (
            {"quotas": [{"requestsPerMinute": 1}, {"tenant": "a", "requestsPerMinute": 2}]},
            "spec.quotas[1]: never counts: spec.quotas[0] comes first",
        ),
        (
            {"disaggregation": {"raceShare": 0.1, "protocol": "sglang"}},
            "spec.disaggregation.raceShare: legs of the protocols sglang and sidecar cannot race: set raceShare to 0",
        ),
        (
            {"autoscale": {"decode": {"scaleUp": {"kvUsage": 0.3}, "scaleDown": {"kvUsage": 0.3}}}},
            "spec.autoscale.decode.scaleUp: scaleUp.kvUsage must be above scaleDown.kvUsage",
        ),
        (
            {"autoscale": {"decode": {"minReplicas": 3, "maxReplicas": 2}}},
            "spec.autoscale.decode: minReplicas must not be above ",
        ),
        (
            {"autoscale": {"both": {"variants": [{"name": "a", "selector": [], "podHourPrice": 1}]}}},
            "spec.autoscale.both.variants[0].selector: selector needs a label at least: ",
        ),
        (
            {"autoscale": {"both": {"variants": [VARIANT, VARIANT]}}},
            'spec.autoscale.both.variants[1]: "a" is already in spec.autoscale.both.variants[0]',
        ),
        ({"hosts": ["a.example.com"]}, "spec.hosts: hosts lead to one pool: "),
        (
            {"targetRefs": [{"kind": "InferencePool", "name": "a"}]},
            "spec.targetRefs[0].group: the group of InferencePool is ",
        ),
        (
            {"targetRefs": [{"kind": "Pod", "name": "a"}]},
            "spec.targetRefs[0].kind: must be one of Gateway, HTTPRoute, InferencePool, ",
        ),
        (
            {"models": {"served": [{"name": "a", "tokens": "tokenizer"}]}},
            "spec.models.served[0].tokens: tokens from a tokenizer need",
        ),
        (
            {"models": {"served": [{"name": "a", "tokenizer": "/models/../etc"}]}},
            "spec.models.served[0].tokenizer: must be an absolute path",
        ),
        (
            {"models": {"served": [{"name": "a"}, {"name": "b", "aliases": ["a"]}]}},
            "spec.models.served[1]: the name 'a' is already that of spec.models.served[0]",
        ),
        (
            {"models": {"rules": [{"model": "a", "targets": [{"model": "b", "weight": 0}]}]}},
            "spec.models.rules[0].targets: at least one weight",
        ),
        (
            {"models": {"rules": [{"model": "a", "targets": [{"model": "b"}], "stickyBy": "header"}]}},
            "spec.models.rules[0].stickyBy: stickyHeader is needed",
        ),
        ([], "spec: must be an object, not a list"),
        ({"load": {"staleAfterSeconds": float("nan")}}, "spec.load.staleAfterSeconds: must be above 0 and at most "),
        ({"load": {"prefillTokensPerSecond": float("inf")}}, "spec.load.prefillTokensPerSecond: must be above 0 and "),
        ({"models": {"served": [{"name": "\ud800"}]}}, "spec.models.served[0].name: must be text without halves of "),
        ({"scoring": {1: 2}}, "spec.scoring: has the field name 1, which is no text"),
        ({"scoring": {'a"\n': 1}}, 'spec.scoring["a\\"\\n"]: unknown field'),
    ],
)
def test_a_wrong_field_is_refused_with_its_path(spec: Any, message: str) -> None:
    document = policy({})
    document["spec"] = copy.deepcopy(spec)
    with pytest.raises(PolicyDocumentError) as refused:
        parse_inference_policy(document)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"apiVersion": "kvmesh.io/v1beta1"}, 'apiVersion: must be kvmesh.io/v1alpha1, not "kvmesh.io/v1beta1"'),
        ({"kind": "EnvoyFilter"}, 'kind: must be InferencePolicy, not "EnvoyFilter"'),
        ({"spce": {}}, "spce: unknown field; there are apiVersion, kind, metadata, spec, status"),
        ({"spec": None}, "spec: is missing"),
        ({"metadata": {}}, "metadata.name: must be a text, not null"),
        (
            {"metadata": {"name": "a", "creationTimestamp": "yesterday"}},
            "metadata.creationTimestamp: must be a time such as ",
        ),
    ],
)
def test_what_is_no_such_resource_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyDocumentError) as refused:
        parse_inference_policy(policy({}) | change)
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"priorities": {"defaultClass": "standrad"}},
            "spec.priorities.defaultClass: there is no class 'standrad'; the nearest valid one is 'standard'",
        ),
        (
            {"priorities": {"classes": {"a.b_c": {"degrade": [{"step": "reject", "enter": 2, "leave": 1}]}}}},
            "spec.priorities.classes[a.b_c].degrade[0].step: only sheddable classes may be refused (sheddable: true)",
        ),
        (
            {"priorities": {"rules": [{"priorityClass": "my_class", "pathPrefix": "/a"}]}},
            "spec.priorities.rules[0].priorityClass: there is no class 'my_class'; the nearest valid one is 'critical'",
        ),
        (
            {"priorities": {"classes": {"critical": {"reservedShare": 1.0}}}},
            "spec.priorities.classes: the reserved shares add up to 1.05, and there is only 1 to share",
        ),
        (
            {"scoring": {"strategy": "round-robin", "weights": {"turn": 0}}},
            "spec.scoring.weights: every weight is 0",
        ),
        (
            {"autoscale": {"both": {"scaleUp": {"kvUsage": 0.2}, "scaleDown": {"kvUsage": 0.3}}}},
            "spec.autoscale.both.scaleUp: scaleUp.kvUsage must be above scaleDown.kvUsage, or pods would come and go "
            "for ever",
        ),
        (
            {"models": {"onlyListed": True, "rules": [{"model": "a", "targets": [{"model": "b"}]}]}},
            "spec.models.rules[0]: 'b' is neither a served model nor an adapter in spec.models.served, and onlyListed "
            "refuses all others",
        ),
        (
            {
                "models": {"onlyListed": True, "served": [{"name": "big"}]},
                "priorities": {
                    "classes": {
                        "batch": {"degrade": [{"step": "smaller-model", "model": "small", "enter": 2, "leave": 1}]}
                    }
                },
            },
            "spec.priorities.classes[batch].degrade[0].model: 'small' is not in spec.models and would be answered 404 "
            "(onlyListed)",
        ),
    ],
)
def test_what_only_the_whole_shows_is_refused_with_the_path_in_the_resource(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(PolicyDocumentError) as refused:
        pick_policy(fields)
    assert str(refused.value) == message


def test_names_that_people_give_do_not_blur_the_path_of_what_is_wrong() -> None:
    objective = {"name": "team.chat", "priorityClass": "nope"}
    for spec, path in (
        ({"priorities": {"objectives": [objective]}}, "spec.priorities.objectives[team.chat]"),
        ({"models": {"onlyListed": True, "rules": [arm("policy.my_model: x")]}}, "spec.models.rules[0]"),
    ):
        with pytest.raises(PolicyDocumentError) as refused:
            pick_policy(parse_inference_policy(policy(spec)).fields)
        assert refused.value.path == path
        assert "nope" in refused.value.message or "'policy.my_model: x' is neither" in refused.value.message
    for name in ("a b: c", "x[0].y", "a]"):
        with pytest.raises(
            PolicyDocumentError, match=r"^spec\.priorities\.objectives\[0\]\.name: must be an objective"
        ):
            parse_inference_policy(policy({"priorities": {"objectives": [objective | {"name": name}]}}))


def arm(model: str) -> dict[str, Any]:
    return {"model": "a", "targets": [{"model": model}]}


def test_all_policies_together_have_no_more_classes_than_a_picker_can_have_queues_and_metrics_for() -> None:
    classes: dict[str, Any] = {f"c{i}": {} for i in range(256)}
    with pytest.raises(
        PolicyDocumentError, match=r"^spec\.priorities\.classes: 259 in all policies; at most 256 can be$"
    ):
        pick_policy({"priorities": {"classes": classes}})


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("false", False),
        ("high", "high"),
        ('{"a": [1, 1.5, null]}', {"a": [1, 1.5, None]}),
        ("NaN", "NaN"),
        ("[-Infinity]", "[-Infinity]"),
        ("1e999", "1e999"),
        ('"\\ud800"', '"\\ud800"'),  # half of a character: no page could show it
    ],
)
def test_an_argument_of_the_chat_template_is_json_that_can_be_written_again_else_a_text(
    written: str, read: Any
) -> None:
    model = {"name": "m", "chatTemplateKwargs": [{"name": "x", "value": written}]}
    _, models = pick_policy(parse_inference_policy(policy({"models": {"served": [model]}})).fields)
    assert models.served[0].chat_template_kwargs == {"x": read}
    assert json.dumps(models.served[0].chat_template_kwargs, ensure_ascii=False, allow_nan=False).encode()


def test_a_number_too_long_to_be_written_is_refused_like_any_other() -> None:
    with pytest.raises(
        PolicyDocumentError, match=r"^spec\.scoring\.fallbacks: must be between 0 and 16, not a number of"
    ):
        parse_inference_policy(policy({"scoring": {"fallbacks": 16**5000}}))


def test_nothing_given_is_the_default_policy() -> None:
    assert pick_policy({}) == (PickPolicy(), ModelTable())
