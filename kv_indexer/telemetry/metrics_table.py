"""The metrics of a process as a table for docs/metrics.md: read from what the process itself would show.

`python -m kv_indexer.telemetry.metrics_table` prints the indexer's; the picker's own module of
that name uses `metrics_table`, too. Tests hold the page to both, and running processes to the page.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kv_indexer.pools.pool_report import EndpointReport, PoolReport, PoolsReport, StreamReport
from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kv_indexer.telemetry.pool_telemetry import PoolCollector
from kv_indexer.telemetry.redis_telemetry import FIELDS, RedisFacts
from kvmesh.blocks.findings import Finding, FindingReason
from kvmesh.blocks.source import SourceState, SourceStatus, Stream
from kvmesh.documents.documents import DocumentProblem

HEAD = "| metric | type | unit | labels | what it means | over replicas |\n|---|---|---|---|---|---|"
UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "ratio", "money")
OF_THE_PROCESS = ("process_", "python_")  # prometheus_client's own
EACH, SUM, ONE = "each shows it", "add up", "one shows it"
STREAM = Stream(endpoint="10.0.0.1:8000")
# the rest is of streams, which one indexer at a time follows, or counts what this process did
SHOWN_BY_EACH = (
    *("kvmesh_indexer_blocks", "kvmesh_indexer_ready", "kvmesh_indexer_redis_", "kvmesh_indexer_unreadable_records"),
    *("kvmesh_indexer_pool_blocks", "kvmesh_indexer_pool_conflicts", "kvmesh_indexer_pool_endpoint"),
    *("kvmesh_indexer_pool_problems", "kvmesh_build_info"),
)
COUNTED_BY_ONE = ("kvmesh_indexer_redis_round_trip_seconds", "kvmesh_indexer_redis_probe_failures")


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric."""

    name: str  # as queries have it: counters with _total, histograms without _bucket
    kind: str
    labels: tuple[str, ...]
    words: str


def metric_rows(text: str) -> dict[str, MetricRow]:
    """Return the metrics of a page by name, with the labels that its series have; `_created` and the process' left out.

    A metric without any series has no labels here.
    """
    rows: dict[str, MetricRow] = {}
    for family in text_string_to_metric_families(text):
        if family.name.startswith(OF_THE_PROCESS) or family.name.endswith("_created"):
            continue
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {label for sample in family.samples for label in sample.labels if label != "le"}
        rows[name] = MetricRow(
            name=name, kind=family.type, labels=tuple(sorted(labels)), words=family.documentation.strip()
        )
    return rows


def metrics_table(rows: Iterable[MetricRow], *, over_replicas: Callable[[MetricRow], str]) -> str:
    """Return the rows, sorted by name, as a table; `over_replicas`: what is to be done with several processes'."""
    lines = [HEAD]
    for row in sorted(rows, key=lambda row: row.name):
        labels = ", ".join(f"`{label}`" for label in row.labels)
        words = row.words.replace("|", "\\|")
        lines.append(f"| `{row.name}` | {row.kind} | {_unit(row.name)} | {labels} | {words} | {over_replicas(row)} |")
    return "\n".join(lines) + "\n"


def indexer_rows() -> dict[str, MetricRow]:
    """Return the indexer's metrics, out of an indexer to which everything has happened once."""
    telemetry = PrometheusTelemetry()
    telemetry.applied(STREAM, batches=1, events={"BlockStored": 1}, last_ts=0.0)
    telemetry.undecodable(STREAM, reasons={"bad": 1})
    telemetry.not_indexed(STREAM, reasons={"orphan": 1})
    telemetry.gap(STREAM)
    telemetry.replayed(STREAM, batches=1)
    telemetry.state(STREAM, state=SourceState.LIVE, reason="")
    telemetry.orphans(STREAM, waiting=1)
    telemetry.eviction_policy("noeviction")
    telemetry.ready(True)
    telemetry.redis_facts(RedisFacts(keys=1, **dict.fromkeys(FIELDS, 1.0)), seconds=0.001)
    finding = Finding(endpoint=STREAM.endpoint, dp_rank=None, reason=FindingReason.NO_EVENTS, message="", since=0.0)
    telemetry.findings([finding], appeared=[finding], endpoints=[STREAM.endpoint])
    telemetry.sources([_source()])
    registry = CollectorRegistry()
    PoolCollector(_pools, registry=registry)
    return metric_rows(telemetry.render().decode() + generate_latest(registry).decode())


def _source() -> SourceStatus:
    return SourceStatus(
        endpoint=STREAM.endpoint,
        dp_rank=0,
        tier="GPU",
        slot=1,
        epoch=1,
        state=SourceState.LIVE,
        reason="",
        last_seq=1,
        last_batch_at=0.0,
        block_size=16,
        cached_blocks=1,
    )


def _pools() -> PoolsReport:
    stream = StreamReport(dp_rank=0, state="live", reason="", followed_here=True, blocks={"GPU": 1})
    endpoint = EndpointReport(
        address=STREAM.endpoint,
        pod="llm/a",
        ready=True,
        terminating=False,
        indexed_for="llm/pool",
        model="m",
        streams=(stream,),
        findings=("no-events",),
    )
    pool = PoolReport(name="llm/pool", kind="Service", model="m", models=("m",), endpoints=(endpoint,))
    return PoolsReport(pools=(pool,), problems=(DocumentProblem(reason="bad", where="", words=""),))


def over_indexers(row: MetricRow) -> str:
    """Return what is to be done with the series of several indexers."""
    if row.kind == "gauge" and "endpoint" in row.labels and not row.name.startswith(SHOWN_BY_EACH):
        return ONE
    return EACH if row.name.startswith(SHOWN_BY_EACH) and not row.name.startswith(COUNTED_BY_ONE) else SUM


def _unit(name: str) -> str:
    words = name.split("_")
    return next((unit for unit in UNITS if unit in words), "")


if __name__ == "__main__":
    sys.stdout.write(metrics_table(indexer_rows().values(), over_replicas=over_indexers))
