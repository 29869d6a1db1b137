"""docs/reference/metrics.md has every metric of both processes, as they declare them."""

from pathlib import Path

import pytest

from extproc.telemetry import metrics as picker
from kv_indexer.telemetry import metrics as indexer
from kvmesh.metrics.metric import Metric, metrics_table

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
METRICS = [*picker.METRICS, *indexer.METRICS]


@pytest.mark.parametrize("declared", [picker, indexer], ids=["picker", "indexer"])
def test_the_table_is_what_is_declared(declared: object) -> None:
    metrics, module = declared.METRICS, declared.__name__  # type: ignore[attr-defined]
    table = PAGE.partition(f"<!-- python -m {module} -->\n")[2].partition("\n\n")[0].rstrip("\n") + "\n"
    assert table == metrics_table(metrics)
    assert len({metric.name for metric in metrics}) == len(metrics)


@pytest.mark.parametrize("metric", METRICS, ids=[metric.name for metric in METRICS])
def test_every_metric_is_named_in_the_ecosystems_style_and_explained(metric: Metric) -> None:
    assert metric.name.startswith("kvmesh_")
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert metric.kind != "histogram" or metric.name.endswith(("_seconds", "_tokens"))
    assert metric.bounds == tuple(sorted(metric.bounds))
    assert len(metric.text) > 12
    assert metric.text.endswith((".", ")"))
