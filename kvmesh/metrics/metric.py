"""Declarations of metrics, and their table in docs/reference/metrics.md.

Each process declares its metrics in one module; a registry shows only declared ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Over(StrEnum):
    """How the series of several replicas of a process are combined."""

    SUM = "sum"  # each replica counts its own part
    EACH = "same"  # every replica shows the same thing
    ONE = "one"  # the replica that follows the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str  # as in queries: a counter's ends with _total
    kind: Kind
    text: str  # the meaning
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # upper bounds of a histogram's buckets, ascending; the last bucket has none
    over: Over = Over.SUM


def counter(name: str, text: str, *labels: str, over: Over = Over.SUM) -> Metric:
    """Declare a counter; its name ends with _total."""
    return Metric(name=name, kind=Kind.COUNTER, text=text, labels=labels, over=over)


def gauge(name: str, text: str, *labels: str, over: Over = Over.SUM) -> Metric:
    """Declare a gauge."""
    return Metric(name=name, kind=Kind.GAUGE, text=text, labels=labels, over=over)


def histogram(name: str, text: str, *labels: str, bounds: tuple[float, ...], over: Over = Over.SUM) -> Metric:
    """Declare a histogram; `bounds` as in `Metric`."""
    return Metric(name=name, kind=Kind.HISTOGRAM, text=text, labels=labels, bounds=bounds, over=over)


# of every process
BUILD = gauge("kvmesh_build_info", "Release of this process.", "process", "python", "version", over=Over.EACH)


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return the metrics as a Markdown table, sorted by name; the type names an unusual combination of replicas."""
    lines = ["| metric | type | labels | meaning |\n|---|---|---|---|"]
    for metric in sorted(metrics, key=lambda metric: metric.name):
        labels = ", ".join(f"`{label}`" for label in sorted(metric.labels))
        text = metric.text.replace("|", "\\|")
        usual = Over.EACH if metric.kind is Kind.GAUGE else Over.SUM
        kind = metric.kind if metric.over is usual else f"{metric.kind}, {metric.over}"
        lines.append(f"| `{metric.name}` | {kind} | {labels} | {text} |")
    return "\n".join(lines) + "\n"
