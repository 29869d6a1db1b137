"""Merged fields have the paths that people write, in origins, conditions and messages."""

import pytest

from extproc.policy.inference_policy import parse_inference_policy, spec_path
from extproc.policy.merge import leaves_of
from tests.unit.extproc_policy.policy_documents import path_exists, policy


@pytest.mark.parametrize(
    ("path", "written"),
    [
        (("scoring", "weights", "prefill-work"), "spec.scoring.weights.prefill-work"),
        (("priorities", "classes", "chat", "ttftSeconds"), "spec.priorities.classes[chat].ttftSeconds"),
        (("priorities", "classes", "chat"), "spec.priorities.classes[chat]"),
        (("priorities", "classes"), "spec.priorities.classes"),
        (("priorities", "objectives", "night.ly"), "spec.priorities.objectives[night.ly]"),
        (("failureMode",), "spec.failureMode"),
        ((), "spec"),
    ],
)
def test_a_field_has_its_path_in_the_resource(path: tuple[str, ...], written: str) -> None:
    assert spec_path(path) == written


def test_every_field_that_a_policy_sets_leads_back_to_where_it_was_written() -> None:
    document = policy()
    lists = {"spec.priorities.classes", "spec.priorities.objectives"}
    for path, _ in leaves_of(parse_inference_policy(document).fields):
        written = spec_path(path)
        assert path_exists(document, written.partition("[")[0]), written
        assert "[" not in written or written.partition("[")[0] in lists
