"""What a policy says of priorities and quotas: strictly read, and every mistake is named with its path."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.ext_proc import answers as ext_proc
from extproc.policy.inference_policy import read_spec, resets_of
from extproc.policy.merge import Layer, Level, merge_layers
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import (
    DEFAULT_CLASSES,
    OWN_HEADERS,
    ClassRule,
    DegradationStep,
    OverloadPolicy,
    Priorities,
    PriorityClass,
    Quota,
    StepKind,
    Tenants,
)
from extproc.policy.request_class import PriorityPolicy
from extproc.policy.targets import Tolerance
from tests.unit.extproc_ext_proc.envoy_message import read_headers


def whole(spec: Any) -> PriorityPolicy:
    return pick_policy(read_spec(spec))[0].priorities


def priorities(document: Any) -> PriorityPolicy:
    return whole({"priorities": document})


def test_nothing_given_is_the_default() -> None:
    assert priorities({}) == PriorityPolicy()


def test_every_field_may_be_given() -> None:
    document = """
    priorities:
      classes:
      - {name: critical, ceiling: 1, interTokenSeconds: 0.02}
      - name: batch
        priority: -7
        sheddable: true
        tolerance: hours
        ttftSeconds: 900
        queueSeconds: 0
        queueRequests: 10
        ceiling: 0.7
        reservedShare: 0.1
        refusalStatus: 429
        degrade:
        - {step: cap-output, enter: 1, leave: 0.5, tokens: 200}
        - {step: smaller-model, enter: 2, leave: 1.5, model: small, leastSeconds: 0}
        - {step: reject, enter: 4, leave: 3}
      defaultClass: batch
      rules:
      - priorityClass: critical
        headers: [{name: x-tier, value: gold}]
        pathPrefix: /v1
        models: [m]
        claims: [{name: a.b, value: "*"}]
      - {priorityClass: standard, models: [n], trustObjective: true}
      objectives: [{name: nightly, priorityClass: batch}]
      trustObjective: true
      tenants: {header: x-tenant, claim: org}
      enginePriority: true
    quotas:
    - {tenant: acme, requestsPerMinute: 60, promptTokensPerMinute: 1000, concurrentRequests: 4}
    - {generatedTokensPerMinute: 500, burstSeconds: 5}
    load: {overload: {enabled: false, waitingRequests: 9}}
    """
    assert whole(yaml.safe_load(document)) == PriorityPolicy(
        classes={
            **DEFAULT_CLASSES,
            "critical": PriorityClass(
                priority=100, tolerance=Tolerance.MILLISECONDS, ceiling=1.0, inter_token_seconds=0.02
            ),
            "batch": PriorityClass(
                priority=-7,
                sheddable=True,
                tolerance=Tolerance.HOURS,
                ttft_seconds=900.0,
                queue_seconds=0.0,
                queue_requests=10,
                ceiling=0.7,
                reserved_share=0.1,
                refusal_status=429,
                degrade=(
                    DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.5, tokens=200),
                    DegradationStep(
                        step=StepKind.SMALLER_MODEL, enter=2.0, leave=1.5, model="small", least_seconds=0.0
                    ),
                    DegradationStep(step=StepKind.REJECT, enter=4.0, leave=3.0),
                ),
            ),
        },
        default_class="batch",
        rules=(
            ClassRule(
                priority_class="critical",
                headers={"x-tier": "gold"},
                path_prefix="/v1",
                models=("m",),
                claims={"a.b": "*"},
            ),
            ClassRule(priority_class="standard", models=("n",), trust_objective=True),
        ),
        objectives={"nightly": "batch"},
        trust_objective=True,
        tenant_header="x-tenant",
        tenant_claim="org",
        quotas=(
            Quota(tenant="acme", requests_per_minute=60.0, prompt_tokens_per_minute=1000.0, concurrent_requests=4),
            Quota(generated_tokens_per_minute=500.0, burst_seconds=5.0),
        ),
        engine_priority=True,
        overload=OverloadPolicy(enabled=False, waiting_requests=9),
    )


def _lay_over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    lower = Layer(source="below", level=Level.SETTINGS, created_at=None, fields=below)
    upper = Layer(source="above", level=Level.MESH, created_at=None, fields=above)
    return dict(merge_layers([lower, upper], resets=resets_of).fields)


def test_a_class_is_merged_field_by_field_over_the_one_below() -> None:
    below = read_spec(
        {"priorities": {"classes": [{"name": "sheddable", "ceiling": 0.5}, {"name": "own", "priority": 3}]}}
    )
    above = read_spec(
        {"priorities": {"classes": [{"name": "sheddable", "refusalStatus": 429}, {"name": "own", "sheddable": True}]}}
    )
    found = pick_policy(_lay_over(below, above))[0].priorities
    assert found.classes["sheddable"] == PriorityClass(
        priority=-100,
        sheddable=True,
        tolerance=Tolerance.MINUTES,
        reserved_share=0.05,
        ceiling=0.5,
        refusal_status=429,
    )
    assert found.classes["own"] == PriorityClass(priority=3, sheddable=True)
    assert set(found.classes) == {*DEFAULT_CLASSES, "own"}


def test_a_preset_and_a_list_take_the_place_of_what_is_below() -> None:
    below = {"scoring": {"strategy": "least-request", "weights": {"lora": 1}}, "quotas": [{"requestsPerMinute": 1}]}
    assert _lay_over(below, {"scoring": {"strategy": "round-robin"}, "quotas": []}) == {
        "scoring": {"strategy": "round-robin"},
        "quotas": [],
    }
    assert _lay_over(below, {}) == below


@pytest.mark.parametrize(
    ("above", "left"),
    [
        ({"targets": "mlperf-llama3.1-8b"}, {"tolerance": "hours", "queueSeconds": 9}),
        ({"tolerance": "minutes"}, {}),
        ({"tolerance": "minutes", "ttftSeconds": 8}, {}),
    ],
)
def test_targets_and_tolerance_of_a_class_take_the_place_of_the_targets_below(
    above: dict[str, Any], left: dict[str, Any]
) -> None:
    targets = {"targets": "mlperf-llama2-70b", "ttftSeconds": 3, "interTokenSeconds": 0.3, "queueSeconds": 9}
    below = {"tolerance": "hours", **targets}
    layers = [{"priorities": {"classes": {"standard": fields, "own": {"ttftSeconds": 1}}}} for fields in (below, above)]
    classes = {"standard": left | above, "own": {"ttftSeconds": 1}}
    assert _lay_over(*layers) == {"priorities": {"classes": classes}}


def test_the_default_classes_are_not_changed_by_a_document() -> None:
    before = dict(DEFAULT_CLASSES)
    priorities({"classes": [{"name": "standard", "priority": 1}, {"name": "new"}]})
    assert dict(DEFAULT_CLASSES) == before == dict(PriorityPolicy().classes)


def classes(name: str = "critical", **fields: Any) -> dict[str, Any]:
    return {"classes": [{"name": name} | fields]}


def step(**values: Any) -> dict[str, Any]:
    return classes("sheddable", degrade=[{"step": "reject", "enter": 2, "leave": 1} | values])


def rule(**values: Any) -> dict[str, Any]:
    return {"rules": [{"priorityClass": "critical", "models": ["m"]} | values]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (3, ": must be an object, not 3"),
        ({"clases": []}, ".clases: unknown field; the nearest valid one is 'classes'"),
        (classes(ttftSecond=1), ".classes[0].ttftSecond: unknown field; the nearest valid one is 'ttftSeconds'"),
        ({"classes": {"critical": {}}}, ".classes: must be a list, not an object"),
        ({"classes": ["critical"]}, '.classes[0]: must be an object, not "critical"'),
        (classes(ttftSeconds="1s"), '.classes[0].ttftSeconds: must be a number, not "1s"'),
        (classes(ttftSeconds=0), ".classes[0].ttftSeconds: must be above 0 and at most 86400, not 0"),
        (classes(ttftSeconds=float("nan")), ".classes[0].ttftSeconds: must be above 0 and at most 86400, not NaN"),
        (classes(priority=2**31), ".classes[0].priority: must be between -2147483648 and 2147483647, not 2147483648"),
        (classes(priority=1.5), ".classes[0].priority: must be a whole number, not 1.5"),
        (
            classes(tolerance="days"),
            '.classes[0].tolerance: must be one of milliseconds, seconds, minutes, hours, not "days"',
        ),
        (classes(refusalStatus=500), ".classes[0].refusalStatus: must be one of 429, 503, not 500"),
        (classes(ceiling=1.1), ".classes[0].ceiling: must be above 0 and at most 1, not 1.1"),
        (classes(reservedShare=1.0), ".classes: the reserved shares add up to 1.05, and there is only 1 to share"),
        (
            classes("very important"),
            ".classes[0].name: must be a class's name: letters, digits, '-', '_' and '.', not ",
        ),
        (classes(""), ".classes[0].name: must have 1 to 63 characters, not 0"),
        ({"defaultClass": "standart"}, ".defaultClass: there is no class 'standart'; the nearest valid one is "),
        (
            {"objectives": [{"name": "chat", "priorityClass": "crit"}]},
            ".objectives[chat]: there is no class 'crit'; the nearest valid one is",
        ),
        ({"objectives": [{"name": "chat", "priorityClass": 1}]}, ".objectives[0].priorityClass: must be a text, not 1"),
        ({"rules": {"priorityClass": "critical"}}, ".rules: must be a list"),
        ({"rules": [{"models": ["m"]}]}, ".rules[0].priorityClass: is missing"),
        ({"rules": [{"priorityClass": "critical"}]}, ".rules[0]: matches every request: give headers, pathPrefix, "),
        (rule(priorityClass="crit"), ".rules[0].priorityClass: there is no class 'crit'"),
        (rule(header=[]), ".rules[0].header: unknown field; the nearest valid one is 'headers'"),
        (rule(models="m"), '.rules[0].models: must be a list, not "m"'),
        (rule(models=["a", "*"]), ".rules[0].models: '*' is no model's name: leave models out for all of them"),
        (rule(pathPrefix="v1"), ".rules[0].pathPrefix: must be a path that starts with '/' and has no '?', not \"v1\""),
        (rule(headers=[{"name": ":path", "value": "/"}]), ".rules[0].headers[0].name: the picker reads "),
        (rule(headers=[{"name": "x tier", "value": "gold"}]), ".rules[0].headers[0].name: must be a header's name in "),
        (rule(claims=[{"name": "c", "value": True}]), ".rules[0].claims[0].value: must be a text, not true"),
        ({"tenants": {"header": "x-request-id"}}, ".tenants.header: x-gateway-inference-objective, :path, :method, "),
        ({"tenants": {"header": "x-tenant:"}}, ".tenants.header: must be a header's name in lower case, not "),
        (step(leave=2), ".classes[0].degrade[0].leave: leave must be below enter"),
        (step(leave=0), ".classes[0].degrade[0].leave: must be above 0"),
        (step(step="stop"), ".classes[0].degrade[0].step: must be one of cap-output, limit-prompt"),
        (step(step="cap-output"), ".classes[0].degrade[0].step: cap-output and limit-prompt need tokens, the other"),
        (step(tokens=5), ".classes[0].degrade[0].step: cap-output and limit-prompt need tokens, the other steps have"),
        (step(step="smaller-model"), ".classes[0].degrade[0].step: smaller-model needs a model, the other steps have"),
        (step(model="m"), ".classes[0].degrade[0].step: smaller-model needs a model, the other steps have none"),
        (classes(degrade=[{"step": "reject"}]), ".classes[0].degrade[0].enter: is missing"),
        (
            classes(degrade=[{"step": "reject", "enter": 2, "leave": 1}]),
            ".classes[critical].degrade[0].step: only sheddable classes may be refused",
        ),
        ({"trustObjective": 1}, ".trustObjective: must be true or false, not 1"),
    ],
)
def test_a_mistake_is_named_with_its_path(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        priorities(document)
    assert str(error.value).startswith(f"spec.priorities{message}")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"quotas": [{"tenant": "a"}]}, "spec.quotas[0]: limits nothing"),
        ({"quotas": [{"requestsPerMinute": -1}]}, "spec.quotas[0].requestsPerMinute: must be between 0 and 1e+15, not"),
        ({"quotas": [{"requestsPerMinute": 1, "burstSeconds": 0}]}, "spec.quotas[0].burstSeconds: must be above 0"),
        (
            {"quotas": [{"requestsPerMinut": 1}]},
            "spec.quotas[0].requestsPerMinut: unknown field; the nearest valid one",
        ),
        (
            {"quotas": [{"requestsPerMinute": 9}, {"tenant": "a", "requestsPerMinute": 1}]},
            "spec.quotas[1]: never counts: spec.quotas[0] comes first",
        ),
        ({"load": {"overload": {"kvUsage": 2}}}, "spec.load.overload.kvUsage: must be above 0 and at most 1, not 2"),
        ({"load": {"overload": {"enabled": "yes"}}}, "spec.load.overload.enabled: must be true or false, not"),
    ],
)
def test_a_mistake_in_quotas_and_overload_is_named_with_its_path(spec: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        whole(spec)
    assert str(error.value).startswith(message)


def test_quotas_that_do_not_cover_each_other_all_count() -> None:
    quotas = [
        {"tenant": "a", "model": "m", "requestsPerMinute": 1},
        {"tenant": "a", "requestsPerMinute": 2},
        {"model": "m", "requestsPerMinute": 3},
        {"requestsPerMinute": 4},
    ]
    assert len(whole({"quotas": quotas}).quotas) == 4


def test_what_rules_cannot_match_is_what_the_picker_takes_for_itself() -> None:
    message = ProcessingRequest()
    wanted = ext_proc.FURTHER_HEADERS | {*OWN_HEADERS, ":authority"}
    for name in sorted(wanted):
        message.request_headers.headers.headers.add(key=name, raw_value=b"x")
    assert set(ext_proc.request_facts(read_headers(message, further=wanted)).headers) == wanted - set(OWN_HEADERS)


FIELDS = sorted(
    {
        field
        for kind in (Priorities, PriorityClass, ClassRule, DegradationStep, Quota, OverloadPolicy, Tenants)
        for field in kind.__struct_encode_fields__
    }
    | {"name", "value", *DEFAULT_CLASSES}
)
NUMBERS = [0, 1, -1, 2**40, 10**400, 0.5, 1e308, float("nan"), float("inf")]
VALUES = st.sampled_from([None, True, *NUMBERS, "", "*", "critical", "hours", "/v1", *StepKind])
DOCUMENTS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=10,
)


@given(document=st.dictionaries(st.sampled_from(Priorities.__struct_encode_fields__), DOCUMENTS, max_size=3))
def test_any_document_is_a_policy_or_a_mistake_with_its_path(document: dict[str, Any]) -> None:
    try:
        found = priorities(document)
    except ConfigError as error:
        assert str(error).startswith("spec.priorities")
    else:
        assert found.default_class in found.classes


@pytest.mark.parametrize(
    "limit",
    ["requestsPerMinute", "promptTokensPerMinute", "generatedTokensPerMinute", "concurrentRequests"],
)
def test_a_quota_may_allow_nothing(limit: str) -> None:
    (quota,) = whole({"quotas": [{limit: 0}]}).quotas
    assert msgspec.to_builtins(quota)[limit] == 0


HEAD = {"apiVersion": "kvmesh.io/v1alpha1", "kind": "InferencePolicy"}
PAGE = Path(__file__).parents[3] / "docs" / "guides" / "priorities.md"


def test_the_examples_of_priorities_and_quotas_can_be_read_and_name_every_field_of_their_lists() -> None:
    texts = (PAGE.read_text(encoding="utf-8"), PAGE.with_name("quotas.md").read_text(encoding="utf-8"))
    own, quotas = (text.split("```yaml\n")[1:] for text in texts)
    examples = [part.partition("```")[0] for part in (*own, *quotas)]
    read = [read["spec"] for example in examples if "spec" in (read := yaml.safe_load(example))]
    assert all(whole(spec) for spec in read)
    items = [rule for spec in read for rule in spec.get("priorities", {}).get("rules", ())]
    assert {field for item in items for field in item} == set(ClassRule.__struct_encode_fields__)
    items = [quota for spec in read for quota in spec.get("quotas", ())]
    assert {field for item in items for field in item} == set(Quota.__struct_encode_fields__)


def test_no_class_may_fill_endpoints_further_than_one_above_it() -> None:
    read = priorities(
        {"classes": [{"name": "batch", "priority": -50, "sheddable": True}, {"name": "vip", "priority": 200}]}
    )
    ceilings = {name: item.ceiling for name, item in read.classes.items()}
    assert ceilings == {"vip": 1.0, "critical": 1.0, "standard": 0.8, "batch": 0.8, "sheddable": 0.6}
