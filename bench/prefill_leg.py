"""What a prefill leg costs the picker: `python -m bench.prefill_leg [--quick] [--out FILE]`. Part of `make bench`.

Two stacks of `kvmesh up` stand before the same two simulated pods, which answer at once: one has the first pod compute
every prompt and the second one fetch it, the other has no disaggregation. Rounds alternate between them; each sends new
prompts, one at a time, and CPU is the picker process's alone.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from bench.calibration import loop_ns_per_iteration
from bench.cpu_time import process_cpu_ms
from bench.machine import machine, revision, versions
from bench.prompts import chat_body, count_tokens, vocabulary_words
from bench.running_stack import HOST, end_process, facts_of, port_flags, start_module
from bench.tokenizing import RESULTS, SEED
from operate.local.ports import pick_free_port
from podsim.model_folder import TINY_MODEL

SIZES = (200, 2000, 8000)  # tokens, about
ROUNDS, QUICK_ROUNDS = 11, 3
REQUESTS, WARM_UP = 24, 24  # a round
CONNECTOR = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
QUICK_PODS = ("--prefill-tokens-per-second", "1e9", "--inter-token-ms", "0.1", "--kv-blocks", "262144")
QUICK_LINK = ("--kv-link-bytes-per-second", "1e15", "--kv-link-seconds", "0")
WAYS = ("leg", "none")


def main() -> None:
    """Parse the flags, measure, write, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a first look")
    parser.add_argument("--out", type=Path, help="result file; default bench/results/<date>-prefill-leg.json")
    arguments = parser.parse_args()
    began = datetime.now(UTC)
    sizes = asyncio.run(measured(rounds=QUICK_ROUNDS if arguments.quick else ROUNDS))
    head = {"date": began.isoformat(timespec="seconds"), "machine": machine(), "versions": versions()}
    speed = {"loop_ns_per_iteration": loop_ns_per_iteration()}
    result = {**head, **speed, "kvmesh": revision(RESULTS.parent), "sizes": sizes}
    out = arguments.out or RESULTS / f"{began:%Y-%m-%d}-prefill-leg.json"
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written: {out}")


async def measured(*, rounds: int) -> list[dict[str, Any]]:
    """Return for each size the medians over the rounds, and print them."""
    words, lines = vocabulary_words(TINY_MODEL), []
    async with pods() as names, aiohttp.ClientSession() as http, two_stacks(names) as stacks:
        for size in SIZES:
            tokens = await count_tokens(http, names[0], body(words, size, number=0))
            costs: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
            number = 1
            for turn in range(rounds + 1):
                for way in WAYS:
                    bodies = [body(words, size, number=number + i) for i in range(REQUESTS if turn else WARM_UP)]
                    number += len(bodies)
                    cost = await sent(http, stacks[way], bodies)
                    if turn:
                        costs[way].append(cost)
            line: dict[str, Any] = {"tokens": tokens}
            for way in WAYS:
                cpu, wall = (statistics.median(column) for column in zip(*costs[way], strict=True))
                line |= {f"{way}_cpu_ms": round(cpu, 3), f"{way}_ms": round(wall, 2)}
            await require_legs(http, stacks)
            lines.append(line)
            print(json.dumps(line), flush=True)
    return lines


async def sent(http: aiohttp.ClientSession, stack: Mapping[str, Any], bodies: Sequence[bytes]) -> tuple[float, float]:
    """Send them one after the other; return the picker's CPU and the time of one, in milliseconds."""
    pid, loop = stack["pids"]["extproc"], asyncio.get_running_loop()
    cpu, began = process_cpu_ms(pid), loop.time()
    for each in bodies:
        headers = {"content-type": "application/json"}
        url = f"{stack['gateway']}/v1/chat/completions"
        async with http.post(url, data=each, headers=headers) as answer:
            if answer.status != 200:
                raise SystemExit(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
            await answer.read()
    return (process_cpu_ms(pid) - cpu) / len(bodies), (loop.time() - began) * 1000 / len(bodies)


async def require_legs(http: aiohttp.ClientSession, stacks: Mapping[str, Mapping[str, Any]]) -> None:
    """End the run where a request had no leg that was to have one, or had one that was not."""
    for way in WAYS:
        async with http.get(f"{stacks[way]['admin']}/metrics") as page:
            lines = (await page.text()).splitlines()
        legs = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("kvmesh_prefill_legs_total{"))
        answered = sum(float(line.rpartition(" ")[2]) for line in lines if 'outcome="answered"' in line)
        if (way == "leg") is not (legs > 0) or legs != answered:
            raise SystemExit(f"{way}: {legs:g} prefill legs, {answered:g} of them answered")


def body(words: tuple[str, ...], size: int, *, number: int) -> bytes:
    """Return a chat's body of about so many tokens that no other number has."""
    rng = random.Random(SEED * 1_000_003 + 1_009 * size + number)
    return chat_body("tiny", " ".join(rng.choices(words, k=size - 20)), "go on")


@asynccontextmanager
async def pods() -> AsyncIterator[tuple[str, ...]]:
    """Run two simulated pods that hand caches over; yield their addresses."""
    port = pick_free_port(host=HOST, avoid=(), count=2)
    flags = ("--sim-port", str(port), "--pods", "2", "--kv-transfer-config", CONNECTOR, *QUICK_PODS, *QUICK_LINK)
    process = await start_module("podsim", *flags, "--max-model-len", "65536")
    try:
        yield (f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}")
    finally:
        await end_process(process)


@asynccontextmanager
async def two_stacks(names: Sequence[str]) -> AsyncIterator[dict[str, dict[str, Any]]]:
    """Run a stack with legs and one without; yield what their ready files say."""
    policies = {"leg": "{enabled: true, rule: always}", "none": "{enabled: false}"}
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        stacks: dict[str, dict[str, Any]] = {}
        try:
            for way, policy in policies.items():
                (Path(folder) / f"{way}.policy").write_text(f"disaggregation: {policy}\n", encoding="utf-8")
                config, ready = Path(folder) / f"{way}.yaml", Path(folder) / f"{way}.ready"
                roles = f"roles: {names[0]}=prefill\n" if way == "leg" else f"cordoned: {names[0]}\n"
                config.write_text(f"policy: {folder}/{way}.policy\n{roles}", encoding="utf-8")
                flags = ("--config", str(config), "--ready-file", str(ready), "--endpoints", ",".join(names))
                processes.append(
                    await start_module("operate", "up", "--no-live", "--log-level", "warning", *flags, *port_flags(0))
                )
                stacks[way] = await facts_of(processes[-1], ready)
            yield stacks
        finally:
            for process in processes:
                await end_process(process)


if __name__ == "__main__":
    main()
