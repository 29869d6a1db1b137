"""What was measured, as numbers for a file. Pure: the tables are in `tables`, the machine's name plate in `machine`.

Every number is the median of the rounds with the least and the greatest; differences between routes are taken round by
round, because two turns of one round met the same machine.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cpu_time import CpuSpent

PICKER_BUDGET_MS = 1.5  # CPU a request at 8k tokens, nine tenths known
ADDED_BUDGET_MS = 3.0  # p50 at concurrency 1
QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95}
PICKER, BARE, DIRECT = "extproc", "bare", "envoy"  # processes by name


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One route in one round: latencies in milliseconds, wall seconds, and what every process spent meanwhile."""

    latencies_ms: Sequence[float]
    seconds: float
    spent: CpuSpent


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One turn of every route, by route, and how slow the machine was just before."""

    loop_ns_per_iteration: float
    turns: Mapping[str, Turn]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One prompt size at one concurrency."""

    size_tokens: int
    counted_tokens: float
    concurrency: int
    rounds: Sequence[Round]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A whole run; `loop_ns` are all calibrations in order."""

    cases: Sequence[Case]
    idle_ms_per_second: Mapping[str, float]
    loop_ns: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One promise and whether the numbers keep it."""

    promise: str
    measured_ms: Mapping[str, float]  # a spread
    budget_ms: float
    met: bool


def spread(values: Sequence[float], *, digits: int = 3) -> dict[str, float]:
    """Median, least and greatest."""
    facts = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return {name: round(value, digits) for name, value in facts.items()}


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of the values lies (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cpu_ms_per_request(turn: Turn, process: str, *, idle_ms_per_second: Mapping[str, float]) -> float:
    """CPU milliseconds a request beyond what the process spends without any."""
    above = turn.spent.cpu_ms[process] - idle_ms_per_second[process] * turn.spent.seconds
    return above / len(turn.latencies_ms)


def case_facts(case: Case, *, idle_ms_per_second: Mapping[str, float]) -> dict[str, Any]:
    """One row of each table: latency that the pickers add, and CPU a request."""

    def cpu(one: Round, route: str, process: str) -> float:
        return cpu_ms_per_request(one.turns[route], process, idle_ms_per_second=idle_ms_per_second)

    def added(route: str, share: float) -> dict[str, float]:
        return spread(
            [
                quantile(one.turns[route].latencies_ms, share) - quantile(one.turns["direct"].latencies_ms, share)
                for one in case.rounds
            ]
        )

    picker = [cpu(one, "picker", PICKER) for one in case.rounds]
    bare = [cpu(one, "bare", BARE) for one in case.rounds]
    return {
        "prompt_tokens": case.size_tokens,
        "counted_tokens": round(case.counted_tokens, 1),
        "concurrency": case.concurrency,
        "rounds": len(case.rounds),
        "requests_per_route": sum(len(one.turns["picker"].latencies_ms) for one in case.rounds),
        "loop_ns_per_iteration": spread([one.loop_ns_per_iteration for one in case.rounds], digits=1),
        "added_by_picker": {name: added("picker", share) for name, share in QUANTILES.items()},
        "added_by_bare_exchange": {name: added("bare", share) for name, share in QUANTILES.items()},
        "picker_cpu_ms": spread(picker),
        "bare_exchange_cpu_ms": spread(bare),
        "picking_cpu_ms": spread([whole - part for whole, part in zip(picker, bare, strict=True)]),
        "requests_per_second_per_picker_core": round(1000 / statistics.median(picker), 1),
        "routes": {
            route: _route_facts([one.turns[route] for one in case.rounds], idle_ms_per_second=idle_ms_per_second)
            for route in case.rounds[0].turns
        },
    }


def _route_facts(turns: Sequence[Turn], *, idle_ms_per_second: Mapping[str, float]) -> dict[str, Any]:
    return {
        **{name: spread([quantile(turn.latencies_ms, share) for turn in turns]) for name, share in QUANTILES.items()},
        "requests_per_second": spread([len(turn.latencies_ms) / turn.seconds for turn in turns], digits=1),
        "cpu_ms_per_request_above_idle": {
            process: spread(
                [cpu_ms_per_request(turn, process, idle_ms_per_second=idle_ms_per_second) for turn in turns]
            )
            for process in turns[0].spent.cpu_ms
        },
    }


def facts(measurement: Measurement) -> dict[str, Any]:
    """The whole measurement as plain values."""
    idle = measurement.idle_ms_per_second
    return {
        "calibration": {
            "loop_ns_per_iteration": spread(measurement.loop_ns, digits=1),
            "samples": len(measurement.loop_ns),
        },
        "idle_cpu_ms_per_second": {name: round(value, 2) for name, value in idle.items()},
        "cases": [case_facts(case, idle_ms_per_second=idle) for case in measurement.cases],
    }


def verdicts(cases: Sequence[Mapping[str, Any]]) -> list[Verdict]:
    """The promises for the largest size: CPU a request at every concurrency, added latency at the lowest."""
    size = max(case["prompt_tokens"] for case in cases)
    largest = sorted((case for case in cases if case["prompt_tokens"] == size), key=lambda case: case["concurrency"])
    found = [
        _verdict(
            f"picker CPU a request, {size} tokens, concurrency {case['concurrency']}",
            case["picker_cpu_ms"],
            PICKER_BUDGET_MS,
        )
        for case in largest
    ]
    quietest = largest[0]
    promise = f"added p50, {size} tokens, concurrency {quietest['concurrency']}"
    return [*found, _verdict(promise, quietest["added_by_picker"]["p50_ms"], ADDED_BUDGET_MS)]


def _verdict(promise: str, measured: Mapping[str, float], budget_ms: float) -> Verdict:
    return Verdict(promise=promise, measured_ms=measured, budget_ms=budget_ms, met=measured["median"] <= budget_ms)
