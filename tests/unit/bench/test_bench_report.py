"""The arithmetic of the benchmark, what it prints, and what its Envoy and its bare picker are."""

import asyncio
import io
from typing import Any

import pytest
from rich.console import Console

from bench.bare_picker import PicksInTurn
from bench.bench_envoy import EnvoyAddresses, three_route_config
from bench.cpu_time import CpuReading, CpuSpent, spent_between
from bench.load import read_response
from bench.plan import QUICK, Plan
from bench.prompts import make_prompt_set
from bench.report import Case, Measurement, Round, Turn, Verdict, case_facts, facts, quantile, spread, verdicts
from bench.tables import WIDTH, tables
from extproc.ext_proc.exchange import RequestFacts
from operate.local.envoy_config import SocketAddress, named, read_template

IDLE = {"extproc": 10.0, "bare": 1.0, "envoy": 0.0}
ANY_REQUEST = RequestFacts(method="POST", path="/v1/completions", objective=None, request_id="")


def turn(latency_ms: float, *, picker_ms: float = 40.0, bare_ms: float = 4.0) -> Turn:
    """Ten requests in two seconds, CPU read over four."""
    cpu_ms = {"extproc": picker_ms, "bare": bare_ms, "envoy": 5.0}
    return Turn(
        latencies_ms=[latency_ms] * 9 + [2 * latency_ms], seconds=2.0, spent=CpuSpent(seconds=4.0, cpu_ms=cpu_ms)
    )


def round_of(*, loop_ns: float, picker: Turn, bare: Turn, direct: Turn) -> Round:
    return Round(loop_ns_per_iteration=loop_ns, turns={"picker": picker, "bare": bare, "direct": direct})


def case_of_three_rounds(*, size_tokens: int = 8000, concurrency: int = 1, slower: float = 1.0) -> Case:
    """The machine is twice as slow in the second round; the differences within a round are what counts."""
    latencies_ms = [[4.0, 3.0, 2.0], [8.0, 6.0, 4.0], [5.0, 3.0, 2.0]]
    cpu_ms, loop_ns = [(60.0, 14.0), (80.0, 24.0), (70.0, 15.0)], (50.0, 100.0, 60.0)
    rounds = [
        round_of(
            loop_ns=loop_ns[i],
            picker=turn(slower * latencies_ms[i][0], picker_ms=slower * cpu_ms[i][0]),
            bare=turn(slower * latencies_ms[i][1], bare_ms=cpu_ms[i][1]),
            direct=turn(slower * latencies_ms[i][2]),
        )
        for i in range(3)
    ]
    return Case(size_tokens=size_tokens, counted_tokens=8012.345, concurrency=concurrency, rounds=rounds)


def whole_result(cases: list[Case]) -> dict[str, Any]:
    """What `bench.run` hands to the tables."""
    measured = facts(Measurement(cases=cases, idle_ms_per_second=IDLE, loop_ns=[50.0, 100.0, 60.0]))
    for case in measured["cases"]:
        for route in case["routes"].values():
            route["cpu_ms_per_request_above_idle"] |= {
                name: spread([12.345]) for name in ("redis", "indexer", "pods", "envoy")
            }
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "machine": {"cpu": "A Processor @ 2.50GHz", "cores": 2, "kernel": "6", "python": "3.11"},
        "load_average": {"before": 0.1, "after": 1.5},
        "stolen_cpu_percent": 0.25,
        **measured,
        "verdicts": [
            {"promise": one.promise, "measured_ms": one.measured_ms, "budget_ms": one.budget_ms, "met": one.met}
            for one in verdicts(measured["cases"])
        ],
    }


def printed(result: dict[str, Any]) -> str:
    page = io.StringIO()
    Console(file=page, width=WIDTH).print(tables(result), highlight=False)
    return page.getvalue()


def test_a_quantile_is_one_of_the_values_whatever_their_order() -> None:
    assert [quantile([5, 1, 4, 2, 3], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]


def test_a_case_compares_the_routes_round_by_round_and_subtracts_the_idle_cpu() -> None:
    found = case_facts(case_of_three_rounds(), idle_ms_per_second=IDLE)
    routes = found.pop("routes")

    assert found == {
        "prompt_tokens": 8000,
        "counted_tokens": 8012.3,
        "concurrency": 1,
        "rounds": 3,
        "requests_per_route": 30,
        "loop_ns_per_iteration": {"median": 60.0, "min": 50.0, "max": 100.0},
        "added_by_picker": {
            "p50_ms": {"median": 3.0, "min": 2.0, "max": 4.0},
            "p95_ms": {"median": 6.0, "min": 4.0, "max": 8.0},
        },
        "added_by_bare_exchange": {
            "p50_ms": {"median": 1.0, "min": 1.0, "max": 2.0},
            "p95_ms": {"median": 2.0, "min": 2.0, "max": 4.0},
        },
        "picker_cpu_ms": {"median": 3.0, "min": 2.0, "max": 4.0},
        "bare_exchange_cpu_ms": {"median": 1.1, "min": 1.0, "max": 2.0},
        "picking_cpu_ms": {"median": 1.9, "min": 1.0, "max": 2.0},
        "requests_per_second_per_picker_core": 333.3,
    }
    assert routes["direct"] == {
        "p50_ms": {"median": 2.0, "min": 2.0, "max": 4.0},
        "p95_ms": {"median": 4.0, "min": 4.0, "max": 8.0},
        "requests_per_second": {"median": 5.0, "min": 5.0, "max": 5.0},
        "cpu_ms_per_request_above_idle": {
            "extproc": {"median": 0.0, "min": 0.0, "max": 0.0},
            "bare": {"median": 0.0, "min": 0.0, "max": 0.0},
            "envoy": {"median": 0.5, "min": 0.5, "max": 0.5},
        },
    }


def test_the_budgets_are_judged_at_the_largest_prompt_and_the_latency_at_the_lowest_concurrency() -> None:
    cases = [
        case_facts(case_of_three_rounds(size_tokens=size, concurrency=concurrency), idle_ms_per_second=IDLE)
        for size, concurrency in ((200, 1), (8000, 16), (8000, 1))
    ]
    cpu = {"median": 3.0, "min": 2.0, "max": 4.0}

    assert verdicts(cases) == [
        Verdict(promise="picker CPU a request, 8000 tokens, concurrency 1", measured_ms=cpu, budget_ms=1.5, met=False),
        Verdict(promise="picker CPU a request, 8000 tokens, concurrency 16", measured_ms=cpu, budget_ms=1.5, met=False),
        Verdict(promise="added p50, 8000 tokens, concurrency 1", measured_ms=cpu, budget_ms=3.0, met=True),
    ]


def test_the_tables_fit_the_width_without_cutting_a_word_and_say_which_budget_was_missed() -> None:
    page = printed(whole_result([case_of_three_rounds(size_tokens=200), case_of_three_rounds(concurrency=16)]))
    lines = [line.rstrip() for line in page.splitlines()]

    assert "…" not in page
    assert max(len(line) for line in lines) <= WIDTH
    assert lines[-2:] == [
        "MISSED picker CPU a request, 8000 tokens, concurrency 16: 3.00 (2.00..4.00) ms, budget 1.5 ms",
        "MET    added p50, 8000 tokens, concurrency 16: 3.00 (2.00..4.00) ms, budget 3.0 ms",
    ]


def test_the_tables_fit_the_width_also_with_numbers_of_a_slow_machine() -> None:
    slow = case_of_three_rounds(concurrency=16, slower=123.456)
    page = printed(whole_result([slow]))

    assert "…" not in page
    assert max(len(line.rstrip()) for line in page.splitlines()) <= WIDTH


def test_the_cpu_between_two_readings_is_their_difference_and_a_rate() -> None:
    spent = spent_between(
        CpuReading(at=10.0, cpu_ms={"envoy": 100.0, "pods": 7.0}),
        CpuReading(at=14.0, cpu_ms={"envoy": 102.0, "pods": 7.0}),
    )

    assert spent == CpuSpent(seconds=4.0, cpu_ms={"envoy": 2.0, "pods": 0.0})
    assert spent.per_second() == {"envoy": 0.5, "pods": 0.0}


def test_the_other_routes_differ_from_the_product_s_in_the_picker_alone() -> None:
    def address(port: int) -> SocketAddress:
        return SocketAddress(host="127.0.0.1", port=port)

    config = three_route_config(
        read_template("local.yaml"),
        addresses=EnvoyAddresses(picker=address(1), bare=address(2), direct=address(3), admin=address(4)),
        picker=address(5),
        bare_picker=address(6),
        pods=[address(7)],
    )["static_resources"]
    listeners = [named(config["listeners"], name) for name in ("gateway", "bare", "direct")]
    managers = [part["filter_chains"][0]["filters"][0]["typed_config"] for part in listeners]
    filters = [manager.pop("http_filters") for manager in managers]
    ports = [part.pop("address")["socket_address"]["port_value"] for part in listeners]
    for manager, part in zip(managers, listeners, strict=True):
        del manager["stat_prefix"], part["name"]
    asked = [parts[-2]["typed_config"]["grpc_service"]["envoy_grpc"].pop("cluster_name") for parts in filters[:2]]
    clusters = [named(config["clusters"], name) for name in asked]
    picker_ports = [
        part.pop("load_assignment")["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]["socket_address"][
            "port_value"
        ]
        for part in clusters
    ]

    assert (ports, picker_ports, asked) == ([1, 2, 3], [5, 6], ["picker", "bare-picker"])
    assert listeners[1:] == listeners[:1] * 2
    assert filters[1:] == [filters[0], filters[0][-1:]]
    assert clusters[1] == clusters[0] | {"name": "bare-picker"}


async def test_the_bare_picker_names_each_pod_first_in_turn_and_at_most_three() -> None:
    picks = PicksInTurn(["a:1", "b:2", "c:3", "d:4"])

    named_pods = [(await picks.pick(ANY_REQUEST, b"unread")).endpoints for _ in range(5)]

    assert named_pods == [
        ("a:1", "b:2", "c:3"),
        ("b:2", "c:3", "d:4"),
        ("c:3", "d:4", "a:1"),
        ("d:4", "a:1", "b:2"),
        ("a:1", "b:2", "c:3"),
    ]


def test_every_plan_has_at_least_five_rounds_and_ends_within_four_minutes() -> None:
    assert [(plan.rounds >= 5, plan.limit_seconds < 240) for plan in (Plan(), QUICK)] == [(True, True)] * 2


@pytest.mark.parametrize(
    "wire",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    ],
)
async def test_an_answer_is_read_to_its_end_and_not_further(wire: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(wire + b"NEXT")

    assert await read_response(reader) == (200, b"hello")
    assert await reader.readexactly(4) == b"NEXT"


def test_bodies_share_their_prefix_in_turn_and_no_two_are_the_same() -> None:
    words = tuple(f"word{number}" for number in range(1000))
    prompts = make_prompt_set(200, model="tiny", words=words, prefix_count=2, seed=1)

    bodies = [prompts.body(number, words=words, seed=1).decode() for number in range(6)]

    assert len(set(bodies)) == 6
    assert [[prefix in body for prefix in prompts.prefixes] for body in bodies] == [[True, False], [False, True]] * 3
    assert [len(prefix.split()) for prefix in prompts.prefixes] == [180, 180]
