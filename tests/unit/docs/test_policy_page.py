"""docs/reference/policy.md shows the default policy, with every field."""

from pathlib import Path

import yaml

from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.schema import Record, kind_of
from extproc.policy.spec import Spec
from extproc.policy.values import PickPolicy

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "policy.md"


def test_the_page_explains_every_field_and_its_example_is_the_default() -> None:
    example = yaml.safe_load(PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0])
    assert pick_policy(read_policy_file(example))[0] == PickPolicy()
    sections = kind_of(Spec).properties
    assert set(example["spec"]) == set(sections) - {"targetRefs", "hosts"}
    for path in (("prefixCache",), ("load",), ("load", "health")):
        kind, shown = Record(properties=sections), example["spec"]
        for name in path:
            inner = kind.properties[name].kind
            assert isinstance(inner, Record)
            kind, shown = inner, shown[name]
        assert set(shown) == set(kind.properties)
