"""The rounds of one case: the routes take turns, so that whatever else the machine does meets all of them alike.

Called by `stage`. Each turn sends bodies that no other turn has sent, between two readings of every process's CPU time.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.calibration import loop_ns_per_iteration
from bench.cpu_time import read_cpu, spent_between
from bench.load import Job, LoadProcess
from bench.plan import SEED, Plan
from bench.prompts import PromptSet
from bench.report import Round, Turn
from operate.local.envoy_config import SocketAddress

CHAT_PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True, kw_only=True)
class BodySource:
    """Bodies of one size, numbered; no number is used twice."""

    prompts: PromptSet
    words: tuple[str, ...]
    file: Path

    def write(self, *, first: int, count: int) -> None:
        """One body per line."""
        bodies = (self.prompts.body(first + i, words=self.words, seed=SEED) for i in range(count))
        self.file.write_bytes(b"\n".join(bodies))


class RoundRunner:
    """Carries out turns and rounds; numbers the bodies."""

    def __init__(
        self, *, plan: Plan, routes: Mapping[str, SocketAddress], pids: Mapping[str, int], load: LoadProcess
    ) -> None:
        self._plan = plan
        self._routes = routes
        self._names = tuple(routes)
        self._pids = pids
        self._load = load
        self._next_body = 0
        self.loop_ns: list[float] = []

    async def warm_up(self, bodies: BodySource) -> None:
        """Let every route see the size before anything is measured."""
        concurrency, count = self._plan.warm_up
        for route in self._names:
            await self._turn(route, bodies, count=count, concurrency=concurrency)

    async def rounds(self, bodies: BodySource, *, count: int, concurrency: int) -> list[Round]:
        """All rounds of one case; another route begins each of them, as the first may find the caches cold."""
        measured = []
        for number in range(self._plan.rounds):
            loop_ns = self.calibrate()
            first = number % len(self._names)
            order = (*self._names[first:], *self._names[:first])
            turns = {route: await self._turn(route, bodies, count=count, concurrency=concurrency) for route in order}
            measured.append(Round(loop_ns_per_iteration=loop_ns, turns=turns))
        return measured

    def calibrate(self) -> float:
        """Time the loop and remember it."""
        self.loop_ns.append(loop_ns_per_iteration())
        return self.loop_ns[-1]

    async def idle(self, seconds: float) -> dict[str, float]:
        """CPU milliseconds a second of each process without a request: scrapes, events, timers."""
        before = read_cpu(self._pids)
        await asyncio.sleep(seconds)
        return spent_between(before, read_cpu(self._pids)).per_second()

    async def _turn(self, route: str, bodies: BodySource, *, count: int, concurrency: int) -> Turn:
        bodies.write(first=self._next_body, count=count)
        self._next_body += count
        address = self._routes[route]
        job = Job(
            host=address.host, port=address.port, path=CHAT_PATH, bodies_file=str(bodies.file), concurrency=concurrency
        )
        before = read_cpu(self._pids)
        try:
            result = await self._load.run(job, within_seconds=self._plan.turn_limit_seconds)
        except TimeoutError:
            raise SystemExit(f"{count} requests on route {route} took {self._plan.turn_limit_seconds:g} s") from None
        spent = spent_between(before, read_cpu(self._pids))
        if result.errors or len(result.latencies_ms) != count:
            first = result.errors[0] if result.errors else "no error was told"
            raise SystemExit(f"{len(result.latencies_ms)} of {count} requests answered on route {route}; {first}")
        return Turn(latencies_ms=result.latencies_ms, seconds=result.seconds, spent=spent)
