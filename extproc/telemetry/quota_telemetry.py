"""What quotas have decided and how they stand, for the metrics. `service` registers it; it only reads.

telemetry.registry.register(QuotaMetrics(quotas))
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from extproc.telemetry.tenant_telemetry import ANY, MOST_TENANTS, OTHER


class CountedQuotas(Protocol):
    """What is read; see `quotas.shared_quotas.Quotas`."""

    @property
    def decisions(self) -> Mapping[tuple[str, str], int]:
        """Return how often each (outcome, source) came."""

    @property
    def decisions_by_tenant(self) -> Mapping[tuple[str, str], int]:
        """Return how often each (tenant as the policy has it, outcome) came."""

    def facts(self) -> Mapping[str, Any]:
        """Return how it stands."""


class QuotaMetrics(Collector):
    """Metrics of one replica's quotas, read when somebody asks for them. Label values are closed sets of ours."""

    def __init__(self, quotas: CountedQuotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        """Yield all as they stand."""
        decisions, by_tenant, failing, opened = self._families()
        for (outcome, source), count in sorted(self._quotas.decisions.items()):
            decisions.add_metric((outcome, source), count)
        known = sorted({tenant for tenant, _ in self._quotas.decisions_by_tenant if tenant != ANY})[:MOST_TENANTS]
        counts: Counter[tuple[str, str]] = Counter()
        for (tenant, outcome), count in self._quotas.decisions_by_tenant.items():
            counts[tenant if tenant in known else OTHER, outcome] += count
        for labels, count in sorted(counts.items()):
            by_tenant.add_metric(labels, count)
        facts = self._quotas.facts()
        failing.add_metric((), float(facts["writes_failing"]))
        opened.add_metric((), facts["open_requests"])
        yield from (decisions, by_tenant, failing, opened)

    def describe(self) -> Iterator[Metric]:
        """Yield the names."""
        yield from self._families()

    @staticmethod
    def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, GaugeMetricFamily, GaugeMetricFamily]:
        return (
            CounterMetricFamily(
                "kvmesh_quota_decisions",
                "Requests decided on by a quota: allowed, or the limit that refused; shared, or by a share (local).",
                labels=("outcome", "source"),
            ),
            CounterMetricFamily(
                "kvmesh_tenant_quota_decisions",
                "Requests decided on by a quota, by the tenant that it names; other: quotas for each tenant by itself.",
                labels=("tenant", "outcome"),
            ),
            GaugeMetricFamily(
                "kvmesh_quota_writes_failing", "1 while what requests have used cannot be written to Redis.", labels=()
            ),
            GaugeMetricFamily("kvmesh_quota_open_requests", "Open requests here that have a quota.", labels=()),
        )
