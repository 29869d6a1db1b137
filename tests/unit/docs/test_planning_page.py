"""docs/guides/planning.md: its policy is read, its commands are commands, and it explains every state."""

import shlex
from pathlib import Path

import yaml
from typer.testing import CliRunner

from extproc.local.plan_commands import app
from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.policy.warnings import warnings
from extproc.scaling.acting import ActState
from extproc.scaling.day_profile import SLOTS

REPOSITORY = Path(__file__).parents[3]
TEXT = (REPOSITORY / "docs" / "guides" / "planning.md").read_text(encoding="utf-8")


def test_the_policy_is_read_and_nothing_of_it_is_doubtful() -> None:
    document = parse_inference_policy(yaml.safe_load(TEXT.partition("```yaml\n")[2].partition("```")[0]))
    policy, _ = pick_policy(document.fields)
    assert policy.autoscale.both is not None
    assert [each.name for each in policy.autoscale.both.variants] == ["h100", "l40s"]
    assert not warnings(document)


def test_the_traces_command_needs_no_picker() -> None:
    command = TEXT.partition("$ kvmesh ")[2].partition("```")[0].replace("\\\n", " ")
    arguments = [str(REPOSITORY / each) if each.startswith("bench/") else each for each in shlex.split(command)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "both/l40s" in done.output


def test_every_state_is_explained_and_no_other() -> None:
    rows = [row.split("|")[1] for row in TEXT.splitlines() if row.startswith("| `")]
    assert sorted(state.strip(" `") for row in rows for state in row.split(",")) == sorted(ActState)


def test_the_profile_has_as_many_slots_as_it_says() -> None:
    assert f"{SLOTS} slots" in TEXT
