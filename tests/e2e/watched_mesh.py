"""A whole mesh that Prometheus watches, with traffic of many kinds and a pod that misbehaves on command."""

import asyncio
import itertools
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from operate.local.service import simulated_tokenizer
from tests.e2e.overload_stack import OBJECTIVE, TENANT
from tests.e2e.stack import END_SECONDS, Stack, eventually, free_ports, listens, running_stack
from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import RedisServer, free_port
from tests.integration.overload_pods import HeldPod
from tests.prometheus.monitoring import shorter_rules
from tests.prometheus.prometheus_process import Prometheus, running_prometheus

DIVIDED_BY = 60.0  # every window and wait of the rules; their conditions are the real ones
MODEL, SMALL = "tiny", "small"  # the second one is the odd pod's alone
UNREAD = "unread"  # likewise, and nobody makes tokens for it
SHORTEST_SECONDS = 0.01
LONG_WORDS, LONG_TOKENS = 400, 1000  # of prompts that prefill pods compute, and no others
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
VARIANT = {  # no pod is of it: it is a choice by what it says itself
    "name": "l40s",
    "selector": [{"name": "gpu", "value": "l40s"}],
    "podHourPrice": 1.1,
    "prefillTokensPerSecond": 3000,
}
SETTINGS: dict[str, Any] = {
    "scrape_interval_ms": 100,
    "index_timeout_ms": 500,  # on a busy machine answers of Redis would be late without any trouble
    "sample_share": 1.0,
    "policy": {
        "prefixCache": {"alertHitRatio": 0.95},
        # a pod that fails goes on getting requests: it is to be seen
        "load": {"health": {"avoidSeconds": 0.001}},
        "disaggregation": {"enabled": True, "rule": "thresholds", "promptTokens": LONG_TOKENS},
        "autoscale": {
            "both": {"minReplicas": 1, "maxReplicas": 8},
            "prefill": {"minReplicas": 1, "maxReplicas": 8, "variants": [VARIANT]},
        },
        "observability": {"podHourPrice": 2.5, "currency": "EUR"},
        "quotas": [
            {"tenant": "acme", "requestsPerMinute": 100_000},
            {"tenant": "stingy", "requestsPerMinute": 6, "burstSeconds": 10},
        ],
        "priorities": {
            "trustObjective": True,
            "classes": [
                {"name": "standard", "ttftSeconds": 2, "queueSeconds": 5, "ceiling": 1},
                {"name": "sheddable", "ttftSeconds": 0.3, "queueSeconds": 2, "ceiling": 1},
                {
                    "name": "critical",
                    "ttftSeconds": 0.05,
                    "degrade": [{"step": "cap-output", "tokens": 12, "enter": 0.5, "leave": 0.3, "leastSeconds": 1}],
                },
            ],
        },
        "models": {
            "served": [
                *({"name": name, "tokenizer": str(simulated_tokenizer())} for name in (MODEL, SMALL)),
                {"name": UNREAD, "tokens": "text"},
            ],
            "rules": [{"model": "chat", "targets": [{"model": MODEL, "weight": 2}, {"model": SMALL, "weight": 1}]}],
        },
    },
}


class OddPod(HeldPod):
    """A pod that answers, but wrongly, on command."""

    fails = False  # with a 500
    refuses_some = False  # with vLLM's 503
    lies = False  # about the tokens of prompts; else it says nothing of them
    numbers: Iterator[int]

    async def _infer(self, request: web.Request) -> web.StreamResponse:
        number = next(self.numbers)
        if self.refuses_some and number % 3 == 0:
            return web.json_response({"error": {"message": "Too many queued requests", "code": 503}}, status=503)
        if self.fails and number % 2 == 0:
            return web.json_response({"error": {"message": "CUDA error"}}, status=500)
        body = await request.json()
        usage = {"prompt_tokens": 999, "completion_tokens": 1, "total_tokens": 1000}
        usage["prompt_tokens_details"] = {"cached_tokens": 900}  # type: ignore[assignment]
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "yes"},
        }
        answer = {"id": "x", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice]}
        response = web.json_response(answer | ({"usage": usage} if self.lies else {}))
        response.force_close()  # so that Envoy has to connect for the next one
        return response

    async def deafen(self) -> None:
        """Take no connection any more, and keep those that are there: /metrics still answers."""
        assert self.runner is not None
        for site in list(self.runner.sites):
            await site.stop()

    async def hear(self) -> None:
        """Listen again."""
        assert self.runner is not None
        if self.runner.sites:
            return
        host, _, port = self.address.rpartition(":")
        await web.TCPSite(self.runner, host, int(port), reuse_address=True).start()


@dataclass(kw_only=True)
class WatchedMesh:
    """All of it."""

    stack: Stack
    prometheus: Prometheus
    redis: RedisServer
    pods: dict[str, subprocess.Popen[bytes]]  # the last one computes prompts for the others
    odd: OddPod
    odd_events: ScriptedPod
    pools: subprocess.Popen[bytes]  # an indexer of its own, which follows `pools_folder`
    pools_folder: Path
    running: list[asyncio.Task[None]] = field(default_factory=list)

    def talk(self, *, workers: int, **kind: Any) -> None:
        """Have so many more clients of a kind, each with one request at a time."""
        for number in range(workers):
            name = f"client {len(self.running)}"
            self.running.append(asyncio.create_task(self._talk(seed=number, **kind), name=name))

    async def silence(self) -> None:
        """Send all clients home."""
        for task in self.running:
            task.cancel()
        await asyncio.gather(*self.running, return_exceptions=True)
        self.running.clear()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process of `kvmesh up`."""
        os.kill((self.stack.ready["pids"] | {"extproc": self.stack.picker})[name], number)

    async def _talk(
        self,
        *,
        seed: int,
        model: str = MODEL,
        objective: str | None = None,
        tenant: str | None = None,
        words: int = 60,
        shared: bool = True,
        stream: bool = False,
        max_tokens: int = 4,
        pause_seconds: float = SHORTEST_SECONDS,
        patience_seconds: float | None = None,
    ) -> None:
        dice = random.Random(f"{seed} {objective} {model}")
        headers = {name: value for name, value in ((OBJECTIVE, objective), (TENANT, tenant)) if value}
        story = " ".join(f"word{number}" for number in range(words))
        while True:
            opening = f"{dice.randrange(3) if shared else dice.random()} {story}"
            body: dict[str, Any] = {
                "model": model,
                "max_tokens": max_tokens,
                "messages": [{"role": "user", "content": f"{opening} {dice.random()}"}],
            }
            body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            with suppress(aiohttp.ClientError, TimeoutError):  # what becomes of clients is other tests' business
                async with asyncio.timeout(patience_seconds):
                    await self.stack.send("POST", "/v1/chat/completions", json=body, headers=headers)
            await asyncio.sleep(pause_seconds)


@asynccontextmanager
async def watched_mesh(folder: Path) -> AsyncIterator[WatchedMesh]:
    """Start everything; nothing is said yet."""
    async with AsyncExitStack() as exits:
        redis = RedisServer(folder)
        redis.start()
        exits.callback(redis.kill)
        odd_events = await exits.enter_async_context(running_pod())
        odd = OddPod(models=(MODEL, SMALL, UNREAD))
        odd.numbers = itertools.count(1)
        await odd.start()
        exits.push_async_callback(odd.stop)
        no_connector = HeldPod(models=(MODEL, SMALL, UNREAD))  # a prefill pod that hands nothing over
        await no_connector.start()
        exits.push_async_callback(no_connector.stop)
        no_connector.release()
        pods = exits.enter_context(_simulated_pods(3, folder))
        for address in pods:
            await eventually(partial(listens, int(address.rpartition(":")[2])), bool)
        sources = {
            odd.address: _source(odd_events),
            no_connector.address: _source(await exits.enter_async_context(running_pod())),
        }
        flags = ("--redis", redis.url, "--model", MODEL, "--event-sources", json.dumps(sources))
        roles = ",".join(f"{each}=prefill" for each in (list(pods)[-1], no_connector.address))
        settings = json.dumps(SETTINGS | {"roles": roles})
        endpoints = [*pods, odd.address, no_connector.address]
        stack = await exits.enter_async_context(running_stack(folder, *flags, settings=settings, endpoints=endpoints))
        pools, pools_port = exits.enter_context(_indexer_of_pools(folder, redis))
        targets = {
            "kvmesh-picker": [_address(stack.ready["admin"])],
            "kvmesh-indexer": [_address(stack.ready["indexer_admin"]), f"127.0.0.1:{pools_port}"],
            "vllm": list(pods),
        }
        rules = shorter_rules(DIVIDED_BY)
        home = folder / "prometheus"
        home.mkdir()
        prometheus = await exits.enter_async_context(running_prometheus(home, targets=targets, rules=rules))
        mesh = WatchedMesh(
            stack=stack,
            prometheus=prometheus,
            redis=redis,
            pods=pods,
            odd=odd,
            odd_events=odd_events,
            pools=pools,
            pools_folder=folder / "pools",
        )
        exits.push_async_callback(mesh.silence)
        yield mesh


def _source(events: ScriptedPod) -> dict[str, str]:
    said = events.config()["0"]
    places = {"events": said["endpoint"], "replay": said["replay_endpoint"]}
    return {name: place.replace("*", "127.0.0.1") for name, place in places.items()}


def _address(url: str) -> str:
    return url.removeprefix("http://")


@contextmanager
def _simulated_pods(count: int, folder: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    """Start slow pods with small caches."""
    options = ["--max-num-seqs", "3", "--inter-token-ms", "15", "--kv-blocks", "600", "--max-model-len", "8192"]
    options += ["--prefill-tokens-per-second", "3000", "--kv-transfer-config", json.dumps(CONNECTOR)]
    pods: dict[str, subprocess.Popen[bytes]] = {}
    try:
        with (folder / "pods.log").open("wb") as log:
            for port in free_ports(count):
                command = [sys.executable, "-m", "podsim", "--sim-port", str(port), *options]
                pods[f"127.0.0.1:{port}"] = subprocess.Popen(command, stdout=log, stderr=log)
        yield pods
    finally:
        for process in pods.values():
            process.kill()
            process.wait(timeout=END_SECONDS)


@contextmanager
def _indexer_of_pools(folder: Path, redis: RedisServer) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start an indexer that follows a folder, which is empty yet."""
    (folder / "pools").mkdir()
    port = free_port()
    command = [sys.executable, "-m", "operate", "indexer", "--policies", str(folder / "pools"), "--redis", redis.url]
    with (folder / "pools.log").open("wb") as log:
        process = subprocess.Popen([*command, "--indexer-admin-port", str(port)], stdout=log, stderr=log)
    try:
        yield process, port
    finally:
        process.kill()
        process.wait(timeout=END_SECONDS)
