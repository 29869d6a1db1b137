"""docs/guides/models.md shows a document that can be used, and explains every finding of the comparison."""

import re
from pathlib import Path

import yaml

from extproc.answers.realised import REMEDIES
from extproc.policy.inference_policy import read_policy_file
from extproc.policy.merged_policy import pick_policy

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "models.md").read_text()


def test_the_example_is_a_document_that_says_what_is_written_around_it() -> None:
    example = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None

    _, table = pick_policy(read_policy_file(yaml.safe_load(example[1])))

    assert [model.name for model in table.served] == ["org/llama-8b", "org/vision", "org/small"]
    assert [(rule.model, len(rule.targets), rule.sticky_header) for rule in table.rules] == [
        ("gpt-x", 1, None),
        ("chat", 2, "x-tenant"),
    ]


def test_every_finding_has_its_row() -> None:
    rows = [line.split("`")[1] for line in PAGE.splitlines() if line.startswith("| `") and "kvmesh_" not in line]

    assert [row for row in rows if row in REMEDIES] == list(REMEDIES)
