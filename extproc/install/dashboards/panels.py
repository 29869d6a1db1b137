"""What a dashboard consists of, as values: rows of panels, and the queries behind each. `grafana_json` writes them."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a panel shows its data; the words are Grafana's."""

    LINES = "timeseries"
    NUMBER = "stat"
    BARS = "bargauge"
    TABLE = "table"


class Unit(StrEnum):
    """What a panel's numbers are; the words are Grafana's."""

    COUNT = "short"
    SHARE = "percentunit"  # 0..1
    SECONDS = "s"
    BYTES = "bytes"
    REQUESTS_A_SECOND = "reqps"
    A_SECOND = "cps"
    PLAIN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisQuery:
    """One command to the index's own Redis; `fields` are those of the answer that are shown (none: all)."""

    command: tuple[str, ...]
    fields: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel; `says` is its description: what is seen, and what is to be thought of it."""

    title: str
    says: str
    queries: tuple[Query | RedisQuery, ...]  # all of one kind
    unit: Unit = Unit.COUNT
    kind: Kind = Kind.LINES
    width: int = 8  # of 24
    height: int = 8
    stacked: bool = False
    yellow: float | None = None  # from here on; below `red` is better
    red: float | None = None  # from here on; less than `yellow`: from there downwards
    highest: float | None = None  # of the axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variable:
    """What the reader chooses at the top; `$name` in expressions."""

    name: str
    label: str
    values: str  # label_values(…)
    has_all: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """One dashboard; the uid is part of its address and never changes."""

    uid: str
    title: str
    says: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def uses_redis(self) -> bool:
        """Whether it needs the Redis data source."""
        return any(isinstance(query, RedisQuery) for panel in self.panels for query in panel.queries)

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Return all panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)


# where no pools are told apart, nothing has the label, and "all" matches that, too
POOL = Variable(name="pool", label="Pool", values="label_values(kvmesh_decisions_total, pool)")
IN_POOL = 'pool=~"$pool"'


def per_second(counter: str, *by: str, where: str = IN_POOL) -> str:
    """Return the rate of a counter over all replicas, by labels."""
    grouped = f" by ({', '.join(by)})" if by else ""
    return f"sum{grouped} (rate({counter}{{{where}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, *by: str, where: str = IN_POOL) -> str:
    """Return a quantile of a histogram over all replicas, by labels."""
    grouped = ", ".join((*by, "le"))
    return f"histogram_quantile({share}, sum by ({grouped}) (rate({histogram}_bucket{{{where}}}[$__rate_interval])))"


def quantiles(histogram: str, *by: str, where: str = IN_POOL) -> tuple[Query, ...]:
    """Return p50, p95 and p99."""
    who = " ".join(f"{{{{{label}}}}}" for label in by)
    return tuple(
        Query(expr=quantile(share, histogram, *by, where=where), legend=f"p{share * 100:.0f} {who}".strip())
        for share in (0.5, 0.95, 0.99)
    )
