"""What the picker costs: `python -m bench.run [--quick] [--out FILE] [--name NAME]`.

One real Envoy with two listeners, with ext_proc and without, before simulated pods on loopback, measured in turn for
chats of three sizes of which nine tenths are a known prefix. Writes JSON and prints tables.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console

from bench.bench_envoy import EnvoyAddresses, envoy_process
from bench.cpu_time import CpuSum, read_cpu
from bench.load import Job, LoadProcess
from bench.prompts import PromptSet, chat_body, count_tokens, make_prompt_set, vocabulary_words
from bench.report import RouteSamples, cell, machine, tables, versions
from bench.running_stack import HOST, running_stack
from extproc.local.envoy_config import SocketAddress
from extproc.local.ports import pick_free_port
from extproc.local.processes import Supervisor
from extproc.local.service import simulated_tokenizer

RESULTS = Path(__file__).parent / "results"
CHAT_PATH = "/v1/chat/completions"
SEED = 2
# pods that answer at once and forget nothing: what is measured must not wait for them
SIMULATOR: dict[str, object] = {
    "prefill_tokens_per_second": 1e9,
    "inter_token_ms": 0.1,
    "kv_blocks": 65_536,
    "max_num_seqs": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured; `requests` are per cell and route, sent in `rounds` that alternate between the routes."""

    sizes_tokens: tuple[int, ...] = (200, 2000, 8000)
    requests: tuple[tuple[int, int], ...] = ((1, 300), (16, 800))  # (concurrency, requests)
    rounds: int = 10
    prefixes: int = 8
    pods: int = 4
    idle_seconds: float = 8.0
    limit_seconds: float = 900.0


QUICK = Plan(requests=((1, 60), (16, 160)), rounds=4, idle_seconds=3.0, limit_seconds=240.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Everything that one measurement talks to."""

    plan: Plan
    directory: Path
    admin_url: str
    pods: tuple[str, ...]
    picked: SocketAddress
    direct: SocketAddress
    pids: dict[str, int]
    load: LoadProcess
    session: aiohttp.ClientSession
    console: Console


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-<name>.json")
    parser.add_argument("--name", default="loopback", help="part of the default file name (default: loopback)")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    began = datetime.now(UTC)
    result = asyncio.run(measure(plan, date=began))
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-{arguments.name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(tables(result))
    console.print(f"written to {out}", highlight=False, soft_wrap=True)


async def measure(plan: Plan, *, date: datetime) -> dict[str, Any]:
    """Start everything, measure every cell, end everything."""
    console = Console(stderr=True)
    load_before = round(os.getloadavg()[0], 2)
    async with asyncio.timeout(plan.limit_seconds):
        with tempfile.TemporaryDirectory(prefix="kvmesh-bench-") as name:
            directory = Path(name)
            async with running_stack(directory=directory, pods=plan.pods, simulator=SIMULATOR) as facts:
                result = await with_envoy(plan, facts, directory=directory, console=console)
    about = {
        "date": date.isoformat(timespec="seconds"),
        "machine": machine(),
        "load_average_before": load_before,  # whatever else ran on this machine is in every number
        "versions": versions(),
    }
    return {**about, "plan": asdict(plan), "simulator": dict(SIMULATOR), **result}


async def with_envoy(plan: Plan, facts: dict[str, Any], *, directory: Path, console: Console) -> dict[str, Any]:
    """Run the measurement beside the bench's own Envoy."""
    ports: list[int] = []
    for _ in range(3):
        ports.append(pick_free_port(host=HOST, avoid=ports))
    picked, direct, admin = (SocketAddress(host=HOST, port=port) for port in ports)
    envoy = envoy_process(
        addresses=EnvoyAddresses(picked=picked, direct=direct, admin=admin),
        picker=SocketAddress.parse(facts["extproc"]),
        pods=[SocketAddress.parse(pod) for pod in facts["endpoints"]],
        directory=directory,
    )
    supervisor = Supervisor(log_directory=directory)
    result: dict[str, Any] = {}

    async def when_ready() -> None:
        load = await LoadProcess.start()
        try:
            async with aiohttp.ClientSession() as session:
                bench = Bench(
                    plan=plan,
                    directory=directory,
                    admin_url=facts["admin"],
                    pods=tuple(facts["endpoints"]),
                    picked=picked,
                    direct=direct,
                    pids={**facts["pids"], **supervisor.pids},  # this Envoy in place of the stack's idle one
                    load=load,
                    session=session,
                    console=console,
                )
                result.update(await all_cells(bench, model=facts["model"]))
        finally:
            await load.end()

    await supervisor.run([[envoy]], environment=os.environ, when_ready=when_ready)
    return result


async def all_cells(bench: Bench, *, model: str) -> dict[str, Any]:
    """Idle CPU first, then every size at every concurrency."""
    idle = await idle_cpu(bench)
    words = vocabulary_words(simulated_tokenizer())
    cells = []
    for size in bench.plan.sizes_tokens:
        prompts = make_prompt_set(size, model=model, words=words, prefix_count=bench.plan.prefixes, seed=SEED)
        await warm(bench, prompts)
        bodies_file, counted = await write_bodies(bench, prompts, words=words)
        first = 0
        for concurrency, count in bench.plan.requests:
            bench.console.print(f"{size} tokens, concurrency {concurrency}: {count} requests on each route ...")
            picked, direct = await both_routes(
                bench, bodies_file=bodies_file, first=first, count=count, concurrency=concurrency
            )
            first += 2 * count
            cells.append(
                cell(
                    size_tokens=size,
                    counted_tokens=counted,
                    concurrency=concurrency,
                    picked=picked,
                    direct=direct,
                    idle_ms_per_second=idle,
                )
            )
    return {"idle_cpu_ms_per_second": {name: round(value, 2) for name, value in idle.items()}, "cells": cells}


async def idle_cpu(bench: Bench) -> dict[str, float]:
    """CPU milliseconds a second of each process without a request: scrapes, events, timers."""
    bench.console.print(f"idle for {bench.plan.idle_seconds:g} s ...")
    total = CpuSum.zero()
    before = read_cpu(bench.pids)
    await asyncio.sleep(bench.plan.idle_seconds)
    total.add(before, read_cpu(bench.pids))
    return total.per_second()


async def warm(bench: Bench, prompts: PromptSet) -> None:
    """Send every prefix once and wait until the picker finds it again."""
    for prefix in prompts.prefixes:
        body = chat_body(prompts.model, prefix, "warm")
        async with bench.session.post(
            f"http://{bench.picked}{CHAT_PATH}", data=body, headers={"content-type": "application/json"}
        ) as response:
            response.raise_for_status()
        await until_indexed(bench, body)


async def until_indexed(bench: Bench, body: bytes) -> None:
    """Wait until the picker expects most of the prompt in a cache; `/explain` sends and books nothing."""
    matched = total = 0
    with suppress(TimeoutError):
        async with asyncio.timeout(20):
            while True:
                async with bench.session.post(
                    f"{bench.admin_url}/explain", data=body, params={"path": CHAT_PATH}
                ) as response:
                    answer = await response.json()
                matched, total = answer["matched_tokens"], answer["prompt_tokens"]
                if matched >= 0.8 * total:
                    return
                await asyncio.sleep(0.02)
    raise SystemExit(f"the prefix index found {matched} of {total} warmed tokens after 20 s: nothing to measure")


async def write_bodies(bench: Bench, prompts: PromptSet, *, words: tuple[str, ...]) -> tuple[Path, float]:
    """All bodies of one size in a file, none twice, and the mean count of tokens of a sample."""
    count = sum(2 * requests for _, requests in bench.plan.requests)
    bodies = [prompts.body(number, words=words, seed=SEED) for number in range(count)]
    path = bench.directory / f"bodies-{prompts.size_tokens}.jsonl"
    path.write_bytes(b"\n".join(bodies))
    counts = [await count_tokens(bench.session, bench.pods[0], body) for body in bodies[:8]]
    return path, sum(counts) / len(counts)


async def both_routes(
    bench: Bench, *, bodies_file: Path, first: int, count: int, concurrency: int
) -> tuple[RouteSamples, RouteSamples]:
    """Alternate between the routes, so that whatever else the machine does meets both alike."""
    routes = (bench.picked, bench.direct)
    latencies: tuple[list[float], list[float]] = ([], [])
    seconds = [0.0, 0.0]
    cpu = (CpuSum.zero(), CpuSum.zero())
    per_round = count // bench.plan.rounds
    for turn in range(2 * bench.plan.rounds):
        route = turn % 2
        job = Job(
            host=routes[route].host,
            port=routes[route].port,
            path=CHAT_PATH,
            bodies_file=str(bodies_file),
            first=first + turn * per_round,
            count=per_round,
            concurrency=concurrency,
        )
        before = read_cpu(bench.pids)
        result = await bench.load.run(job, within_seconds=120)
        cpu[route].add(before, read_cpu(bench.pids))
        if result.errors:
            raise SystemExit(f"{len(result.errors)} requests failed; the first: {result.errors[0]}")
        latencies[route].extend(result.latencies_ms)
        seconds[route] += result.seconds
    picked, direct = (
        RouteSamples(
            latencies_ms=latencies[route],
            seconds=seconds[route],
            cpu_ms=cpu[route].cpu_ms,
            cpu_seconds=cpu[route].seconds,
        )
        for route in (0, 1)
    )
    return picked, direct


if __name__ == "__main__":
    main()
