"""Rules and defaults of the API server for tests: what those of our own definitions rely on, and a little more."""

from typing import Any

import pytest

from tests.kube_api.cel_rules import check_rules
from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.errors import Document
from tests.kube_api.schemas import admit

TEXT: Document = {"type": "string"}


def asked(rule: str, schema: Document, value: Any, *old: Any, **more: Any) -> list[str]:
    """The messages of one rule over a value."""
    ruled = {**schema, "x-kubernetes-validations": [{"rule": rule, "message": "no", **more}]}
    return [cause[2] for cause in check_rules(ruled, value, *old, root=False)]


@pytest.mark.parametrize(
    ("rule", "value"),
    [
        ("self.lowerAscii() == 'abc' && self.substring(1) == 'bC' && self.indexOf('b') == 1", "abC"),
        ("self.split(',').join('-') == 'a-b' && self.replace(',', '') == 'ab'", "a,b"),
        ("isIP(self) && !isCIDR(self + 'x')", "10.0.0.1"),
        ("quantity(self).isGreaterThan(quantity('1Mi'))", "1Gi"),
        ("isURL(self) && url(self).getHost() == 'a.b:80'", "http://a.b:80/c"),
        ("self.find('[0-9]+') == '12' && self.matches('^a')", "a12"),
        ("duration(self) < duration('1h')", "90s"),
    ],
)
def test_rules_have_the_functions_of_kubernetes(rule: str, value: str) -> None:
    assert asked(rule, {"type": "string"}, value) == []


def test_rules_see_numbers_as_the_schema_declares_them() -> None:
    assert asked("self / 2.0 == 0.5", {"type": "number"}, 1) == []
    assert asked("self / 2 == 0", {"type": "integer"}, 1) == []


def test_a_rule_that_runs_into_an_error_refuses() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert "rule evaluation error" in asked("self.a == 'x'", schema, {})[0]


def test_a_rules_message_may_be_computed_and_point_at_a_field() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    rule = {"rule": "self.a < 3", "messageExpression": "'not ' + string(self.a)", "fieldPath": ".a"}
    causes = check_rules({**schema, "x-kubernetes-validations": [rule]}, {"a": 5}, path="spec", root=False)
    assert [tuple(cause) for cause in causes] == [("spec.a", "FieldValueInvalid", 'Invalid value: "object": not 5')]


def test_transition_rules_find_the_old_item_by_its_key() -> None:
    items = {
        "type": "object",
        "properties": {"name": TEXT, "port": {"type": "integer"}},
        "x-kubernetes-validations": [{"rule": "self.port == oldSelf.port", "message": "fixed"}],
    }
    listed = {"type": "array", "items": items, "x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
    old = [{"name": "a", "port": 1}, {"name": "b", "port": 2}]
    new = [{"name": "b", "port": 3}, {"name": "a", "port": 1}, {"name": "c", "port": 9}]
    assert [cause[0] for cause in check_rules(listed, new, old, "spec.parts", root=False)] == ["spec.parts[0]"]
    atomic = {**listed, "x-kubernetes-list-type": "atomic"}
    assert check_rules(atomic, new, old, root=False) == []


def test_defaults_come_into_items_and_nulls_that_may_not_be_go() -> None:
    schema = DEFINITION["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    admitted = admit(schema, widget("a", size=None, parts=[{"name": "x", "weight": None}]))
    assert (admitted.document["spec"], admitted.causes) == (
        {"size": 1, "mode": "Fast", "parts": [{"name": "x", "weight": 0.5}]},
        (),
    )
