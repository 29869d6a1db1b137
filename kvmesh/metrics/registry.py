"""Counts, and shows the counts in Prometheus' text format or in OpenMetrics.

A series is a plain number: `family.of("a").value += 1` takes about 90 ns, and 20 if the series is kept. One thread
counts. The page may be made in turns of the event loop (`MetricsPage`), or by another thread (`Registry.text`).
docs/decisions/0008-one-way-to-count.md says why no library does this.
"""

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import accumulate, islice
from typing import Generic, TypeVar

from kvmesh.metrics.exposition import Form
from kvmesh.metrics.metric import Kind, Metric

LINES_AT_ONCE = 100  # takes less than a millisecond
TURN_SECONDS = 0.002
SPECIAL = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}

Rows = Iterable[tuple[tuple[str, ...], float]]  # values of the labels in the order of their declaration, and a number
Reading = Iterable[tuple[Metric, Rows]]


class Value:
    """One series of a counter or a gauge."""

    __slots__ = ("created_at", "labels", "value")

    def __init__(self, metric: Metric, values: tuple[str, ...]) -> None:
        self.labels = _labels(metric, values)
        self.created_at = time.time()
        self.value = 0.0

    def lines(self, name: str, label: str, form: Form) -> Iterable[str]:  # noqa: ARG002 - as in `Histogram`
        """Return the series' lines of the page; `label` is put before its own labels."""
        return (f"{name}{_braces(label, self.labels)} {_number(self.value)}\n",)


class Histogram:
    """One series of a histogram."""

    __slots__ = ("bounds", "counts", "created_at", "exemplars", "labels", "sum")

    def __init__(self, metric: Metric, values: tuple[str, ...]) -> None:
        self.labels = _labels(metric, values)
        self.created_at = time.time()
        self.bounds = metric.bounds
        self.counts = [0.0] * (len(metric.bounds) + 1)  # by bucket, not cumulative; the last bucket has no bound
        self.sum = 0.0
        self.exemplars: dict[int, str] = {}  # by bucket, the last one, as OpenMetrics writes it

    def observe(self, value: float, trace_id: str = "") -> None:
        """Count one observation; a bucket's bound belongs to the bucket. `trace_id`: of its request, or ""."""
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id:
            self.exemplars[bucket] = f' # {{trace_id="{trace_id}"}} {_number(value)} {_number(time.time())}'

    def lines(self, name: str, label: str, form: Form) -> Iterable[str]:
        """Return the series' lines of the page; `label` is put before its own labels."""
        labels, cumulative = _braces(label, self.labels), tuple(accumulate(self.counts))
        before = f"{name}_bucket{{{labels[1:-1]}," if labels else f"{name}_bucket{{"
        bounds = (*map(_number, self.bounds), "+Inf")
        shown = self.exemplars if form is Form.OPENMETRICS else {}
        totals: tuple[str, ...] = (f"{name}_count{labels} {_number(cumulative[-1])}\n",)
        if min(self.bounds, default=0.0) >= 0:
            totals += (f"{name}_sum{labels} {_number(self.sum)}\n",)
        elif form is Form.OPENMETRICS:
            totals = ()  # OpenMetrics has both or neither: if observations may be negative, their sum may fall
        buckets = enumerate(zip(bounds, cumulative, strict=True))
        return (
            *(f'{before}le="{bound}"}} {_number(n)}{shown.get(at, "")}\n' for at, (bound, n) in buckets),
            *totals,
        )


S = TypeVar("S", Value, Histogram)


class Family(Generic[S]):
    """All series of one metric; a metric without labels has one, `family.of()`."""

    def __init__(self, metric: Metric, make: Callable[[Metric, tuple[str, ...]], S]) -> None:
        self.metric = metric
        self.series: dict[tuple[str, ...], S] = {}  # by the values of the labels
        self._make: Callable[[Metric, tuple[str, ...]], S] = make

    def of(self, *values: str) -> S:
        """Return the series with these label values, in the order of their declaration; it is shown from now on.

        Raise ValueError if the numbers of values and labels differ.
        """
        found = self.series.get(values)
        return found if found is not None else self.series.setdefault(values, self._make(self.metric, values))

    def remove(self, *values: str) -> None:
        """Drop a series, if it is there."""
        self.series.pop(values, None)

    def drop(self, label: str, gone: Collection[str]) -> None:
        """Drop all series whose label has one of the values `gone`."""
        at = self.metric.labels.index(label)
        for values in [values for values in self.series if values[at] in gone]:
            del self.series[values]

    def shown(self, label: str, *, created: bool, form: Form) -> Iterator[tuple[bytes, Iterator[str]]]:
        """Yield the comment and the lines of the metric, then its series' start times.

        In OpenMetrics the start times are part of the metric, each next to its series.
        """
        metric, series = self.metric, self.series.copy()  # another thread may count meanwhile
        name = f"{family_name(metric)}_created"
        has_times = created and metric.kind is not Kind.GAUGE

        def began(each: S) -> str:
            return f"{name}{_braces(label, each.labels)} {_number(each.created_at)}\n"

        def lines(each: S) -> Iterable[str]:
            found: Iterable[str] = each.lines(metric.name, label, form)
            return (*found, began(each)) if has_times and form is Form.OPENMETRICS else found

        yield _comment(metric, form), (line for each in series.values() for line in lines(each))
        if has_times and series and form is Form.TEXT:
            of_times = Metric(name=name, kind=Kind.GAUGE, text=metric.text)
            yield _comment(of_times, form), (began(each) for each in series.values())


class Registry:
    """The metrics of one part of a process; several registries may form one page."""

    def __init__(self) -> None:
        self._families: dict[str, Family[Value] | Family[Histogram]] = {}
        self._sources: list[Family[Value] | Family[Histogram] | Callable[[], Reading]] = []

    def values(self, metric: Metric) -> Family[Value]:
        """Show this counter or gauge from now on. Raise ValueError if it is shown already."""
        return self._add(Family(metric, Value))

    def histograms(self, metric: Metric) -> Family[Histogram]:
        """Show this histogram from now on; otherwise as `values`."""
        return self._add(Family(metric, Histogram))

    def read(self, read: Callable[[], Reading]) -> None:
        """Show the result of `read` on each page.

        The event loop may turn between two rows, so they must not be taken from a dictionary that changes meanwhile.
        """
        self._sources.append(read)

    def drop(self, label: str, gone: Collection[str]) -> None:
        """Drop all series that have one of the values `gone` for this label."""
        for family in self._families.values():
            if label in family.metric.labels:
                family.drop(label, gone)

    def _add(self, family: Family[S]) -> Family[S]:
        if self._families.setdefault(family.metric.name, family) is not family:
            raise ValueError(f"{family.metric.name} is in the registry already")
        self._sources.append(family)
        return family

    def pieces(
        self, *, label: str = "", created: bool = False, form: Form = Form.TEXT
    ) -> Iterator[tuple[bytes, bytes]]:
        """Yield the comment and the lines of one metric after the other, at most LINES_AT_ONCE lines at a time.

        `label`: put first into each series, as `name="value"`. `created`: also show the start times of counters and
        histograms.
        """
        for source in tuple(self._sources):
            if isinstance(source, Family):
                shown = source.shown(label, created=created, form=form)
            else:
                shown = _shown(source(), label, form)
            for comment, lines in shown:
                yield comment, "".join(islice(lines, LINES_AT_ONCE)).encode("utf-8", "replace")
                while some := "".join(islice(lines, LINES_AT_ONCE)):
                    yield comment, some.encode("utf-8", "replace")

    def text(self, *, created: bool = False, form: Form = Form.TEXT) -> bytes:
        """Return the page at once, without its end."""
        page = MetricsPage(form)
        for comment, lines in self.pieces(created=created, form=form):
            page.take(comment, lines)
        return page.text()


class MetricsPage:
    """One page of several registries, which has each metric once; made in turns of the event loop.

    With hundreds of endpoints a page takes about ten milliseconds; picks would have to wait.
    """

    def __init__(self, form: Form = Form.TEXT, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._form = form
        self._lines: dict[bytes, list[bytes]] = {}  # by comment, in the order of the first registry
        self._clock = clock

    async def add(self, registry: Registry, **labels: str) -> None:
        """Add the metrics of a registry, with this label in each series, if given."""
        label, began = ",".join(_pairs(labels.items())), self._clock()
        for comment, lines in registry.pieces(label=label, form=self._form):
            self.take(comment, lines)
            if self._clock() - began >= TURN_SECONDS:
                await asyncio.sleep(0)
                began = self._clock()

    def take(self, comment: bytes, lines: bytes) -> None:
        """Add some lines of a metric."""
        self._lines.setdefault(comment, []).append(lines)

    def text(self) -> bytes:
        """Return the page, without its end."""
        return b"".join(part for comment, lines in self._lines.items() for part in (comment, *lines))


def _shown(reading: Reading, label: str, form: Form) -> Iterator[tuple[bytes, Iterator[str]]]:
    for metric, rows in reading:
        yield _comment(metric, form), _lines(metric, rows, label)


def _lines(metric: Metric, rows: Rows, label: str) -> Iterator[str]:
    return (f"{metric.name}{_braces(label, _labels(metric, values))} {_number(value)}\n" for values, value in rows)


def family_name(metric: Metric) -> str:
    """Return OpenMetrics' name for all samples of a metric: a counter's without its _total."""
    return metric.name.removesuffix("_total") if metric.kind is Kind.COUNTER else metric.name


def _comment(metric: Metric, form: Form) -> bytes:
    name, text = metric.name, metric.text.replace("\\", r"\\").replace("\n", r"\n")
    if form is Form.OPENMETRICS:
        name, text = family_name(metric), text.replace('"', r"\"")
    return f"# HELP {name} {text}\n# TYPE {name} {metric.kind}\n".encode()


def _labels(metric: Metric, values: tuple[str, ...]) -> str:
    return ",".join(_pairs(sorted(zip(metric.labels, values, strict=True))))


def _pairs(labels: Iterable[tuple[str, str]]) -> Iterator[str]:
    for name, value in labels:
        quoted = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
        yield f'{name}="{quoted}"'


def _braces(first: str, labels: str) -> str:
    both = f"{first},{labels}" if first and labels else first or labels
    return f"{{{both}}}" if both else ""


def _number(value: float) -> str:
    text = repr(float(value))
    return SPECIAL.get(text, text)
