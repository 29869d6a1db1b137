"""docs/guides/planning.md: its policy is read."""

from pathlib import Path

import yaml

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.reach.warnings import warnings

TEXT = (Path(__file__).parents[3] / "docs" / "guides" / "planning.md").read_text(encoding="utf-8")


def test_the_policy_is_read_and_nothing_of_it_is_doubtful() -> None:
    document = parse_inference_policy(yaml.safe_load(TEXT.partition("```yaml\n")[2].partition("```")[0]))
    policy, _ = pick_policy(document.fields)
    assert policy.autoscale.both is not None
    assert [each.name for each in policy.autoscale.both.variants] == ["h100", "l40s"]
    assert not warnings(document)
