"""Histograms that are counted on every request: without the locks and checks of prometheus_client's own.

They read as those do. Only the event loop's thread may touch them. Used by the other `*telemetry` modules.
"""

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OTHER = "other"  # the value of all labels of a series beyond the bound
MOST_SERIES = 100


class Times:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "created_at", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts: list[float] = [0] * (len(bounds) + 1)  # by bucket, not cumulative; the last one has no bound
        self.seconds = 0.0
        self.created_at = time.time()

    def observe(self, seconds: float) -> None:
        """Count one; a bucket's bound belongs to it."""
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds


class TimesHistogram(Collector):
    """A histogram with labels; at most `most_series` combinations, whatever comes: all others are one."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        *,
        bounds: Sequence[float],
        registry: CollectorRegistry,
        most_series: int = MOST_SERIES,
    ) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._bounds, self._most_series = bounds, most_series
        self._series: dict[tuple[str, ...], Times] = {}
        registry.register(self)

    def of(self, *values: str) -> Times:
        """Return the series of these labels."""
        times = self._series.get(values)
        return times if times is not None else self._new(values)

    def describe(self) -> Iterator[Metric]:
        """Yield the name."""
        yield Metric(self._name, self._text, "histogram")

    def collect(self) -> Iterator[Metric]:
        """Yield all series."""
        metric = Metric(self._name, self._text, "histogram")
        for values, times in self._series.items():
            labels = dict(zip(self._labels, values, strict=True))
            add_series(metric, labels, bounds=self._bounds, counts=times.counts, seconds=times.seconds)
            metric.add_sample(f"{metric.name}_created", labels, times.created_at)
        yield metric

    def _new(self, values: tuple[str, ...]) -> Times:
        if len(self._series) >= self._most_series:
            values = (OTHER,) * len(values)
        return self._series.setdefault(values, Times(self._bounds))


def add_series(
    metric: Metric, labels: dict[str, str], *, bounds: Sequence[float], counts: Sequence[float], seconds: float
) -> None:
    """Add one histogram's samples, of counts by bucket, which are not cumulative."""
    cumulative = tuple(accumulate(counts))
    for bound, count in zip((*map(str, map(float, bounds)), "+Inf"), cumulative, strict=True):
        metric.add_sample(f"{metric.name}_bucket", {**labels, "le": bound}, float(count))
    metric.add_sample(f"{metric.name}_count", labels, float(cumulative[-1]))
    metric.add_sample(f"{metric.name}_sum", labels, seconds)
