"""docs/reference/metrics.md has every metric of both processes, as they show them."""

import asyncio
from pathlib import Path

import pytest

from extproc.telemetry.metrics_table import over_pickers, picker_rows
from kv_indexer.telemetry.metrics_table import MetricRow, indexer_rows, metrics_table, over_indexers

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
PICKER_ROWS = asyncio.run(picker_rows())
ROWS = [*PICKER_ROWS.values(), *indexer_rows().values()]


def table_of(module: str) -> str:
    return PAGE.partition(f"<!-- python -m {module} -->\n")[2].partition("\n\n")[0].rstrip("\n") + "\n"


def test_the_pickers_table_is_what_a_picker_shows() -> None:
    assert table_of("extproc.telemetry.metrics_table") == metrics_table(
        PICKER_ROWS.values(), over_replicas=over_pickers
    )


def test_the_indexers_table_is_what_an_indexer_shows() -> None:
    assert table_of("kv_indexer.telemetry.metrics_table") == metrics_table(
        indexer_rows().values(), over_replicas=over_indexers
    )


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_every_metric_is_named_in_the_ecosystems_style_and_explained(row: MetricRow) -> None:
    assert row.name.startswith("kvmesh_")
    assert row.kind in ("counter", "gauge", "histogram")
    assert (row.kind == "counter") == row.name.endswith("_total")
    assert row.kind != "histogram" or row.name.endswith(("_seconds", "_tokens"))
    assert len(row.words) > 12
    assert row.words.endswith((".", ")"))
