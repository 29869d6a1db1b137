"""What lookups had to ask of Redis, for the metrics of the process. Only reads counters."""

from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class LookupCounts(Protocol):
    """What is read; see `kvmesh.index.redis_reader`."""

    known_blocks: int
    asked_blocks: int

    @property
    def tracked_blocks(self) -> int:
        """Return the blocks whose changes Redis tells us of."""


class LookupTelemetry(Collector):
    """Registered by `service`, once for a process."""

    def __init__(self, counts: LookupCounts) -> None:
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """Read the counters."""
        blocks = CounterMetricFamily(
            "kvmesh_index_lookup_blocks",
            "Blocks that were looked up: asked of Redis, or known here because Redis tells of changes.",
            labels=("source",),
        )
        blocks.add_metric(("redis",), self._counts.asked_blocks)
        blocks.add_metric(("known",), self._counts.known_blocks)
        yield blocks
        yield GaugeMetricFamily(
            "kvmesh_index_tracked_blocks",
            "Blocks whose changes Redis tells this replica of.",
            value=self._counts.tracked_blocks,
        )
