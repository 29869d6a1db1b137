"""Declarations of metrics, and the table of them in docs/reference/metrics.md.

Each process declares its metrics in one module; a registry shows nothing that is not declared.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

TABLE_HEAD = "| metric | type | unit | labels | what it means | over replicas |\n|---|---|---|---|---|---|"
UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "ratio", "money")


class Kind(StrEnum):
    """The type of a metric, as Prometheus calls it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Over(StrEnum):
    """How the series of several replicas of a process are combined."""

    SUM = "add up"  # each replica counts its own part
    EACH = "each shows it"  # every replica shows the same thing
    ONE = "one shows it"  # the replica that follows the stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric."""

    name: str  # as queries have it: a counter's ends with _total
    kind: Kind
    text: str  # what it means
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()  # of a histogram's buckets, ascending, without the last one, which has none
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
BUILD = gauge("kvmesh_build_info", "Which release this process is.", "process", "python", "version", over=Over.EACH)


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Return the metrics as a Markdown table, sorted by name."""
    lines = [TABLE_HEAD]
    for metric in sorted(metrics, key=lambda metric: metric.name):
        labels = ", ".join(f"`{label}`" for label in sorted(metric.labels))
        unit = next((unit for unit in UNITS if unit in metric.name.split("_")), "")
        text = metric.text.replace("|", "\\|")
        lines.append(f"| `{metric.name}` | {metric.kind} | {unit} | {labels} | {text} | {metric.over} |")
    return "\n".join(lines) + "\n"
