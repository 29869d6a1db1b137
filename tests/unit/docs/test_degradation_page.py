"""docs/guides/degradation.md explains every step, and its example is a policy that the picker takes."""

from pathlib import Path

import yaml

from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import StepKind

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "degradation.md"


def test_the_table_has_every_step_and_nothing_else() -> None:
    rows = PAGE.read_text(encoding="utf-8").partition("## The steps")[2].partition("###")[0].splitlines()
    steps = [row.split("`")[1] for row in rows if row.startswith("| `")]
    assert sorted(steps) == sorted(StepKind)


def test_the_example_is_read_and_shows_every_step() -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    policy, _ = pick_policy(read_policy_file(yaml.safe_load(example)))
    steps = policy.priorities.classes["sheddable"].degrade
    assert {step.step for step in steps} == set(StepKind)
