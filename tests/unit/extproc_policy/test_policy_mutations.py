"""10,000 damaged documents: each is refused with a path that leads somewhere, or means something."""

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.policy.reading import PolicyDocumentError
from extproc.reach.warnings import merged_warnings, warnings
from tests.kube_api.schemas import admit
from tests.unit.extproc_policy.policy_documents import SMALL, path_exists, policy
from tests.unit.extproc_policy.policy_mutations import mutated
from tools.policy_crd import policy_schema

SEEDS, MUTATIONS = (6, 7, 8, 9), 2_500  # 10,000 together
COMPARED = 1_000  # of the same kind: the schema takes longer
# what one document's own checks refuse and a schema cannot say; docs/reference/inference-policy.md lists them
ONLY_HERE = ("never counts: ", "is already that of ")


def damaged_documents(documents: Sequence[Mapping[str, Any]], count: int, *, seed: int) -> Iterator[dict[str, Any]]:
    """The first document every other time, the others in turn."""
    chance = random.Random(seed)
    whole, *others = [json.dumps(document) for document in documents]
    for i in range(count):
        yield mutated(whole if i % 2 else others[i // 2 % len(others)], chance, most=2)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_ten_thousand_damaged_policies_are_refused_with_a_path_of_theirs_or_mean_something(seed: int) -> None:
    outcomes: Counter[str] = Counter()
    for document in damaged_documents([policy(), *(policy(spec) for spec in SMALL)], MUTATIONS, seed=seed):
        before = json.dumps(document)
        try:
            found = parse_inference_policy(document)
        except PolicyDocumentError as error:
            outcomes["refused"] += 1
            assert path_exists(document, error.path), (str(error), document)
            assert len(str(error)) < 1000
            continue
        assert json.dumps(document) == before
        json.dumps(found.fields)  # nothing but plain values
        assert all(words.startswith("spec") for words in warnings(found))
        try:
            picked, models = pick_policy(found.fields)
        except PolicyDocumentError as error:
            outcomes["refused as a whole"] += 1
            assert error.path.startswith("spec."), str(error)
            continue
        outcomes["accepted"] += 1
        assert all(words.startswith("spec.") for words in merged_warnings(picked, models))
    assert min(outcomes["refused"], outcomes["accepted"]) > MUTATIONS / 20, outcomes
    assert outcomes["refused as a whole"] > 0


def test_what_is_no_object_at_all_is_refused_as_such() -> None:
    documents: list[Any] = [None, [], "x", 3, {1: 2}, {"spec": {}}, {"apiVersion": ["kvmesh.io/v1alpha1"]}]
    for document in documents:
        try:
            parse_inference_policy(document)
        except PolicyDocumentError:
            continue
        raise AssertionError(document)


@pytest.mark.thorough
def test_the_schema_and_we_agree_on_what_a_valid_policy_is() -> None:
    schema = policy_schema()
    outcomes: Counter[str] = Counter()
    # the API server has its own rules for everything but the spec
    specs = [{"spec": policy()["spec"]}, *({"spec": spec} for spec in SMALL if spec)]
    for damaged in damaged_documents(specs, COMPARED, seed=66):
        document = policy({}) | {name: value for name, value in damaged.items() if name == "spec"}
        admission = admit(schema, document)
        refused_there = [*admission.unknown, *admission.causes]
        try:
            found = parse_inference_policy(document)
        except PolicyDocumentError as error:
            outcomes["refused"] += 1
            if not refused_there:
                outcomes["refused here alone"] += 1
                assert any(words in error.message for words in ONLY_HERE), (str(error), document)
            continue
        assert not refused_there, (refused_there, document)
        # and what the server has filled in changes nothing
        assert parse_inference_policy(admission.document).fields == found.fields
        outcomes["accepted"] += 1
    assert min(outcomes["refused"], outcomes["accepted"]) > COMPARED / 10, outcomes
    assert outcomes["refused here alone"] < COMPARED / 100, outcomes
