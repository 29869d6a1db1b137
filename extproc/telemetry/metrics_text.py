"""A registry as Prometheus text in small turns of the loop: with hundreds of endpoints it takes long, and picks wait.

Used by `telemetry` and `pool_metrics`. Times at which series began (`_created`) are left out: nobody asks for them, and
they are a third of the page. Format: https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

TURN_SECONDS = 0.002
SERIES_AT_ONCE = 100  # less than a millisecond
CREATED, TOTAL = "_created", "_total"
_number: Callable[[float], str] = floatToGoString


async def metric_lines(
    registry: CollectorRegistry, *, label: str = "", clock: Callable[[], float] = time.perf_counter
) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield comment and lines of one family after the other; a large one comes in pieces, each with its comment.

    `label`: put first into each series, as `name="value"`.
    """
    began = clock()
    for collector in tuple(registry._collector_to_names):  # `registry.collect()` gives whole families only
        for comment, lines in _families(collector, label):
            some = "".join(islice(lines, SERIES_AT_ONCE))
            is_first = True
            while some or is_first:
                is_first = False
                yield comment, some.encode()
                if clock() - began >= TURN_SECONDS:
                    await asyncio.sleep(0)
                    began = clock()
                some = "".join(islice(lines, SERIES_AT_ONCE))


def quoted(value: str) -> str:
    """Return a label's value as it stands between its quotation marks."""
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _families(collector: Collector, label: str) -> Iterator[tuple[bytes, Iterator[str]]]:
    if isinstance(collector, Counter | Gauge) and collector._labelnames:
        # thousands of series, and the library makes two objects and two dictionaries of each
        name = collector._name + (TOTAL if isinstance(collector, Counter) else "")
        yield _comment(name, collector._documentation, collector._type), _children(collector, name, label)
        return
    for metric in collector.collect():
        name = metric.name + (TOTAL if metric.type == "counter" else "")
        yield _comment(name, metric.documentation, metric.type), _samples(metric, label)


def _children(metric: Counter | Gauge, name: str, label: str) -> Iterator[str]:
    order = sorted(range(len(metric._labelnames)), key=metric._labelnames.__getitem__)
    names = [(i, metric._labelnames[i]) for i in order]
    prefix = f"{name}{{{label}," if label else f"{name}{{"
    children: tuple[tuple[Sequence[str], Any], ...] = tuple(metric._metrics.items())
    for values, child in children:
        labels = ",".join([f'{key}="{quoted(values[i])}"' for i, key in names])
        yield f"{prefix}{labels}}} {_number(child._value.get())}\n"


def _samples(metric: Metric, label: str) -> Iterator[str]:
    return (_line(sample, label) for sample in metric.samples if not sample.name.endswith(CREATED))


def _line(sample: Sample, label: str) -> str:
    labels = ",".join([f'{name}="{quoted(value)}"' for name, value in sorted(sample.labels.items())])
    both = f"{label},{labels}" if label and labels else label or labels
    return f"{sample.name}{{{both}}} {_number(sample.value)}\n" if both else _bare(sample)


def _bare(sample: Sample) -> str:
    return f"{sample.name} {_number(sample.value)}\n"


def _comment(name: str, text: str, kind: str) -> bytes:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n".encode()
