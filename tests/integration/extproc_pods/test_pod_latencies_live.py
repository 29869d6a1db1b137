"""The latencies of pods that come, restart and go, as real processes count them, are added up once each."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from extproc.ledger.endpoint_telemetry import LatencyTelemetry
from extproc.pods.endpoint import Reachability
from extproc.pods.metrics_scraper import MetricsScraper
from kvmesh.metrics.registry import Registry
from operate.local.ports import pick_free_port
from podsim.wire.metrics_text import EngineState, PodMetrics

HOST, DEADLINE_SECONDS = "127.0.0.1", 30.0


class Pod:
    """A simulated pod in a process of its own, which may be killed and started again."""

    def __init__(self, port: int) -> None:
        self.port, self.address = port, f"{HOST}:{port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", "podsim", "--sim-port", str(self.port)])

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_SECONDS)
            self._process = None


class Watch:
    """What is shown of the pods, and a client that asks them."""

    def __init__(self, registry: Registry, http: aiohttp.ClientSession) -> None:
        self._registry, self._http = registry, http

    async def say(self, pod: Pod, *, times: int) -> None:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 3}
        for _ in range(times):
            async with self._http.post(f"http://{pod.address}/v1/completions", json=body) as answer:
                assert answer.status == 200

    async def answers(self, pod: Pod) -> None:
        async with asyncio.timeout(DEADLINE_SECONDS):
            while True:
                try:
                    async with self._http.get(f"http://{pod.address}/health") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    await asyncio.sleep(0.02)

    def counts(self) -> dict[str, float]:
        families = text_string_to_metric_families(self._registry.text().decode())
        return {
            sample.name: sample.value
            for family in families
            for sample in family.samples
            if sample.name.endswith("_count")
        }

    async def becomes(self, *, first_tokens: float, inter_tokens: float) -> None:
        expected = {"kvmesh_ttft_seconds_count": first_tokens, "kvmesh_inter_token_seconds_count": inter_tokens}
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (seen := self.counts()) != expected:
                assert all(seen.get(name, 0.0) <= most for name, most in expected.items()), f"too many: {seen}"
                await asyncio.sleep(0.02)


@asynccontextmanager
async def watching(*pods: Pod) -> AsyncIterator[tuple[Watch, MetricsScraper]]:
    registry = Registry()
    scraper = MetricsScraper(
        [pod.address for pod in pods],
        interval_seconds=0.05,
        timeout_seconds=5.0,
        stale_after_seconds=5.0,
        pages=LatencyTelemetry(registry, read_every_seconds=0.1),
    )
    async with aiohttp.ClientSession() as http:
        watch = Watch(registry, http)
        for pod in pods:
            await watch.answers(pod)
        task = asyncio.create_task(scraper.run(), name="scraper")
        try:
            await scraper.first_scrapes()
            yield watch, scraper
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_each_token_is_counted_once_over_pods_restarts_and_goings() -> None:
    one = Pod(pick_free_port(host=HOST, avoid=()))
    other = Pod(pick_free_port(host=HOST, avoid=[one.port]))
    try:
        for pod in (one, other):
            pod.start()
        async with watching(one, other) as (watch, scraper):
            await watch.becomes(first_tokens=0.0, inter_tokens=0.0)
            await watch.say(one, times=3)
            await watch.say(other, times=2)
            await watch.becomes(first_tokens=5.0, inter_tokens=10.0)
            one.kill()
            one.start()
            await watch.answers(one)
            await watch.say(one, times=4)  # more than it had counted before: nothing seems to fall
            await watch.becomes(first_tokens=9.0, inter_tokens=18.0)
            scraper.set_endpoints({other.address: None})
            await watch.say(one, times=5)
            await watch.say(other, times=1)
            await watch.becomes(first_tokens=10.0, inter_tokens=20.0)
    finally:
        for pod in (one, other):
            pod.kill()


async def test_what_a_pod_has_counted_does_not_count_again_when_it_cannot_be_reached_for_a_while() -> None:
    observed = 100
    metrics = PodMetrics(model="tiny", max_model_len=4096, block_size=16, total_blocks=100, started_at=1e9)
    idle = EngineState(running=0, waiting=0, kv_usage=0.0, prefix_queries=0, prefix_hits=0, preemptions=0)

    async def page(_: web.Request) -> web.Response:
        return web.Response(body=metrics.render(idle))

    app = web.Application()
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    pod = Pod(pick_free_port(host=HOST, avoid=()))
    for _ in range(observed):
        metrics.time_to_first_token.observe(0.1)
    try:
        site = web.TCPSite(runner, HOST, pod.port)
        await site.start()
        async with watching() as (watch, scraper):
            scraper.set_endpoints({pod.address: None})
            await watch.becomes(first_tokens=0.0, inter_tokens=0.0)
            await site.stop()
            await runner.server.shutdown(0.1)  # type: ignore[union-attr]
            async with asyncio.timeout(DEADLINE_SECONDS):
                while scraper.known(now=time.monotonic())[0].reachability is not Reachability.UNREACHABLE:
                    await asyncio.sleep(0.02)
            metrics.time_to_first_token.observe(0.1)
            await web.TCPSite(runner, HOST, pod.port, reuse_address=True).start()
            await watch.becomes(first_tokens=1.0, inter_tokens=0.0)
    finally:
        await runner.cleanup()
