"""What the API server for tests does with a definition: it refuses one without names, and asks its rules."""

import copy
from typing import Any

import pytest

from tests.kube_api.cel_rules import check_rules
from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.definitions import accept_definition
from tests.kube_api.errors import ApiError, Document
from tests.kube_api.schemas import admit

TEXT: Document = {"type": "string"}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"group": ""}, "spec.group"),
        ({"scope": "Everywhere"}, "spec.scope"),
        ({"versions": []}, "spec.versions"),
        ({"names": {"kind": "Widget", "plural": "things"}}, "metadata.name"),
    ],
)
def test_a_definition_without_its_names_is_refused(change: Document, field: str) -> None:
    definition = copy.deepcopy(DEFINITION)
    definition["spec"] |= change
    with pytest.raises(ApiError) as refused:
        accept_definition(definition, "2026-01-01T00:00:00Z")
    assert refused.value.code == 422
    assert field in [cause["field"] for cause in (refused.value.details or {})["causes"]]


def asked(rule: str, schema: Document, value: Any, *old: Any, **more: Any) -> list[str]:
    """The messages of one rule over a value."""
    ruled = {**schema, "x-kubernetes-validations": [{"rule": rule, "message": "no", **more}]}
    return [cause[2] for cause in check_rules(ruled, value, *old, root=False)]


def test_rules_see_numbers_as_the_schema_declares_them() -> None:
    assert asked("self / 2.0 == 0.5", {"type": "number"}, 1) == []
    assert asked("self / 2 == 0", {"type": "integer"}, 1) == []


def test_a_rule_that_runs_into_an_error_refuses() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    assert "evaluating rule: no" in asked("self.a == 'x'", schema, {})[0]


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
