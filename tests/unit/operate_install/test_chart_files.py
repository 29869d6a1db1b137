"""The made files of the Helm chart are those that the renderer makes; and how renderings become a template."""

import inspect
import random
from dataclasses import fields
from pathlib import Path

import pytest

from operate.install import commands
from operate.install.plan import InstallPlan
from tools.chart_tree import FEWEST_SAMPLES, Fields, If, Leaf, Sample, Words, Writer, build, items
from tools.chart_values import NOT_VALUES
from tools.helm_chart import chart_files, draw_plan

CHART = Path(__file__).parents[3] / "charts/kvmesh"
BY_HAND = {"_plan.tpl", "checks.yaml", "admin-token.yaml", "NOTES.txt"}
WORDS = Words(
    conditions=("a", "b"),
    loop_of=lambda part, inside: "$x := $.xs" if "x" in str(part) and "$x" not in inside else None,
    variables=lambda part: frozenset({"$x"} if "x" in str(part) else ()),
    bound=lambda _loop: frozenset({"$x"}),
)


def test_the_files_are_those_that_the_renderer_makes() -> None:
    """If this fails: python -m tools.helm_chart charts/kvmesh."""
    files = chart_files()
    stale = [name for name, text in files.items() if (CHART / name).read_text(encoding="utf-8") != text]
    assert stale == []
    templates = {path.name for path in (CHART / "templates").iterdir()}
    assert templates == BY_HAND | {name.partition("/")[2] for name in files if name.startswith("templates/")}


def test_what_is_said_to_be_no_value_is_a_flag() -> None:
    parameters = inspect.signature(commands.install).parameters
    assert set(NOT_VALUES) - set(parameters) <= {"context"}


def test_templates_know_every_part_of_a_plan() -> None:
    """If this fails: draw the new field in tools/helm_chart.py, or say here that only code sets it."""
    default = InstallPlan()
    plans = [draw_plan(random.Random(seed))[0] for seed in range(100)]
    names = [each.name for each in fields(InstallPlan)]
    never = {name for name in names if all(getattr(each, name) == getattr(default, name) for each in plans)}
    assert never == {"log_level"}


def test_what_differs_gets_a_condition() -> None:
    samples = [
        Sample(frozenset(name for name, holds in (("a", a), ("b", b)) if holds), {"n": 1, **({"m": b} if a else {})})
        for a in (True, False)
        for b in (True, False)
        for _ in range(FEWEST_SAMPLES)
    ]
    node = build(samples, WORDS)
    assert isinstance(node, Fields)
    assert node.nodes["n"] == Leaf(1)
    assert isinstance(node.nodes["m"], If)
    assert (node.nodes["m"].condition, node.nodes["m"].then) == ("a", If("b", Leaf(True), Leaf(False)))


def test_what_no_condition_explains_is_refused() -> None:
    with pytest.raises(ValueError, match="no condition"):
        build([Sample(frozenset(), 1), Sample(frozenset(), 2)], WORDS)


def test_an_element_that_stands_for_several_repeats() -> None:
    listed = items([Sample(frozenset(), [{"kind": "A", "metadata": {"name": "x"}, "spec": {"of": ["x", "y"]}}])], WORDS)
    writer = Writer(scalar=str, whole=lambda _nodes: None)
    writer.documents(listed)
    assert writer.lines == [
        "{{- range $x := $.xs }}",
        "---",
        "kind: A",
        "metadata:",
        "  name: x",
        "spec:",
        "  of:",
        "    - x",
        "    - y",
        "{{- end }}",
    ]
