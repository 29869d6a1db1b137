"""What quotas have decided and how they stand, for the metrics. `service` registers it; it only reads.

telemetry.registry.register(QuotaMetrics(quotas))
"""

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class CountedQuotas(Protocol):
    """What is read; see `adapters.quotas.Quotas`."""

    @property
    def decisions(self) -> Mapping[tuple[str, str], int]:
        """Return how often each (outcome, source) came."""

    def facts(self) -> Mapping[str, Any]:
        """Return how it stands."""


class QuotaMetrics(Collector):
    """Metrics of one replica's quotas, read when somebody asks for them. Label values are closed sets of ours."""

    def __init__(self, quotas: CountedQuotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        """Yield all as they stand."""
        decisions, failing, opened = self._families()
        for (outcome, source), count in sorted(self._quotas.decisions.items()):
            decisions.add_metric((outcome, source), count)
        facts = self._quotas.facts()
        failing.add_metric((), float(facts["writes_failing"]))
        opened.add_metric((), facts["open_requests"])
        yield from (decisions, failing, opened)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from self._families()

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        return (
            CounterMetricFamily(
                "kvmesh_quota_decisions",
                "Requests decided on by a quota: allowed, or the limit that refused; shared, or by a share (local).",
                labels=("outcome", "source"),
            ),
            GaugeMetricFamily(
                "kvmesh_quota_writes_failing", "1 while what requests have used cannot be written to Redis.", labels=()
            ),
            GaugeMetricFamily("kvmesh_quota_open_requests", "Open requests here that have a quota.", labels=()),
        )
