"""How long streams stand still when the indexer that follows them is killed, stopped or frozen.

    python -m bench.takeover [--rounds 10] [--pods 8] [--lease-seconds 2] [--json FILE]

Starts a redis-server of its own, simulated pods with traffic, and two indexers that share them. In each round one of
the two is ended; measured are the seconds until all of its streams have another owner, and until batches published
after its end are in the index. Prints a table; `--json` keeps every round.
"""

import argparse
import asyncio
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import redis
import uvloop

from bench.redis_server import start_redis, stop_redis
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import running_pods

PREFIX = b"{kv2}"
DEADLINE_SECONDS = 60.0
POLL_SECONDS = 0.005
ENDINGS = {"killed": signal.SIGKILL, "stopped": signal.SIGTERM, "frozen": signal.SIGSTOP}
ENGINE = EngineSettings(total_blocks=2000, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)


class Index:
    """What Redis says."""

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url)

    def now(self) -> float:
        seconds, micros = self._client.time()
        return float(seconds + micros / 1e6)

    def field(self, name: bytes) -> dict[str, bytes]:
        """Stream -> one field of its record."""
        streams = self._client.smembers(PREFIX + b"streams")
        return {stream.decode(): self._client.hget(PREFIX + b"stream:" + stream, name) or b"" for stream in streams}

    def owners(self) -> dict[str, str]:
        """Stream -> name of its owner."""
        return {stream: owner.decode().rpartition("-")[0] for stream, owner in self.field(b"owner").items()}

    def are_applied_since(self, streams: set[str], moment: float) -> bool:
        applied_at = self.field(b"applied_at")
        return all(float(applied_at[stream] or b"0") > moment for stream in streams)


async def until(condition: Any) -> float:
    began = time.perf_counter()
    while not condition():
        if time.perf_counter() - began > DEADLINE_SECONDS:
            raise TimeoutError("the index does not get there")
        await asyncio.sleep(POLL_SECONDS)
    return time.perf_counter() - began


def start_indexer(name: str, *, url: str, endpoints: list[str], lease_seconds: float) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "operate", "indexer", "--model", "tiny", "--redis", url, "--indexer-id", name]
    command += ["--endpoints", ",".join(endpoints), "--indexer-admin-port", "0", "--lease-seconds", str(lease_seconds)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@asynccontextmanager
async def traffic(endpoints: list[str]) -> AsyncIterator[None]:
    """Some thirty fresh prompts a second and pod, so that every pod keeps publishing."""

    async def ask(http: aiohttp.ClientSession, endpoint: str) -> None:
        number = 0
        while True:
            number += 1
            body = {"prompt": [number % 997] * 16 + [number // 997] * 32, "max_tokens": 1}
            async with http.post(f"http://{endpoint}/v1/completions", json=body) as answer:
                await answer.read()
            await asyncio.sleep(0.03)

    async with aiohttp.ClientSession() as http:
        tasks = [asyncio.create_task(ask(http, endpoint), name=f"ask-{endpoint}") for endpoint in endpoints]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def measure_round(index: Index, ending: str, start: Any) -> dict[str, float]:
    victim, heir = start("victim"), start("heir")
    try:
        half = len(index.owners()) // 2
        await until(lambda: Counter(index.owners().values()) == {"victim": half, "heir": half})
        await until(lambda: set(index.field(b"state").values()) == {b"live"})
        streams = {stream for stream, owner in index.owners().items() if owner == "victim"}
        moment = index.now()
        victim.send_signal(ENDINGS[ending])
        taken = await until(lambda: set(index.owners().values()) == {"heir"})
        applied = taken + await until(lambda: index.are_applied_since(streams, moment + taken))
        return {"owner_seconds": round(taken, 3), "applied_seconds": round(applied, 3)}
    finally:
        for process in (victim, heir):
            process.kill()
            process.wait()


async def measure(url: str, *, rounds: int, pods: int, lease_seconds: float) -> dict[str, Any]:
    index = Index(url)
    folder, publisher = load_model_folder(TINY_MODEL), PublisherSettings(host="127.0.0.1")
    async with running_pods(PodSettings(engine=ENGINE), folder=folder, publisher=publisher, count=pods) as running:
        endpoints = [f"{pod.host}:{pod.port}" for pod in running]

        def start(name: str) -> "subprocess.Popen[bytes]":
            return start_indexer(name, url=url, endpoints=endpoints, lease_seconds=lease_seconds)

        async with traffic(endpoints):
            first = start("first")
            await until(lambda: list(index.owners().values()) == ["first"] * pods)
            first.terminate()
            first.wait()
            return {ending: [await measure_round(index, ending, start) for _ in range(rounds)] for ending in ENDINGS}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pods", type=int, default=8, help="an even number")
    parser.add_argument("--lease-seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server, url = start_redis(folder)
        try:
            taken = uvloop.run(
                measure(url, rounds=options.rounds, pods=options.pods, lease_seconds=options.lease_seconds)
            )
        finally:
            stop_redis(server)
    print(f"{options.rounds} rounds, {options.pods} pods, lease {options.lease_seconds:g} s; median (worst)")
    for ending, results in taken.items():
        owner, applied = ([result[name] for result in results] for name in ("owner_seconds", "applied_seconds"))
        print(
            f"{ending:8} another owner after {statistics.median(owner):.2f} ({max(owner):.2f}) s, "
            f"in the index again after {statistics.median(applied):.2f} ({max(applied):.2f}) s"
        )
    if options.json:
        options.json.write_text(json.dumps({"lease_seconds": options.lease_seconds, "rounds": taken}, indent=1) + "\n")


if __name__ == "__main__":
    main()
