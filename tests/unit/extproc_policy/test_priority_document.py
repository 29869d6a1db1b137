"""The policy's part `priorities`, strictly read: every mistake is named with its path."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.ext_proc import answers as ext_proc
from extproc.policy.document import parse_policy
from extproc.policy.priority import (
    DEFAULT_CLASSES,
    ClassRule,
    DegradationStep,
    Order,
    OverloadPolicy,
    PriorityClass,
    PriorityPolicy,
    Quota,
    StepKind,
    Tolerance,
)
from extproc.policy.priority_document import OWN_HEADERS
from extproc.policy.values import PickPolicy
from tests.unit.extproc_ext_proc.envoy_message import read_headers


def priorities(document: Any, *, base: PickPolicy | None = None) -> PriorityPolicy:
    return parse_policy({"priorities": document}, base=base).priorities


def test_nothing_given_is_the_default() -> None:
    assert priorities({}) == PriorityPolicy()


def test_every_field_may_be_given() -> None:
    document = """
    classes:
      critical: {ceiling: 1, inter_token_seconds: 0.02}
      batch:
        priority: -7
        sheddable: true
        tolerance: hours
        ttft_seconds: 900
        queue_seconds: 0
        queue_requests: 10
        ceiling: 0.7
        reserved_share: 0.1
        order: first-come
        refusal_status: 429
        degrade:
          - {step: cap-output, enter: 1, leave: 0.5, tokens: 200}
          - {step: smaller-model, enter: 2, leave: 1.5, model: small, least_seconds: 0}
          - {step: reject, enter: 4, leave: 3}
    default_class: batch
    rules:
      - {priority_class: critical, headers: {X-Tier: gold}, path_prefix: /v1, models: [m], claims: {a.b: "*"}}
      - {priority_class: standard, models: [n], trust_objective: true}
    objectives: {nightly: batch}
    trust_objective: true
    tenant_header: X-Tenant
    tenant_claim: org
    quotas:
      - {tenant: acme, requests_per_minute: 60, prompt_tokens_per_minute: 1000, concurrent_requests: 4}
      - {generated_tokens_per_minute: 500, burst_seconds: 5}
    engine_priority: true
    overload: {enabled: false, waiting_requests: 9}
    """
    assert priorities(yaml.safe_load(document)) == PriorityPolicy(
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
                order=Order.FIRST_COME,
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


def test_a_class_is_merged_field_by_field_over_the_one_below() -> None:
    below = parse_policy({"priorities": {"classes": {"sheddable": {"ceiling": 0.5}, "own": {"priority": 3}}}})
    found = priorities({"classes": {"sheddable": {"refusal_status": 429}, "own": {"sheddable": True}}}, base=below)
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


def test_lists_take_the_place_of_those_below() -> None:
    below = parse_policy({"priorities": {"quotas": [{"requests_per_minute": 1}, {"requests_per_minute": 2}][:1]}})
    assert priorities({"quotas": []}, base=below).quotas == ()
    assert priorities({"engine_priority": True}, base=below).quotas == below.priorities.quotas


def test_the_default_classes_are_not_changed_by_a_document() -> None:
    before = dict(DEFAULT_CLASSES)
    priorities({"classes": {"standard": {"priority": 1}, "new": {}}})
    assert dict(DEFAULT_CLASSES) == before == dict(PriorityPolicy().classes)


def step(**values: Any) -> dict[str, Any]:
    return {"classes": {"sheddable": {"degrade": [{"step": "reject", "enter": 2, "leave": 1} | values]}}}


def rule(**values: Any) -> dict[str, Any]:
    return {"rules": [{"priority_class": "critical", "models": ["m"]} | values]}


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (3, ": must be a mapping, not 3"),
        ({"clases": {}}, ".clases: unknown field; the nearest valid one is 'classes'"),
        (
            {"classes": {"critical": {"ttft_second": 1}}},
            ".classes.critical.ttft_second: unknown field; the nearest valid one is 'ttft_seconds'",
        ),
        ({"classes": {"critical": 5}}, ".classes.critical: must be a mapping, not 5"),
        ({"classes": ["critical"]}, ".classes: must be a mapping, not ['critical']"),
        ({"classes": {"critical": {"ttft_seconds": "1s"}}}, ".classes.critical.ttft_seconds: expected `float | null`"),
        ({"classes": {"critical": {"ttft_seconds": 0}}}, ".classes.critical.ttft_seconds: must be above 0"),
        ({"classes": {"critical": {"ttft_seconds": float("nan")}}}, ".classes.critical.ttft_seconds: must be a number"),
        ({"classes": {"critical": {"priority": 2**31}}}, ".classes.critical.priority: must be between -2147483648 and"),
        ({"classes": {"critical": {"priority": 1.5}}}, ".classes.critical.priority: expected `int`, got `float`"),
        (
            {"classes": {"critical": {"tolerance": "days"}}},
            ".classes.critical.tolerance: must be one of milliseconds, seconds, minutes, hours, not 'days'",
        ),
        (
            {"classes": {"critical": {"order": None}}},
            ".classes.critical.order: must be one of shortest-work, first-come",
        ),
        ({"classes": {"critical": {"refusal_status": 500}}}, ".classes.critical.refusal_status: must be 429 or 503"),
        ({"classes": {"critical": {"ceiling": 1.1}}}, ".classes.critical.ceiling: must be between 0 and 1"),
        ({"classes": {"critical": {"ceiling": 0}}}, ".classes.critical.ceiling: must be above 0"),
        (
            {"classes": {"critical": {"reserved_share": 0.6}, "standard": {"reserved_share": 0.4}}},
            ".classes: the reserved shares add up to 1.05",
        ),
        ({"classes": {"very important": {}}}, ".classes.very important: a class's name has up to 63 letters"),
        ({"classes": {"": {}}}, ".classes.: a class's name has"),
        (
            {"default_class": "standart"},
            ".default_class: there is no class 'standart'; the nearest valid one is 'standard'",
        ),
        ({"objectives": {"chat": "crit"}}, ".objectives.chat: there is no class 'crit'; the nearest valid one is"),
        ({"objectives": {"chat": 1}}, ".objectives.chat: expected `str`, got `int`"),
        ({"rules": {"priority_class": "critical"}}, ".rules: must be a list"),
        ({"rules": [{"models": ["m"]}]}, ".rules[0].priority_class: is missing"),
        ({"rules": [{"priority_class": "critical"}]}, ".rules[0]: matches every request; give a condition, or set"),
        (rule(priority_class="crit"), ".rules[0].priority_class: there is no class 'crit'"),
        (rule(header={}), ".rules[0].header: unknown field; the nearest valid one is 'headers'"),
        (rule(models="m"), ".rules[0].models: expected `array`, got `str`"),
        (rule(path_prefix="v1"), ".rules[0].path_prefix: must start with '/' and have no '?', not 'v1'"),
        (rule(path_prefix="/v1?x"), ".rules[0].path_prefix: must start with '/' and have no '?'"),
        (rule(headers={":path": "/"}), ".rules[0].headers.:path: ':path' cannot be used here: use `path_prefix`"),
        (rule(headers={"": "*"}), ".rules[0]: a header or claim without name"),
        (rule(claims={"c": True}), ".rules[0].claims.c: expected `str`, got `bool`"),
        ({"tenant_header": "X-Request-Id"}, ".tenant_header: 'x-request-id' cannot be used here"),
        (step(leave=2), ".classes.sheddable.degrade[0].leave: must be below enter (2), not 2"),
        (step(leave=0), ".classes.sheddable.degrade[0].leave: must be above 0"),
        (step(step="stop"), ".classes.sheddable.degrade[0].step: must be one of cap-output, limit-prompt"),
        (step(step="cap-output"), ".classes.sheddable.degrade[0].tokens: cap-output needs a number above 0"),
        (step(tokens=5), ".classes.sheddable.degrade[0].tokens: reject has no tokens"),
        (step(step="smaller-model"), ".classes.sheddable.degrade[0].model: smaller-model needs a model"),
        (step(model="m"), ".classes.sheddable.degrade[0].model: reject has no model"),
        (
            {"classes": {"critical": {"degrade": [{"step": "reject", "enter": 2, "leave": 1}]}}},
            ".classes.critical.degrade[0].step: only sheddable classes may be refused",
        ),
        (
            {"classes": {"critical": {"degrade": [{"step": "reject"}]}}},
            ".classes.critical.degrade[0].enter: is missing",
        ),
        ({"quotas": [{"tenant": "a"}]}, ".quotas[0]: limits nothing"),
        ({"quotas": [{"requests_per_minute": -1}]}, ".quotas[0].requests_per_minute: must be a number >= 0"),
        ({"quotas": [{"requests_per_minute": 1, "burst_seconds": 0}]}, ".quotas[0].burst_seconds: must be above 0"),
        (
            {"quotas": [{"requests_per_minut": 1}]},
            ".quotas[0].requests_per_minut: unknown field; the nearest valid one",
        ),
        (
            {"quotas": [{"requests_per_minute": 9}, {"tenant": "a", "requests_per_minute": 1}]},
            ".quotas[1]: never counts: policy.priorities.quotas[0] comes first",
        ),
        ({"overload": {"kv_usage": 2}}, ".overload.kv_usage: must be between 0 and 1"),
        ({"overload": {"enabled": "yes"}}, ".overload.enabled: expected `bool`, got `str`"),
        (
            {"overload": {"most_retry_seconds": 0.5}},
            ".overload.least_retry_seconds: must not be above most_retry_seconds",
        ),
        ({"trust_objective": 1}, ".trust_objective: expected `bool`, got `int`"),
        (
            {"rules": [{"priority_class": "critical", "headers": {"x tier": "gold"}}]},
            ".rules[0].headers.x tier: 'x tier' is no header's name",
        ),
        ({"tenant_header": "x-tenant:"}, ".tenant_header: 'x-tenant:' is no header's name"),
        (
            {"rules": [{"priority_class": "critical", "models": ["a", "*"]}]},
            ".rules[0].models: names models; leave it out for all of them",
        ),
    ],
)
def test_a_mistake_is_named_with_its_path(document: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        priorities(document)
    assert str(error.value).startswith(f"policy.priorities{message}")


def test_quotas_that_do_not_cover_each_other_all_count() -> None:
    quotas = [
        {"tenant": "a", "model": "m", "requests_per_minute": 1},
        {"tenant": "a", "requests_per_minute": 2},
        {"model": "m", "requests_per_minute": 3},
        {"requests_per_minute": 4},
    ]
    assert len(priorities({"quotas": quotas}).quotas) == 4


def test_what_rules_cannot_match_is_what_the_picker_takes_for_itself() -> None:
    message = ProcessingRequest()
    wanted = ext_proc.FURTHER_HEADERS | {*OWN_HEADERS, ":authority"}
    for name in sorted(wanted):
        message.request_headers.headers.headers.add(key=name, raw_value=b"x")
    assert set(ext_proc.request_facts(read_headers(message, further=wanted)).headers) == wanted - set(OWN_HEADERS)


FIELDS = sorted(
    {
        field
        for kind in (PriorityPolicy, PriorityClass, ClassRule, DegradationStep, Quota, OverloadPolicy)
        for field in kind.__dataclass_fields__
    }
    | set(DEFAULT_CLASSES)
)
NUMBERS = [0, 1, -1, 2**40, 10**400, 0.5, 1e308, float("nan"), float("inf")]
VALUES = st.sampled_from([None, True, *NUMBERS, "", "*", "critical", "hours", "/v1", *StepKind, *Order])
DOCUMENTS = st.recursive(
    VALUES,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3),
    max_leaves=10,
)


@given(document=st.dictionaries(st.sampled_from(sorted(PriorityPolicy.__dataclass_fields__)), DOCUMENTS, max_size=3))
def test_any_document_is_a_policy_or_a_mistake_with_its_path(document: dict[str, Any]) -> None:
    try:
        found = priorities(document)
    except ConfigError as error:
        assert str(error).startswith("policy.priorities")
    else:
        assert found.default_class in found.classes


@pytest.mark.parametrize(
    "limit",
    ["requests_per_minute", "prompt_tokens_per_minute", "generated_tokens_per_minute", "concurrent_requests"],
)
def test_a_quota_may_allow_nothing(limit: str) -> None:
    (quota,) = priorities({"quotas": [{limit: 0}]}).quotas
    assert getattr(quota, limit) == 0


PAGE = Path(__file__).parents[3] / "docs" / "guides" / "priorities.md"


def test_the_page_s_first_example_is_the_default_and_names_every_field() -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    given = yaml.safe_load(example)["policy"]["priorities"]
    assert priorities(given) == PriorityPolicy()
    assert set(given) == set(PriorityPolicy.__dataclass_fields__)
    assert set(given["overload"]) == set(OverloadPolicy.__dataclass_fields__)
    assert set(given["classes"]) == set(DEFAULT_CLASSES)
    assert set(given["classes"]["standard"]) == set(PriorityClass.__dataclass_fields__)


def test_the_page_s_other_examples_can_be_read_and_name_every_field_of_their_lists() -> None:
    examples = [part.partition("```")[0] for part in PAGE.read_text(encoding="utf-8").split("```yaml\n")[2:]]
    read = [yaml.safe_load(example)["policy"] for example in examples]
    assert all(parse_policy(document) for document in read)
    for name, kind in (("rules", ClassRule), ("quotas", Quota)):
        items = [item for document in read for item in document["priorities"].get(name, ())]
        assert {field for item in items for field in item} == set(kind.__dataclass_fields__)


def test_no_class_may_fill_endpoints_further_than_one_above_it() -> None:
    read = priorities({"classes": {"batch": {"priority": -50, "sheddable": True}, "vip": {"priority": 200}}})
    ceilings = {name: item.ceiling for name, item in read.classes.items()}
    assert ceilings == {"vip": 1.0, "critical": 1.0, "standard": 0.8, "batch": 0.8, "sheddable": 0.6}
