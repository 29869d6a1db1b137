"""The CustomResourceDefinition: the file is what the code says, an API server takes it, everything is bounded."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.choosing.scorers import SCORERS
from extproc.models.models import StickyBy, TokensFrom
from extproc.pods.endpoint import Role
from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import StepKind
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.schema import ListOf, Number, Property, Record, kind_of
from extproc.policy.spec import Spec
from extproc.policy.targets import Tolerance
from extproc.policy.values import TIER_WEIGHTS, Strategy
from extproc.reach.status import TYPES
from tests.unit.extproc_policy.policy_documents import policy
from tools.policy_crd import document_text, policy_crd, policy_schema

FILE = Path(__file__).parents[3] / "manifests/crds/kvmesh.io_inferencepolicies.yaml"


def test_the_file_is_what_the_code_says() -> None:
    written = FILE.read_text(encoding="utf-8")
    assert written == document_text(), "python -m tools.policy_crd > manifests/crds/…"
    assert yaml.safe_load(written) == policy_crd()


def spec_of(*path: str) -> Any:
    at: Any = policy_schema()["properties"]["spec"]
    for part in path:
        at = at["items"] if part == "[]" else at["properties"][part]
    return at


def test_enums_are_the_words_of_the_code() -> None:
    assert spec_of("scoring", "strategy")["enum"] == list(Strategy)
    assert list(spec_of("scoring", "weights")["properties"]) == list(SCORERS)
    assert list(spec_of("prefixCache", "tierWeights")["properties"]) == list(TIER_WEIGHTS)
    assert list(spec_of("autoscale")["properties"]) == list(Role)
    a_class = ("priorities", "classes", "[]")
    assert spec_of(*a_class, "tolerance")["enum"] == list(Tolerance)
    assert spec_of(*a_class, "degrade", "[]", "step")["enum"] == list(StepKind)
    assert spec_of("models", "served", "[]", "tokens")["enum"] == list(TokensFrom)
    assert spec_of("models", "rules", "[]", "stickyBy")["enum"] == list(StickyBy)


def nodes(
    schema: dict[str, Any], path: str = "spec", *, in_list: bool = False
) -> Iterator[tuple[str, dict[str, Any], bool]]:
    yield path, schema, in_list
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}", in_list=in_list)
    if "items" in schema:
        merged = schema.get("x-kubernetes-list-type") == "map" and path.endswith(("classes", "objectives"))
        yield from nodes(schema["items"], f"{path}[]", in_list=not merged)


def test_columns_show_conditions_that_are_written() -> None:
    paths = [column["jsonPath"] for column in policy_crd()["spec"]["versions"][0]["additionalPrinterColumns"]]
    named = {found[1] for path in paths if (found := re.search(r'@.type=="(\w+)"', path))}
    assert named == set(TYPES)


def test_everything_has_a_bound_and_nothing_is_left_open() -> None:
    for path, schema, _ in nodes(policy_schema()["properties"]["spec"]):
        kind = schema["type"]
        assert kind != "string" or "maxLength" in schema, path
        assert kind != "array" or ("maxItems" in schema and "x-kubernetes-list-type" in schema), path
        assert kind not in ("number", "integer") or "enum" in schema or {"minimum", "maximum"} <= set(schema), path
        assert kind != "object" or "properties" in schema, path
        assert "additionalProperties" not in schema and "x-kubernetes-preserve-unknown-fields" not in schema, path


def test_no_default_hides_what_a_wider_policy_says() -> None:
    """Lists are replaced whole, but for classes and objectives; only inside the others may something be filled in."""
    found = list(nodes(policy_schema()["properties"]["spec"]))
    defaults = [path for path, schema, _ in found if "default" in schema]
    assert defaults == [path for path, schema, in_list in found if "default" in schema and in_list]
    assert "spec.quotas[].burstSeconds" in defaults


def test_rules_speak_to_people() -> None:
    for path, schema, _ in nodes(policy_schema()["properties"]["spec"]):
        for rule in schema.get("x-kubernetes-validations", ()):
            assert set(rule) == {"rule", "message"}, path
            assert rule["message"][:1].isprintable() and "\n" not in rule["message"] and "self." not in rule["message"]


def single_numbers(record: Record, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Number]]:
    for name, prop in record.properties.items():
        if isinstance(prop.kind, Record):
            yield from single_numbers(prop.kind, (*path, name))
        elif isinstance(prop.kind, Number):
            yield (*path, name), prop.kind
        elif isinstance(prop.kind, ListOf) and isinstance(prop.kind.item, Record) and prop.kind.as_mapping:
            yield from single_numbers(prop.kind.item, (*path, name))


NUMBERS = list(single_numbers(kind_of(Spec)))


@pytest.mark.parametrize(("path", "kind"), NUMBERS, ids=[".".join(path) for path, _ in NUMBERS])
def test_the_bounds_of_a_number_are_those_of_the_picker(path: tuple[str, ...], kind: Number) -> None:
    lowest = 1e-6 if kind.above else kind.least
    assert refusal(path, lowest) is None
    assert refusal(path, int(kind.most) if kind.whole else kind.most) is None
    assert (refusal(path, 0) is None) == (not kind.above and kind.least <= 0)


def refusal(path: tuple[str, ...], value: float | None) -> str | None:
    spec: Any = value
    for name in reversed(path):
        spec = {name: spec}
    if path[:2] == ("priorities", "classes"):
        spec = {"priorities": {"classes": [{"name": "sheddable"} | spec["priorities"]["classes"]]}}
    if path[:2] == ("scoring", "plugins"):
        spec = {"scoring": {"plugins": [{"name": "other"} | spec["scoring"]["plugins"]]}}
    try:
        pick_policy(parse_inference_policy(policy(spec)).fields)
    except PolicyDocumentError as error:
        # two fields that must fit each other: the other one has its usual value here
        return None if "must not be above" in str(error) or "must not be below" in str(error) else str(error)
    return None


def test_every_field_says_what_it_means() -> None:
    def described(record: Record) -> Iterator[tuple[str, Property]]:
        for name, prop in record.properties.items():
            yield name, prop
            inner = prop.kind.item if isinstance(prop.kind, ListOf) else prop.kind
            if isinstance(inner, Record):
                yield from described(inner)

    assert [name for name, prop in described(kind_of(Spec)) if len(prop.description) < 8] == []
