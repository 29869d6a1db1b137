"""Counts that are kept as plain numbers until somebody asks for the metrics; used by `telemetry`, `overload_telemetry`.

Finding a series by its labels and counting it with the library's locks and checks costs a request some 10 us with cold
caches, and it counts many. Only the event loop's thread may touch what is kept so.
"""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector


class TalliesFirst(Collector):
    """Has `count` move what was kept into the metrics; to be made before them, so that it is collected before them."""

    def __init__(self, count: Callable[[], None], *, registry: CollectorRegistry) -> None:
        self._count = count
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Yield nothing."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Count, and yield nothing."""
        self._count()
        return iter(())
