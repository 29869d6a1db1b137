"""Class and tenant of a request: the policy decides, and a client cannot promote itself."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admission.classify import (
    asked_model,
    charged_model,
    claims_named,
    classify,
    headers_named,
    policy_needs_bodies,
)
from extproc.ext_proc.answers import CLAIM_SEPARATOR
from extproc.ext_proc.exchange import RequestFacts
from extproc.models.models import ModelRule, ModelTable, ModelTarget, ServedModel, resolve
from extproc.policy.priority import DEFAULT_CLASSES, ClassRule, DegradationStep, PriorityClass, Quota, StepKind
from extproc.policy.request_class import IgnoredObjective, PriorityPolicy, RequestClass

CLASSES = {
    **DEFAULT_CLASSES,
    "low-and-kept": PriorityClass(priority=-200),
    "high-and-sheddable": PriorityClass(priority=50, sheddable=True),
}


def facts(**values: Any) -> RequestFacts:
    return RequestFacts(
        **({"method": "POST", "path": "/v1/completions", "objective": None, "request_id": "r"} | values)
    )


def request_class(policy: PriorityPolicy, *, model: str | None = "m", **values: Any) -> RequestClass:
    return classify(facts(**values), model=model, policy=policy)


def policy(**values: Any) -> PriorityPolicy:
    return PriorityPolicy(**({"classes": CLASSES} | values))


def test_a_request_that_says_nothing_is_of_the_default_class_and_of_no_tenant() -> None:
    assert request_class(PriorityPolicy()) == RequestClass(
        class_name="standard", priority_class=DEFAULT_CLASSES["standard"], tenant="", why="default"
    )


def test_an_objective_lowers_a_request_by_its_own_name_or_by_the_policy_s() -> None:
    named = policy(objectives={"nightly": "sheddable"})
    found = [request_class(named, objective=name) for name in ("sheddable", "nightly")]
    assert [(one.class_name, one.why, one.ignored_objective) for one in found] == [("sheddable", "objective", "")] * 2


def test_an_objective_raises_a_request_only_where_the_header_is_trusted() -> None:
    doubted, trusted = (request_class(policy(trust_objective=trust), objective="critical") for trust in (False, True))
    assert (doubted.class_name, doubted.ignored_objective) == ("standard", IgnoredObjective.UNTRUSTED)
    assert (trusted.class_name, trusted.ignored_objective) == ("critical", IgnoredObjective.NO)


def test_a_rule_may_trust_the_header_of_its_requests_or_not() -> None:
    rules = (
        ClassRule(priority_class="standard", path_prefix="/internal", trust_objective=True),
        ClassRule(priority_class="sheddable", path_prefix="/free", trust_objective=False),
    )
    inside = request_class(policy(rules=rules), path="/internal/x", objective="critical")
    free = request_class(policy(rules=rules, trust_objective=True), path="/free", objective="critical")
    other = request_class(policy(rules=rules, trust_objective=True), objective="critical")
    assert [one.class_name for one in (inside, free, other)] == ["critical", "sheddable", "critical"]


def test_a_request_that_may_be_refused_cannot_name_a_class_that_is_kept_however_low() -> None:
    rules = (ClassRule(priority_class="sheddable", models=("m",)),)
    found = request_class(policy(rules=rules), objective="low-and-kept")
    assert (found.class_name, found.ignored_objective) == ("sheddable", IgnoredObjective.UNTRUSTED)
    assert request_class(policy(), objective="low-and-kept").class_name == "low-and-kept"


@pytest.mark.parametrize("objective", ["", "no-such", "CRITICAL", "x" * 5000])
def test_an_objective_that_the_policy_does_not_know_counts_for_nothing(objective: str) -> None:
    found = request_class(policy(trust_objective=True), objective=objective)
    expected = IgnoredObjective.UNKNOWN if objective else IgnoredObjective.NO
    assert (found.class_name, found.why, found.ignored_objective) == ("standard", "default", expected)


@pytest.mark.parametrize(
    ("rule", "matching", "others"),
    [
        ({"models": ("a", "b")}, [{"model": "b"}], [{"model": "c"}, {"model": None}]),
        (
            {"path_prefix": "/v1/chat"},
            [{"path": "/v1/chat/completions?x=1"}],
            [{"path": "/v1"}, {"path": "/?/v1/chat"}],
        ),
        ({"headers": {"x-tier": "gold"}}, [{"headers": {"x-tier": "gold"}}], [{"headers": {"x-tier": "Gold"}}, {}]),
        ({"headers": {"x-tier": "*"}}, [{"headers": {"x-tier": ""}}], [{"headers": {"x-tyre": "x"}}]),
        ({"claims": {"tier": "gold"}}, [{"claims": {"tier": "gold"}}], [{"claims": {"tier": "golden"}}, {}]),
        ({"claims": {"groups": "b"}}, [{"claims": {"groups": "a\nb"}}], [{"claims": {"groups": "a b"}}]),
        ({"claims": {"sub": "*"}}, [{"claims": {"sub": "me"}}], [{"claims": {"tier": "x"}}]),
        (
            {"headers": {"x": "1"}, "claims": {"c": "2"}, "models": ("m",), "path_prefix": "/v1"},
            [{"headers": {"x": "1"}, "claims": {"c": "2"}}],
            [{"headers": {"x": "1"}}, {"claims": {"c": "2"}}],
        ),
    ],
)
def test_a_rule_matches_when_all_its_conditions_hold(
    rule: dict[str, Any], matching: list[dict[str, Any]], others: list[dict[str, Any]]
) -> None:
    of_rules = policy(rules=(ClassRule(priority_class="critical", **rule),))
    assert [request_class(of_rules, **values).why for values in matching] == ["rule 1"] * len(matching)
    assert [request_class(of_rules, **values).why for values in others] == ["default"] * len(others)


def test_the_first_rule_that_matches_counts_and_the_objective_is_measured_against_it() -> None:
    rules = (
        ClassRule(priority_class="high-and-sheddable", claims={"plan": "paid"}),
        ClassRule(priority_class="critical", claims={"plan": "*"}),
    )
    both = policy(rules=rules)
    paid, other = {"plan": "paid"}, {"plan": "other"}
    assert (request_class(both, claims=paid).class_name, request_class(both, claims=paid).why) == (
        "high-and-sheddable",
        "rule 1",
    )
    assert request_class(both, claims=other).why == "rule 2"
    assert request_class(both, claims=paid, objective="sheddable").class_name == "sheddable"
    assert request_class(both, claims=other, objective="standard").class_name == "standard"


SAID = {"x-gateway-inference-fairness-id": "said"}


def test_the_verified_claim_names_the_tenant_before_a_header_that_the_policy_names_does() -> None:
    both = policy(tenant_claim="org.id", tenant_header="x-gateway-inference-fairness-id")
    assert request_class(both, headers=SAID, claims={"org.id": "proven"}).tenant == "proven"
    assert request_class(both, headers=SAID).tenant == "said"
    assert request_class(both, headers=SAID, claims={"org.id": "a\nb"}).tenant == "said"


@pytest.mark.parametrize("claims", [{}, {"org.id": ""}, {"org.id": "a\nb"}])
def test_with_a_claim_for_it_nobody_becomes_a_tenant_by_a_header_that_the_policy_does_not_name(
    claims: dict[str, str],
) -> None:
    claimed = policy(tenant_claim="org.id")
    assert request_class(claimed, headers=SAID, claims=claims).tenant == ""
    assert headers_named(claimed) == frozenset()


def test_without_a_claim_for_it_the_usual_header_names_the_tenant_unless_there_is_to_be_none() -> None:
    assert request_class(policy(), headers=SAID).tenant == "said"
    assert request_class(policy(tenant_header=""), headers=SAID).tenant == ""


def test_a_tenant_s_name_is_cut_before_it_fills_tables() -> None:
    header = {"x-gateway-inference-fairness-id": "t" * 100_000}
    assert request_class(policy(), headers=header).tenant == "t" * 256


def test_the_policy_tells_which_headers_and_claims_it_reads() -> None:
    rules = (
        ClassRule(priority_class="critical", headers={"x-a": "1"}, claims={"c": "1"}),
        ClassRule(priority_class="standard", headers={"x-b": "*"}, claims={"d.e": "*"}),
    )
    assert headers_named(policy(rules=rules)) == {"x-a", "x-b", "x-gateway-inference-fairness-id"}
    assert claims_named(policy(rules=rules, tenant_claim="sub")) == {"c", "d.e", "sub"}
    assert headers_named(policy(tenant_header="")) == claims_named(policy()) == frozenset()


NAMES = st.sampled_from(sorted(CLASSES))
TEXTS = st.sampled_from(["", "1", "2", "*", f"1{CLAIM_SEPARATOR}2"])
RULES = st.builds(
    ClassRule,
    priority_class=NAMES,
    headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), TEXTS, max_size=2),
    claims=st.dictionaries(st.sampled_from(["c", "d"]), TEXTS, max_size=2),
    models=st.lists(st.sampled_from(["m", "n"]), max_size=1).map(tuple),
)


@given(
    rules=st.lists(RULES, max_size=4).map(tuple),
    default=NAMES,
    objective=st.one_of(st.none(), NAMES, TEXTS),
    headers=st.dictionaries(st.sampled_from(["x-a", "x-b"]), TEXTS),
    claims=st.dictionaries(st.sampled_from(["c", "d"]), TEXTS),
)
def test_no_header_gains_a_request_anything_where_it_is_not_trusted(
    rules: tuple[ClassRule, ...],
    default: str,
    objective: str | None,
    headers: dict[str, str],
    claims: dict[str, str],
) -> None:
    one = policy(rules=rules, default_class=default)
    without = request_class(one, headers=headers, claims=claims).priority_class
    found = request_class(one, headers=headers, claims=claims, objective=objective)
    assert found.priority_class is CLASSES[found.class_name]
    assert found.priority_class.priority <= without.priority
    assert found.priority_class.sheddable >= without.sheddable


BASE = ServedModel(name="base", aliases=frozenset({"second"}), adapters=frozenset({"lora"}))
MODEL_RULES = (
    ModelRule(model="gpt", targets=(ModelTarget(model="second"),)),
    ModelRule(model="tuned", targets=(ModelTarget(model="lora"),)),
)
TABLE = ModelTable(served=(BASE,), rules=MODEL_RULES)
CAP = DegradationStep(step=StepKind.CAP_OUTPUT, enter=1.0, leave=0.5, tokens=9)


def charged(name: str | None, *models: str, table: ModelTable = TABLE) -> str | None:
    quotas = [Quota(tenant="other", model="gpt", requests_per_minute=1)]
    quotas += [Quota(model=model, requests_per_minute=1) for model in models]
    resolved = resolve(name, table=table, user=None, headers={}, draw=0.0)
    return charged_model(quotas, tenant="t", resolved=resolved)


@pytest.mark.parametrize("quota", ["*", "base", "unrelated"])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, "base") for name in ("base", "second", "gpt", None)),
        *((name, "lora") for name in ("lora", "tuned")),
        ("unknown", "unknown"),
    ],
)
def test_all_names_of_a_model_count_as_one_and_those_of_an_adapter_as_the_adapter(
    name: str | None, expected: str, quota: str
) -> None:
    assert charged(name, quota) == expected


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [(("gpt",), "gpt"), (("gpt", "base"), "gpt"), (("base", "gpt"), "base"), (("*", "gpt"), "base"), ((), "base")],
)
def test_a_quota_for_the_name_that_the_client_writes_counts_by_it_if_it_comes_first(
    quotas: tuple[str, ...], expected: str
) -> None:
    assert charged("gpt", *quotas) == expected


def test_without_a_name_it_is_the_only_served_model_that_is_asked_for() -> None:
    two = ModelTable(served=(BASE, ServedModel(name="b")))
    found = [asked_model(name, table) for table in (TABLE, two, ModelTable()) for name in (None, "x")]
    assert found == ["base", "x", None, "x", None, "x"]
    assert charged(None, "*", table=two) is None


@pytest.mark.parametrize(
    ("values", "table", "expected"),
    [
        ({}, ModelTable(served=(BASE,)), False),
        ({"rules": (ClassRule(priority_class="critical", path_prefix="/x"),)}, ModelTable(), False),
        ({"rules": (ClassRule(priority_class="critical", models=("m",)),)}, ModelTable(), True),
        ({"quotas": (Quota(requests_per_minute=1),)}, ModelTable(), True),
        ({"engine_priority": True}, ModelTable(), True),
        ({"classes": {"standard": PriorityClass(degrade=(CAP,))}}, ModelTable(), True),
        ({}, TABLE, True),
    ],
)
def test_bodies_are_needed_where_they_decide_what_a_request_may_have(
    values: dict[str, Any], table: ModelTable, expected: bool
) -> None:
    assert policy_needs_bodies(PriorityPolicy(**values), table) is expected


def test_a_claim_matches_by_a_whole_entry_and_not_by_a_part_of_one() -> None:
    rules = (ClassRule(priority_class="critical", claims={"groups": "ml"}),)
    found = [
        request_class(policy(rules=rules), claims={"groups": CLAIM_SEPARATOR.join(groups)}).class_name
        for groups in (["ml"], ["a", "ml"], ["mls"], ["a", "xml"])
    ]
    assert found == ["critical", "critical", "standard", "standard"]
