"""Pods for `bench.replicas`: they hold a request for as long as they are told, and report their load as vLLM does.

No model and no tokens: what is measured is where requests are sent, not what becomes of them, so that the same load can
be repeated exactly and costs next to nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from aiohttp import web

from operate.local.ports import pick_free_port

HOST = "127.0.0.1"
SLOTS = 16  # requests that run at a time; more wait
PREFILL_SHARE = 0.1  # of a request's time, until it begins to answer


class SimulatedPod:
    """One pod: so many slots, first come first served."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.in_flight = 0
        self._slots = asyncio.Semaphore(SLOTS)

    async def serve(self, seconds: float, *, answers: Callable[[], Awaitable[None]]) -> None:
        """Hold a request for `seconds` once it has a slot; await `answers()` when it begins to answer."""
        async with self._slots:
            await asyncio.sleep(seconds * PREFILL_SHARE)
            await answers()
            await asyncio.sleep(seconds * (1 - PREFILL_SHARE))

    def metrics(self) -> str:
        """Return the few lines that pickers read."""
        running = min(self.in_flight, SLOTS)
        return (
            f'vllm:num_requests_running{{engine="0"}} {running}\n'
            f'vllm:num_requests_waiting{{engine="0"}} {self.in_flight - running}\n'
            f'vllm:kv_cache_usage_perc{{engine="0"}} {running / SLOTS / 2}\n'
        )


class SimulatedPods:
    """Several pods, each on a port of its own, and how unevenly they are used."""

    def __init__(self, count: int, *, clock: Callable[[], float]) -> None:
        ports: list[int] = []
        while len(ports) < count:
            ports.append(pick_free_port(host=HOST, avoid=ports))
        self.by_address = {f"{HOST}:{port}": SimulatedPod(f"{HOST}:{port}") for port in ports}
        self._clock = clock
        self._exits = AsyncExitStack()
        self._changed_at = clock()
        self._seconds = self._excess = self._in_flight = 0.0

    async def start(self) -> None:
        """Answer /metrics."""
        for address, pod in self.by_address.items():
            app = web.Application()
            app.router.add_get("/metrics", _answer(pod))
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            self._exits.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, HOST, int(address.rpartition(":")[2])).start()

    async def close(self) -> None:
        """Close all ports."""
        await self._exits.aclose()

    def change(self, address: str, *, by: int) -> None:
        """Count a request that came or went."""
        self._pass_time()
        self.by_address[address].in_flight += by

    def begin(self) -> None:
        """Forget what was measured so far."""
        self._pass_time()
        self._seconds = self._excess = self._in_flight = 0.0

    def imbalance(self) -> tuple[float, float]:
        """Return, as means over time since `begin`, how far the fullest pod was above the mean (0.1: 10 %), and the
        requests in flight a pod.
        """
        self._pass_time()
        return self._excess / self._seconds, self._in_flight / self._seconds

    def _pass_time(self) -> None:
        now = self._clock()
        passed, self._changed_at = now - self._changed_at, now
        counts = [pod.in_flight for pod in self.by_address.values()]
        mean = sum(counts) / len(counts)
        self._seconds += passed
        self._in_flight += passed * mean
        self._excess += passed * (max(counts) / mean - 1.0 if mean else 0.0)


def _answer(pod: SimulatedPod) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=pod.metrics())

    return metrics
