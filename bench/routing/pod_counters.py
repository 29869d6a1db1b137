"""What the pods themselves count, whatever router stands before them; also empties their caches between runs."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from operate.local.envoy_config import SocketAddress

IDLE_SECONDS = 30.0
POLL_SECONDS = 0.05
EVENTS_SECONDS = 0.3  # more than the events of a cleared cache need to reach any router
_SAMPLE = re.compile(r"^vllm:(\w+?)(?:\{[^}]*\})? ([0-9.e+-]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class PodCounts:
    """One pod since its start."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    hit_tokens: float = 0.0
    preemptions: float = 0.0
    busy: float = 0.0  # requests that run or wait now

    def since(self, before: "PodCounts") -> "PodCounts":
        """What came on top."""
        return PodCounts(
            requests=self.requests - before.requests,
            prompt_tokens=self.prompt_tokens - before.prompt_tokens,
            hit_tokens=self.hit_tokens - before.hit_tokens,
            preemptions=self.preemptions - before.preemptions,
            busy=self.busy,
        )

    def plus(self, other: "PodCounts") -> "PodCounts":
        """Both together."""
        return PodCounts(
            requests=self.requests + other.requests,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            hit_tokens=self.hit_tokens + other.hit_tokens,
            preemptions=self.preemptions + other.preemptions,
            busy=self.busy,
        )


def parse(text: str) -> PodCounts:
    """The counts in a /metrics page."""
    sums: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        sums[name] = sums.get(name, 0.0) + float(value)
    return PodCounts(
        requests=sums["request_success_total"],
        prompt_tokens=sums["prefix_cache_queries_total"],
        hit_tokens=sums["prefix_cache_hits_total"],
        preemptions=sums["num_preemptions_total"],
        busy=sums["num_requests_running"] + sums["num_requests_waiting"],
    )


async def read(session: aiohttp.ClientSession, pods: Sequence[SocketAddress]) -> list[PodCounts]:
    """The counts of all pods."""
    return [await _read_one(session, pod) for pod in pods]


async def empty_caches(session: aiohttp.ClientSession, pods: Sequence[SocketAddress]) -> None:
    """Wait until the pods are idle, clear their caches, and give the routers time to learn of it."""
    for pod in pods:
        async with asyncio.timeout(IDLE_SECONDS):
            while (await _read_one(session, pod)).busy:
                await asyncio.sleep(POLL_SECONDS)
        async with session.post(f"http://{pod}/reset_prefix_cache") as response:
            response.raise_for_status()
        # the event leaves with the engine's next step; a prompt below one block caches nothing
        body = {"prompt": [1, 2, 3], "max_tokens": 1}
        async with session.post(f"http://{pod}/v1/completions", json=body) as response:
            response.raise_for_status()
    await asyncio.sleep(EVENTS_SECONDS)


async def _read_one(session: aiohttp.ClientSession, pod: SocketAddress) -> PodCounts:
    async with session.get(f"http://{pod}/metrics") as response:
        response.raise_for_status()
        return parse(await response.text())
