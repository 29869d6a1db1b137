"""docs/guides/autoscaling.md: its policy is read, its objects are objects, and it explains every state."""

from pathlib import Path
from typing import Any

import yaml

from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.reach.warnings import warnings
from extproc.scaling.external_scaler import METRICS
from extproc.scaling.seen import State
from operate.install.objects import component_labels
from operate.install.plan import PICKER

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "autoscaling.md"
TEXT = PAGE.read_text(encoding="utf-8")


def documents() -> list[dict[str, Any]]:
    """Return the page's objects in their order."""
    parts = [part.partition("```")[0] for part in TEXT.split("```yaml\n")[1:]]
    return [each for part in parts for each in yaml.safe_load_all(part)]


def objects() -> dict[str, Any]:
    """Return the page's objects by kind, the last of each."""
    return {each["kind"]: each for each in documents() if "kind" in each}


def test_the_policy_is_read_and_nothing_of_it_is_doubtful() -> None:
    document = parse_inference_policy(objects()["InferencePolicy"])
    policy, _ = pick_policy(document.fields)
    assert policy.shadow
    assert list(policy.autoscale.by_role) == ["both"]
    assert not warnings(document)


def test_every_state_is_explained_and_no_other() -> None:
    rows = TEXT.partition("## Where to see it")[2].partition("## Prometheus adapter")[0].splitlines()
    assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(State)


def test_the_scaled_object_asks_for_what_is_answered() -> None:
    scaled, policy = objects()["ScaledObject"], objects()["InferencePolicy"]
    (trigger,) = scaled["spec"]["triggers"]
    assert set(trigger["metadata"]) == {"scalerAddress", "pool", "role"}
    assert trigger["metadata"]["pool"] == policy["spec"]["targetRefs"][0]["name"]
    assert scaled["metadata"]["namespace"] == policy["metadata"]["namespace"]
    assert all(f"`{metric}`" in TEXT for metric in METRICS)


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_serves() -> None:
    (rule,) = next(each["externalRules"] for each in documents() if "externalRules" in each)
    (metric,) = objects()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]


def test_the_doors_are_those_of_the_picker() -> None:
    labels = component_labels(PICKER)
    assert objects()["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects()["AuthorizationPolicy"]["spec"]["selector"]["matchLabels"] == labels
