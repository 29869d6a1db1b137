"""What an earlier version promised is still there: flags, settings, metrics, alerts, headers, the resource's fields.

`python -m tools.record_version` records a version; gone.yaml has what went after a deprecation (CONTRIBUTING.md).
"""

import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvmesh import __version__
from tools.docs_site import REPOSITORY
from tools.public_surface import definition, surface

VERSIONS = REPOSITORY / "tests" / "data" / "versions"
RECORDED = sorted(path for path in VERSIONS.iterdir() if path.is_dir())
GONE = {each["name"]: each for each in yaml.safe_load((VERSIONS / "gone.yaml").read_text(encoding="utf-8"))}
NOW = surface()
Schema = dict[str, Any]
BOUNDS: dict[str, Callable[[Any, Any], bool]] = {  # whether a later one takes less
    **dict.fromkeys(("minimum", "minLength", "minItems"), operator.gt),
    **dict.fromkeys(("maximum", "maxLength", "maxItems", "maxProperties"), operator.lt),
    "pattern": operator.ne,
}


def then(version: Path) -> Any:
    return json.loads((version / "surface.json").read_text(encoding="utf-8"))


def still_there(recorded: set[str], present: set[str]) -> bool:
    return recorded - present - set(GONE) == set()


def minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_every_flag_is_still_accepted(version: Path) -> None:
    recorded = {f"{command} {flag}" for command, flags in then(version)["commands"].items() for flag in flags}
    assert still_there(recorded, {f"{command} {flag}" for command, flags in NOW["commands"].items() for flag in flags})


@pytest.mark.parametrize("kind", ["settings", "alerts", "headers"])
@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_every_name_is_still_known(version: Path, kind: str) -> None:
    assert still_there(set(then(version)[kind]), set(NOW[kind]))


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_every_metric_is_still_shown_as_the_same_kind_and_with_its_labels(version: Path) -> None:
    recorded = then(version)["metrics"]
    assert still_there(set(recorded), set(NOW["metrics"]))
    changed = {
        name
        for name, now in NOW["metrics"].items()
        if name in recorded
        and (recorded[name]["kind"] != now["kind"] or not set(recorded[name]["labels"]) <= set(now["labels"]))
    }
    assert changed == set()


@pytest.mark.parametrize("version", RECORDED, ids=lambda path: path.name)
def test_a_resource_that_was_valid_is_valid(version: Path) -> None:
    recorded = yaml.safe_load((version / "definition.yaml").read_text(encoding="utf-8"))
    present = {each["name"]: each for each in definition()["spec"]["versions"]}
    for each in recorded["spec"]["versions"]:
        assert each["served"] <= present[each["name"]]["served"]
        before, after = (one["schema"]["openAPIV3Schema"] for one in (each, present[each["name"]]))
        assert [reason for reason in narrowed(before, after) if reason.partition(":")[0] not in GONE] == []


def narrowed(before: Schema, after: Schema, path: str = "") -> Iterator[str]:
    """Return where a schema takes less than before; rules in CEL are tried with resources, in tests/integration."""
    if after.get("x-kubernetes-preserve-unknown-fields"):
        return
    yield from (f"{path}: {reason}" for reason in narrowed_value(before, after))
    for name, inner in before.get("properties", {}).items():
        where = f"{path}.{name}" if path else name
        if name in after.get("properties", {}):
            yield from narrowed(inner, after["properties"][name], where)
        else:
            yield f"{where}: is gone"
    for key in ("items", "additionalProperties"):
        if isinstance(before.get(key), dict) and isinstance(after.get(key), dict):
            yield from narrowed(before[key], after[key], f"{path}[]")


def narrowed_value(before: Schema, after: Schema) -> Iterator[str]:
    """Return what a schema no longer takes, what is inside it apart."""
    if before.get("type") != after.get("type"):
        yield f"is {after.get('type')}, was {before.get('type')}"
    if required := set(after.get("required", ())) - set(before.get("required", ())):
        yield f"requires {sorted(required)} now"
    if "enum" in after and "enum" not in before:
        yield f"takes {after['enum']} alone now"
    elif "enum" in after and (lost := {*map(str, before["enum"])} - {*map(str, after["enum"])}):
        yield f"no longer takes {sorted(lost)}"
    for bound, is_tighter in BOUNDS.items():
        if bound in after and (bound not in before or is_tighter(after[bound], before[bound])):
            yield f"{bound} is {after[bound]}, was {before.get(bound)}"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"type": "integer"}, "is integer, was string"),
        ({"enum": ["a"]}, "no longer takes ['b']"),
        ({"maxLength": 3}, "maxLength is 3, was 5"),
        ({"pattern": "a+"}, "pattern is a+, was None"),
    ],
)
def test_a_narrower_schema_is_noticed(change: Schema, reason: str) -> None:
    field = {"type": "string", "enum": ["a", "b"], "maxLength": 5}
    before = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"name": field}}}}
    after = {"type": "object", "properties": {"spec": {"type": "object", "properties": {"name": field | change}}}}
    assert list(narrowed(before, after)) == [f"spec.name: {reason}"]
    assert list(narrowed(before, before)) == []
    assert list(narrowed(before, {"type": "object", "required": ["spec"]})) == [
        ": requires ['spec'] now",
        "spec: is gone",
    ]


def test_what_is_gone_was_deprecated_for_a_minor_version_and_the_changelog_says_so() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    for name, each in GONE.items():
        assert minor(each["deprecated"]) < minor(each["gone"]) <= minor(__version__), name
        assert name.split()[-1] in changes, name


def test_a_version_is_recorded() -> None:
    assert RECORDED
    assert all(minor(path.name) <= minor(__version__) for path in RECORDED)
