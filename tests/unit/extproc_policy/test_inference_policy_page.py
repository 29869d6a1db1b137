"""docs/reference/inference-policy.md says what is true."""

import re
from pathlib import Path

import yaml

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.reach.warnings import merged_warnings, warnings
from tests.kube_api.schemas import admit
from tools.policy_crd import policy_schema
from tools.policy_table import field_tables

PAGE = (Path(__file__).parents[3] / "docs/reference/inference-policy.md").read_text(encoding="utf-8")


def test_the_field_tables_are_those_of_the_code() -> None:
    assert PAGE.partition("<!-- fields: python -m tools.policy_table -->\n")[2] == field_tables()


def test_the_example_is_a_policy_without_a_doubt() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    document = yaml.safe_load(text)
    admission = admit(policy_schema(), document)
    assert (admission.unknown, admission.causes) == ((), ())
    found = parse_inference_policy(document)
    assert warnings(found) == merged_warnings(*pick_policy(found.fields)) == []
