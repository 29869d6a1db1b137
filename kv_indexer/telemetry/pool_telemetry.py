"""The pools in the indexer's metrics: gathered when Prometheus asks, from what is known then; nothing is counted.

A pool's name is a label of these few series alone, for at most MAX_POOLS pools; `kvmesh_indexer_pool_endpoint_info`
joins it to every series that has an endpoint.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kv_indexer.pools.pool_report import PoolsReport

MAX_POOLS = 500  # with a label of their own; the others are summed up
OTHERS = "other"  # no pool's name: these have a namespace and a slash
_NAME = "kvmesh_indexer_pool"


class PoolCollector(Collector):
    """Shows the pools."""

    def __init__(self, report: Callable[[], PoolsReport], *, registry: CollectorRegistry) -> None:
        self._report = report
        registry.register(self)

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Return nothing: registering must not ask for the report."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield all series."""
        report = self._report()
        shown = {pool.name for pool in report.pools[:MAX_POOLS]}
        endpoints: Counter[tuple[str, ...]] = Counter()
        streams: Counter[tuple[str, ...]] = Counter()
        blocks: Counter[tuple[str, ...]] = Counter()
        findings: Counter[tuple[str, ...]] = Counter()
        info = GaugeMetricFamily(
            f"{_NAME}_endpoint_info", "1 for the pool that an endpoint is indexed for.", labels=("pool", "endpoint")
        )
        for pool in report.pools:
            name = pool.name if pool.name in shown else OTHERS
            for ready in (True, False):
                endpoints[name, str(ready).lower()] += sum(each.ready is ready for each in pool.endpoints)
            for endpoint in pool.endpoints:
                streams.update((name, stream.state) for stream in endpoint.streams if stream.followed_here)
                findings.update((name, reason) for reason in endpoint.findings)
                for stream in endpoint.streams:
                    blocks.update({(name, tier): held for tier, held in stream.blocks.items()})
                if endpoint.indexed_for == pool.name:
                    info.add_metric((name, endpoint.address), 1)
        yield _gauge("endpoints", "Endpoints, by whether they are ready.", ("pool", "ready"), endpoints)
        yield _gauge("streams", "Streams that this indexer follows, by state.", ("pool", "state"), streams)
        yield _gauge("blocks", "Blocks indexed, by whichever indexer.", ("pool", "tier"), blocks)
        yield _gauge("findings", "Findings of this indexer that stand.", ("pool", "reason"), findings)
        yield info
        conflicts = GaugeMetricFamily(
            f"{_NAME}_conflicts", "Endpoints in several pools; they are indexed for the first alone."
        )
        conflicts.add_metric((), report.conflicts)
        yield conflicts
        problems = GaugeMetricFamily(f"{_NAME}_problems", "Documents that cannot be used.", labels=("reason",))
        for reason, count in sorted(Counter(problem.reason for problem in report.problems).items()):
            problems.add_metric((reason,), count)
        yield problems


def _gauge(name: str, words: str, labels: tuple[str, ...], values: Counter[tuple[str, ...]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_NAME}_{name}", words, labels=labels)
    for key, value in sorted(values.items()):
        family.add_metric(key, value)
    return family
