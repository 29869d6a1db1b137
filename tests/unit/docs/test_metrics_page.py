"""docs/reference/metrics.md has every metric of both processes, as they declare them."""

import json
import re
from pathlib import Path

import pytest
import yaml

from extproc.ledger import metrics as picker
from kv_indexer.telemetry import metrics as indexer
from kvmesh.metrics.metric import Metric, metrics_table

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
RULES = Path(__file__).parents[3] / "manifests" / "monitoring" / "prometheus" / "inference-extension.rules.yaml"
EXTENSION = Path(__file__).parents[2] / "data" / "inference_extension_metrics.json"
METRICS = [*picker.METRICS, *indexer.METRICS]


@pytest.mark.parametrize("declared", [picker, indexer], ids=["picker", "indexer"])
def test_the_table_is_what_is_declared(declared: object) -> None:
    metrics, module = declared.METRICS, declared.__name__  # type: ignore[attr-defined]
    table = PAGE.partition(f"<!-- python -m {module} -->\n")[2].partition("\n\n")[0].rstrip("\n") + "\n"
    assert table == metrics_table(metrics)
    assert len({metric.name for metric in metrics}) == len(metrics)


def test_each_name_of_the_inference_extension_is_derived_or_said_not_to_be() -> None:
    part = PAGE.partition("## Names of the inference extension")[2].partition("\n## ")[0]
    derived, left_out = (
        [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
        for table in part.split("These cannot be derived")
    )
    [group] = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    names = [re.sub(r"_(bucket|sum|count)$", "", rule["record"]) for rule in group["rules"]]
    assert derived == list(dict.fromkeys(names))
    theirs = json.loads(EXTENSION.read_text(encoding="utf-8"))
    assert theirs["source"].partition("@v")[2] in part
    assert {*derived, *left_out} == {each["name"] for each in theirs["metrics"]}
    assert len({*derived, *left_out}) == len(derived) + len(left_out)
    instead = set(re.findall(r"`(kvmesh_\w+)`", part))
    assert instead <= {metric.name for metric in METRICS}


@pytest.mark.parametrize("metric", METRICS, ids=[metric.name for metric in METRICS])
def test_every_metric_is_named_in_the_ecosystems_style_and_explained(metric: Metric) -> None:
    assert metric.name.startswith("kvmesh_")
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert metric.kind != "histogram" or metric.name.endswith(("_seconds", "_tokens"))
    assert metric.bounds == tuple(sorted(metric.bounds))
    assert len(metric.text) > 12
    assert metric.text.endswith((".", ")"))
