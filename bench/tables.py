"""The result for a person: three tables and the verdicts, at most 100 columns wide."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

WIDTH = 100

Facts = Mapping[str, Any]


def tables(result: Facts) -> Group:
    """The whole result."""
    cases = result["cases"]
    return Group(
        latency_table(cases),
        cpu_table(cases),
        others_table(cases),
        *(Text(line) for line in conditions(result)),
        Text(),
        *(verdict_line(verdict) for verdict in result["verdicts"]),
    )


def latency_table(cases: Sequence[Facts]) -> Table:
    """What the pickers add to an HTTP request."""
    table = _table(
        "Latency, ms: median of the rounds (least..greatest)",
        ("no picker\np50", "bare exchange\nadds to p50", "picker\nadds to p50", "picker\nadds to p95"),
    )
    for case in cases:
        _add(
            table,
            case,
            _spread(case["routes"]["direct"]["p50_ms"]),
            _spread(case["added_by_bare_exchange"]["p50_ms"]),
            _spread(case["added_by_picker"]["p50_ms"]),
            _spread(case["added_by_picker"]["p95_ms"]),
        )
    return table


def cpu_table(cases: Sequence[Facts]) -> Table:
    """What the picker's process spends, and how much of it a picker without any picking spends too."""
    table = _table(
        "Picker CPU, ms a request above idle: median of the rounds (least..greatest)",
        ("picker", "bare gRPC\nexchange", "picking\nitself", "requests/s per\npicker core"),
    )
    for case in cases:
        _add(
            table,
            case,
            _spread(case["picker_cpu_ms"]),
            _spread(case["bare_exchange_cpu_ms"]),
            _spread(case["picking_cpu_ms"]),
            f"{case['requests_per_second_per_picker_core']:.0f}",
        )
    return table


def others_table(cases: Sequence[Facts]) -> Table:
    """The other processes, and what the two cores together carry."""
    table = _table(
        "Other processes' CPU, ms a request above idle, and throughput of everything: medians",
        (
            *("Envoy\npicker", "Envoy\nbare", "Envoy\nneither", "Redis", "indexer", "pods"),
            *("req/s\npicker", "req/s\nbare", "req/s\nneither"),
        ),
    )
    for case in cases:
        routes = case["routes"]
        spent = {name: route["cpu_ms_per_request_above_idle"] for name, route in routes.items()}
        cpu = [spent[name]["envoy"] for name in routes] + [
            spent["picker"][process] for process in ("redis", "indexer", "pods")
        ]
        rates = [route["requests_per_second"]["median"] for route in routes.values()]
        _add(table, case, *(f"{value['median']:.2f}" for value in cpu), *(f"{rate:.0f}" for rate in rates))
    return table


def conditions(result: Facts) -> list[str]:
    """What must be known to compare this result with another one."""
    plate, loop = result["machine"], result["calibration"]["loop_ns_per_iteration"]
    load = result["load_average"]
    idle = ", ".join(f"{name} {value:.1f}" for name, value in result["idle_cpu_ms_per_second"].items())
    return [
        f"{plate['cpu']}, {plate['cores']} cores for all of it, Python {plate['python']}",
        f"calibration loop: {_short(loop['median'])} ns an iteration ({_short(loop['min'])}..{_short(loop['max'])});"
        f" CPU stolen from this machine: {result['stolen_cpu_percent']:.1f} %",
        f"load average {load['before']:.2f} before, {load['after']:.2f} after; {result['date']}",
        f"idle, CPU ms a second: {idle}",
    ]


def verdict_line(verdict: Facts) -> Text:
    """One promise, plainly."""
    met = verdict["met"]
    line = (
        f"{'MET   ' if met else 'MISSED'} {verdict['promise']}:"
        f" {_spread(verdict['measured_ms'])} ms, budget {verdict['budget_ms']} ms"
    )
    return Text(line, style="green" if met else "red")


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("prompt\ntokens", "at\nonce", *headings):
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    return table


def _add(table: Table, case: Facts, *values: str) -> None:
    table.add_row(str(case["prompt_tokens"]), str(case["concurrency"]), *values)


def _spread(value: Mapping[str, float]) -> str:
    return f"{_short(value['median'])} ({_short(value['min'])}..{_short(value['max'])})"


def _short(value: float) -> str:
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.0f}"  # three digits are all that the noise leaves
