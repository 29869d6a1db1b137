"""The arithmetic of the benchmark, and what its Envoy is."""

import asyncio

import pytest

from bench.bench_envoy import EnvoyAddresses, two_route_config
from bench.load import read_response
from bench.prompts import make_prompt_set
from bench.report import RouteSamples, budget_lines, cell, quantile
from extproc.local.envoy_config import SocketAddress, named, read_template

IDLE = {"extproc": 10.0, "envoy": 0.0}


def samples(latencies_ms: list[float], *, picker_ms: float) -> RouteSamples:
    cpu_ms = {"extproc": picker_ms, "envoy": 40.0}
    return RouteSamples(latencies_ms=latencies_ms, seconds=2.0, cpu_ms=cpu_ms, cpu_seconds=4.0)


def test_a_quantile_is_one_of_the_values_whatever_their_order() -> None:
    assert [quantile([5, 1, 4, 2, 3], share) for share in (0.0, 0.5, 0.95, 1.0)] == [1, 3, 5, 5]


def test_a_cell_subtracts_the_idle_cpu_and_compares_the_routes_quantile_by_quantile() -> None:
    found = cell(
        size_tokens=8000,
        counted_tokens=8012.345,
        concurrency=1,
        picked=samples([3.0] * 99 + [9.0], picker_ms=240.0),
        direct=samples([1.0] * 99 + [2.0], picker_ms=40.0),
        idle_ms_per_second=IDLE,
    )

    assert found == {
        "prompt_tokens": 8000,
        "counted_tokens": 8012.3,
        "concurrency": 1,
        "added_ms": {"p50": 2.0, "p95": 2.0, "p99": 7.0},
        "picker_cpu_ms_per_request": 2.0,
        "requests_per_second_per_picker_core": 500.0,
        "with_picker": {
            "requests": 100,
            "requests_per_second": 50.0,
            "latency_ms": {"p50": 3.0, "p95": 3.0, "p99": 9.0},
            "cpu_ms_per_request": {"extproc": 2.4, "envoy": 0.4},
            "cpu_ms_per_request_above_idle": {"extproc": 2.0, "envoy": 0.4},
        },
        "without_picker": {
            "requests": 100,
            "requests_per_second": 50.0,
            "latency_ms": {"p50": 1.0, "p95": 1.0, "p99": 2.0},
            "cpu_ms_per_request": {"extproc": 0.4, "envoy": 0.4},
            "cpu_ms_per_request_above_idle": {"extproc": 0.0, "envoy": 0.4},
        },
    }
    assert budget_lines([found]) == [
        ("picker CPU a request at 8000 tokens, concurrency 1: 2.00 ms (budget 1.5 ms)", False),
        ("added p50 at 8000 tokens, concurrency 1: 2.00 ms (budget 3.0 ms)", True),
    ]


def test_the_second_route_differs_from_the_product_s_in_the_missing_picker_alone() -> None:
    def address(port: int) -> SocketAddress:
        return SocketAddress(host="127.0.0.1", port=port)

    config = two_route_config(
        read_template("local.yaml"),
        addresses=EnvoyAddresses(picked=address(1), direct=address(2), admin=address(3)),
        picker=address(4),
        pods=[address(5)],
    )
    listeners = config["static_resources"]["listeners"]
    picked, direct = named(listeners, "gateway"), named(listeners, "direct")
    managers = [part["filter_chains"][0]["filters"][0]["typed_config"] for part in (picked, direct)]
    filters = [[part["name"] for part in manager.pop("http_filters")] for manager in managers]
    ports = [part.pop("address")["socket_address"]["port_value"] for part in (picked, direct)]
    for manager, part in zip(managers, (picked, direct), strict=True):
        del manager["stat_prefix"], part["name"]

    assert (ports, picked) == ([1, 2], direct)
    assert filters == [
        ["envoy.filters.http.ext_proc.kvmesh", "envoy.filters.http.router"],
        ["envoy.filters.http.router"],
    ]


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
