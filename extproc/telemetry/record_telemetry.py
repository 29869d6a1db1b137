"""What the access log and the traces have written and dropped, for the metrics of the process. Only reads counters."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

WRITTEN, DROPPED = "written", "dropped"


class LineCounts(Protocol):
    """One target of the access log."""

    target: str
    written: int
    dropped: int


class SpanCounts(Protocol):
    """Traces that are on."""

    exported_spans: int
    dropped_spans: int


class RecordTelemetry(Collector):
    """Registered by `service`, once for a process."""

    def __init__(self, *, targets: Sequence[LineCounts], traces: SpanCounts | None) -> None:
        self._targets = targets
        self._traces = traces

    def collect(self) -> Iterator[Metric]:
        """Read the counters."""
        lines = CounterMetricFamily(
            "kvmesh_access_log_lines",
            "Lines of the access log by target (stdout, file, stream): written, or dropped because it was too slow.",
            labels=("target", "outcome"),
        )
        for target in self._targets:
            lines.add_metric((target.target, WRITTEN), target.written)
            lines.add_metric((target.target, DROPPED), target.dropped)
        yield lines
        spans = CounterMetricFamily(
            "kvmesh_trace_spans",
            "Spans by what became of them: exported, or dropped because the collector did not take them.",
            labels=("outcome",),
        )
        if self._traces is not None:
            spans.add_metric(("exported",), self._traces.exported_spans)
            spans.add_metric((DROPPED,), self._traces.dropped_spans)
        yield spans
