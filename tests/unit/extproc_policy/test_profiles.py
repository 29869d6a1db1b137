"""Profiles and targets by name: what they set, and that everything people write outranks them."""

from typing import Any

import pytest

from extproc.policy.inference_policy import read_spec
from extproc.policy.merged_policy import pick_policy
from extproc.policy.priority import PriorityClass
from extproc.policy.profiles import PROFILES, Profile
from extproc.policy.reading import PolicyDocumentError
from extproc.policy.resource import written_spec
from extproc.policy.targets import NamedTargets, Targets
from extproc.policy.values import PickPolicy


def picked(spec: Any) -> PickPolicy:
    return pick_policy(read_spec(spec))[0]


def standard(**fields: Any) -> PriorityClass:
    return picked({"priorities": {"classes": [{"name": "standard", **fields}]}}).priorities.classes["standard"]


@pytest.mark.parametrize("profile", Profile)
def test_a_profile_is_the_policy_that_its_fields_are(profile: Profile) -> None:
    assert picked({"profile": profile}) == picked(written_spec(PROFILES[profile])) != PickPolicy()


def test_a_field_given_beside_a_profile_outranks_it() -> None:
    scoring, classes = {"sessionSeconds": 60}, [{"name": "standard", "ttftSeconds": 1}]
    policy = picked({"profile": "conversation", "scoring": scoring, "priorities": {"classes": classes}})
    assert policy.session_seconds == 60.0
    assert policy.priorities.classes["standard"].targets == Targets(
        ttft_seconds=1.0, inter_token_seconds=0.04, queue_seconds=30.0
    )


def test_a_tolerance_given_beside_a_profile_replaces_its_targets() -> None:
    classes = [{"name": "standard", "tolerance": "milliseconds"}]
    policy = picked({"profile": "analysis", "priorities": {"classes": classes}})
    assert policy.priorities.classes["standard"].targets == standard(tolerance="milliseconds").targets


def test_targets_by_name_outrank_the_tolerance_and_limit_no_pod() -> None:
    found = standard(targets="mlperf-llama3.1-405b", tolerance="minutes")
    assert found.targets == Targets(ttft_seconds=6.0, inter_token_seconds=0.175, queue_seconds=120.0)
    assert found.inter_token_seconds is None


@pytest.mark.parametrize(
    ("spec", "path", "names"),
    [
        pytest.param({"profile": "chat"}, "spec.profile", Profile, id="profile"),
        pytest.param(
            {"priorities": {"classes": [{"name": "standard", "targets": "mlperf"}]}},
            "spec.priorities.classes[0].targets",
            NamedTargets,
            id="targets",
        ),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_there_are(
    spec: Any, path: str, names: type[Profile | NamedTargets]
) -> None:
    with pytest.raises(PolicyDocumentError) as refused:
        read_spec(spec)
    assert refused.value.path == path
    assert f"must be one of {', '.join(names)}, not" in refused.value.message
