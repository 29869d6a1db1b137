"""docs/guides/autoscaling.md: its policy is read, its objects are objects, and it explains every state."""

from pathlib import Path
from typing import Any

import yaml

from extproc.external_metrics.answers import LABELS
from extproc.external_metrics.answers import METRICS as EXTERNAL_METRICS
from extproc.install.objects import component_labels
from extproc.install.plan import PICKER
from extproc.policy.inference_policy import parse_inference_policy
from extproc.policy.merged_policy import pick_policy
from extproc.policy.warnings import warnings
from extproc.scaling.external_scaler import METRICS
from extproc.scaling.seen import State

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "autoscaling.md"
TEXT = PAGE.read_text(encoding="utf-8")


def documents() -> list[dict[str, Any]]:
    """Return the page's objects in their order."""
    parts = [part.partition("```")[0] for part in TEXT.split("```yaml\n")[1:]]
    return [each for part in parts for each in yaml.safe_load_all(part)]


def objects() -> dict[str, Any]:
    """Return the page's objects by kind, the last of each; the adapter's rules have none."""
    return {each.get("kind", "rules"): each for each in documents()}


def test_the_policy_is_read_and_nothing_of_it_is_doubtful() -> None:
    document = parse_inference_policy(objects()["InferencePolicy"])
    policy, _ = pick_policy(document.fields)
    assert policy.autoscale.shadow
    assert list(policy.autoscale.by_role) == ["both"]
    assert not warnings(document)


def test_every_state_is_explained_and_no_other() -> None:
    rows = TEXT.partition("## Where to see it")[2].partition("## A HorizontalPodAutoscaler")[0].splitlines()
    assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(State)


def test_the_scaled_object_asks_for_what_is_answered() -> None:
    scaled, policy = objects()["ScaledObject"], objects()["InferencePolicy"]
    (trigger,) = scaled["spec"]["triggers"]
    assert set(trigger["metadata"]) == {"scalerAddress", "pool", "role"}
    assert trigger["metadata"]["pool"] == policy["spec"]["targetRefs"][0]["name"]
    assert scaled["metadata"]["namespace"] == policy["metadata"]["namespace"]
    assert all(f"`{metric}`" in TEXT or f"metric:\n{metric}`" in TEXT for metric in METRICS)


def test_every_external_metric_is_explained_and_the_autoscaler_asks_for_one_of_them() -> None:
    rows = TEXT.partition("## A HorizontalPodAutoscaler")[2].partition("## KEDA")[0].splitlines()
    assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(EXTERNAL_METRICS)
    autoscaler, policy = next(each for each in documents() if each["kind"] == "HorizontalPodAutoscaler"), objects()
    (metric,) = autoscaler["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] in EXTERNAL_METRICS
    labels = metric["external"]["metric"]["selector"]["matchLabels"]
    target = policy["InferencePolicy"]["spec"]["targetRefs"][0]["name"]
    assert labels == {"pool": target, "role": next(iter(policy["InferencePolicy"]["spec"]["autoscale"]))}
    assert tuple(labels) == LABELS
    assert autoscaler["metadata"]["namespace"] == policy["InferencePolicy"]["metadata"]["namespace"]


def test_the_autoscaler_asks_for_the_metric_that_the_adapter_serves() -> None:
    (rule,) = objects()["rules"]["externalRules"]
    (metric,) = objects()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"]


def test_the_doors_are_those_of_the_picker() -> None:
    labels = component_labels(PICKER)
    assert objects()["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == labels
    assert objects()["AuthorizationPolicy"]["spec"]["selector"]["matchLabels"] == labels
