"""`kvmesh indexer` as real processes, and pods that know what they hold, for tests of several indexers."""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from tests.integration.kv_publisher import ScriptedPod, running_pod
from tests.integration.kv_redis import RedisServer, free_port
from tests.unit.kv_indexer_follow.kv_fakes import removed, stored

END_SECONDS = 10.0
CHAIN = 8  # blocks of a prompt, at most
CHAINS = 40
COMMAND = (sys.executable, "-m", "operate", "indexer", "--model", "tiny")  # the root command, which sets logging up


class IndexerProcess:
    """One indexer process; `name` is the readable part of its id."""

    def __init__(self, process: subprocess.Popen[bytes], *, name: str, admin_port: int, log: Path) -> None:
        self.name = name
        self._process = process
        self._admin = f"http://127.0.0.1:{admin_port}"
        self._log = log

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGKILL, SIGTERM, SIGSTOP, SIGCONT."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP:
            os.waitpid(self._process.pid, os.WUNTRACED)  # until it has really stopped

    def end(self, number: signal.Signals) -> int:
        """End it by a signal; return its exit status."""
        self.send(number)
        return self._process.wait(END_SECONDS)

    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text()

    async def page(self, path: str) -> tuple[int, str]:
        """One of its admin pages; status 0 if it does not answer."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2.0)) as http,
                http.get(self._admin + path) as answer,
            ):
                return answer.status, await answer.text()
        except (aiohttp.ClientError, TimeoutError) as error:
            return 0, str(error)

    async def is_ready(self) -> bool:
        """Whether it says so; it must not have ended."""
        assert self._process.poll() is None, self.log()
        return (await self.page("/readyz"))[0] == 200

    async def owners(self) -> dict[str, str]:
        """Stream -> readable name of its owner, as this indexer's page shows it."""
        status, text = await self.page("/sources")
        lines = json.loads(text)["sources"] if status == 200 else []
        return {f"{line['endpoint']}#{line['dp_rank']}": line["owner"].rpartition("-")[0] for line in lines}


@contextmanager
def indexer_process(redis: RedisServer, folder: Path, *, name: str, endpoints: list[str]) -> Iterator[IndexerProcess]:
    """Run one; it ends with the context at the latest."""
    port, log = free_port(), folder / f"{name}-{os.urandom(2).hex()}.log"
    options = ["--redis", redis.url, "--indexer-admin-port", str(port), "--endpoints", ",".join(endpoints)]
    with log.open("wb") as output:
        process = subprocess.Popen([*COMMAND, *options, "--indexer-id", name], stdout=output, stderr=output)
    try:
        yield IndexerProcess(process, name=name, admin_port=port, log=log)
    finally:
        process.kill()  # also ends a stopped one
        process.wait(END_SECONDS)


class BusyPod:
    """A scripted pod that stores and removes at random, as an engine would, and keeps count of what it holds.

    Its prompts are chains of up to eight blocks: they grow at their end, have second copies of all but their first
    block, and are evicted from their end.
    """

    def __init__(self, pod: ScriptedPod, *, seed: int) -> None:
        self.pod = pod
        self.held: Counter[int] = Counter()  # engine hash -> copies
        self.events = 0
        self._random = random.Random(seed)

    @property
    def name(self) -> str:
        """Of its stream, as in Redis."""
        return f"{self.pod.endpoint}#0"

    async def work(self, batches: int) -> None:
        """Publish so many batches."""
        for _ in range(batches):
            first = CHAIN * self._random.randrange(CHAINS) + 1
            chain = range(first, first + CHAIN)
            end = next((block for block in chain if block not in self.held), chain.stop)
            step = self._random.choice((self._grow, self._grow, self._copy, self._evict))
            await self.pod.publish(step(first, end))
            self.events += 1

    def _grow(self, first: int, end: int) -> dict[str, Any]:
        if end == first + CHAIN:
            return self._evict(first, end)
        fresh = range(end, self._random.randrange(end, first + CHAIN) + 1)
        self.held.update(fresh)
        return stored(*fresh, parent=end - 1 if end > first else None)

    def _copy(self, first: int, end: int) -> dict[str, Any]:
        if end - first < 2:
            return self._grow(first, end)
        again = self._random.randrange(first + 1, end)
        self.held[again] += 1
        return stored(again, parent=again - 1)

    def _evict(self, first: int, end: int) -> dict[str, Any]:
        if end == first:
            return self._grow(first, end)
        self.held.subtract([end - 1])
        self.held = +self.held
        return removed(end - 1)


@asynccontextmanager
async def busy_pods(count: int) -> AsyncIterator[list[BusyPod]]:
    """So many pods."""
    async with AsyncExitStack() as stack:
        yield [BusyPod(await stack.enter_async_context(running_pod()), seed=seed) for seed in range(count)]


@asynccontextmanager
async def at_work(pods: list[BusyPod], *, pause_seconds: float = 0.02) -> AsyncIterator[None]:
    """Let them publish as long as the context lasts."""

    over = asyncio.Event()

    async def work(pod: BusyPod) -> None:
        while not over.is_set():
            await pod.work(1)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), pause_seconds)  # the pace of an engine's steps

    async with asyncio.TaskGroup() as group:
        for pod in pods:
            group.create_task(work(pod), name=f"work-{pod.name}")
        try:
            yield
        finally:
            over.set()  # not cancelled: what is counted must also be published
