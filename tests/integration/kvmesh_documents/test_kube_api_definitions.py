"""Definitions that the API server refuses, as a real one would, and our own, which it takes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube_api.cel_rules import check_rules
from tests.kube_api.contract_crd import DEFINITION, widget
from tests.kube_api.definitions import definition_causes
from tests.kube_api.errors import Document
from tests.kube_api.schemas import admit

ROOT = Path(__file__).parents[3]
SCHEMA = "spec.versions[0].schema.openAPIV3Schema"


def definitions() -> list[Path]:
    found = [*(ROOT / "manifests/crds").glob("*.yaml"), *(ROOT / "tests/data/crds").glob("*.yaml")]
    return sorted(path for path in found if path.name != "kustomization.yaml")


def changed(spec: Document) -> Document:
    """The contract's definition with this schema for `spec`."""
    definition = copy.deepcopy(DEFINITION)
    definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"] = spec
    return definition


@pytest.mark.parametrize("path", definitions(), ids=lambda path: path.stem)
def test_every_definition_that_we_ship_or_test_with_is_structural(path: Path) -> None:
    read = [one for one in yaml.safe_load_all(path.read_text()) if one]
    wrong = [tuple(cause) for one in read for cause in definition_causes(one)]
    assert (bool(read), wrong) == (True, [])


TEXT: Document = {"type": "string"}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"properties": {}}, "properties[spec].type"),
        ({"type": "array"}, "properties[spec].items"),
        ({"type": "object", "properties": {"a": {}}}, "properties[spec].properties[a].type"),
        (
            {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
            "properties[spec].additionalProperties",
        ),
        ({"type": "object", "properties": {"a": {**TEXT, "default": 1}}}, "properties[spec].properties[a].default"),
        ({"type": "object", "default": {"b": 1}}, "properties[spec].default"),
        (
            {"type": "object", "properties": {"a": {**TEXT, "pattern": "^(?=x)"}}},
            "properties[spec].properties[a].pattern",
        ),
        (
            {"type": "array", "items": TEXT, "x-kubernetes-list-type": "map"},
            "properties[spec].x-kubernetes-list-map-keys",
        ),
        ({"type": "object", "$ref": "#/x"}, "properties[spec].$ref"),
    ],
)
def test_a_schema_that_is_not_structural_is_refused_at_its_place(spec: Document, field: str) -> None:
    assert f"{SCHEMA}.{field}" in [cause[0] for cause in definition_causes(changed(spec))]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("self.a ==", "compilation failed"),
        ("self.b == 'x'", "undefined field 'b'"),
        ("self.number == 1", "found no matching overload for '_==_' applied to '(double, int)'"),
        ("self.namespace == 'x'", ""),
        ("self.number + 1 > 2.0", "found no matching overload for '_+_' applied to '(double, int)'"),
        ("self.a && true", "found no matching overload for '_&&_' applied to '(string, bool)'"),
        ("self.a == 1", "found no matching overload for '_==_' applied to '(string, int)'"),
        ("self.parts.all(part, part.weight > 0)", "undefined field 'weight'"),
        ("self.parts.all(part, part.name)", "expected type 'bool' but found 'string'"),
        ("self.a.all(x, x == 'y')", "expression of type 'string' cannot be range of a comprehension"),
        ("self.a == other", "undeclared reference to 'other'"),
        ("self.free.all(one, self.free.exists(two, one == two))", "estimated rule cost exceeds budget by factor of"),
    ],
)
def test_a_rule_that_the_server_cannot_compile_is_refused(rule: str, words: str) -> None:
    part = {"type": "object", "properties": {"name": TEXT}}
    properties = {
        "a": TEXT,
        "number": {"type": "number"},
        "namespace": TEXT,
        "parts": {"type": "array", "maxItems": 8, "items": part},
        "free": {"type": "array", "items": TEXT},
    }
    spec = {"type": "object", "properties": properties, "x-kubernetes-validations": [{"rule": rule}]}
    causes = list(definition_causes(changed(spec)))
    assert [cause[0] for cause in causes] == [f"{SCHEMA}.properties[spec].x-kubernetes-validations[0].rule"]
    assert words in causes[0][2]


@pytest.mark.parametrize(
    "rule",
    [
        "self.number > 1 && self.number == 1.0 && -self.number < 2",
        "self.parts.map(part, part.name).exists(name, name in ['x', \"y\"])",
        "self.__namespace__.size() > 0 ? has(self.a) : !has(self.parts)",
        "self.parts.filter(part, has(part.name) && part.name != '')[0].name.startsWith('a')",
        "{'x': 1}['x'] == 1 && size(self.a) % 2 == 0 && self.a + 'x' != self.__namespace__",
    ],
)
def test_a_rule_that_the_server_can_compile_is_taken(rule: str) -> None:
    part = {"type": "object", "properties": {"name": TEXT}}
    parts = {"type": "array", "maxItems": 8, "items": part}
    properties = {"a": TEXT, "number": {"type": "number"}, "namespace": TEXT, "parts": parts}
    spec = {"type": "object", "properties": properties, "x-kubernetes-validations": [{"rule": rule, "message": "no"}]}
    assert [tuple(cause) for cause in definition_causes(changed(spec))] == []


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
    assert field in [cause[0] for cause in definition_causes(definition)]


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
