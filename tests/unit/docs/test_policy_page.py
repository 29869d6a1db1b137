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
    for section, further in (("scoring", "scales"), ("prefixCache", "hotspot"), ("load", "health")):
        kind = sections[section].kind
        assert isinstance(kind, Record)
        inner = kind.properties[further].kind
        assert isinstance(inner, Record)
        assert set(example["spec"][section]) == set(kind.properties)
        assert set(example["spec"][section][further]) == set(inner.properties)
