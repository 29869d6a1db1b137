"""Several indexer processes on one index: who follows what, what happens when one is stopped, killed or frozen."""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from podsim.core.block_hash import event_hash
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods
from tests.integration.kv_indexer_processes import BusyPod, IndexerProcess, at_work, busy_pods, indexer_process
from tests.integration.kv_recount import recount
from tests.integration.kv_redis import RedisServer

DEADLINE_SECONDS = 20.0
TAKEOVER_SECONDS = 3.0  # what is promised
MACHINE_SECONDS = 3.0  # what a loaded machine may add to it


async def eventually(condition: Callable[[], Awaitable[Any]], expected: Any) -> float:
    """Wait until the condition's value is the expected one; return the seconds that it took."""
    began = time.monotonic()
    value: Any = None
    while time.monotonic() - began < DEADLINE_SECONDS:
        value = await condition()
        if value == expected:
            return time.monotonic() - began
        await asyncio.sleep(0.01)
    raise AssertionError(f"still {value!r} instead of {expected!r} after {DEADLINE_SECONDS} s")


class Mesh:
    """Redis, its indexers, and what is in it."""

    def __init__(self, redis: RedisServer, folder: Path, stack: ExitStack) -> None:
        self.redis = redis
        self._folder = folder
        self._stack = stack
        self._client: Any = redis.client()  # its types are for both text and bytes

    async def indexer(self, name: str, *pods: BusyPod) -> IndexerProcess:
        """Start one and wait until it is ready."""
        return await self.indexer_of(name, [pod.pod.endpoint for pod in pods])

    async def indexer_of(self, name: str, endpoints: list[str]) -> IndexerProcess:
        """As `indexer`, of any pods."""
        process = self._stack.enter_context(indexer_process(self.redis, self._folder, name=name, endpoints=endpoints))
        await eventually(process.is_ready, True)
        return process

    def owners(self) -> dict[str, str]:
        """Stream -> readable name of its owner, from the raw records."""
        owners = {}
        for name in self._client.smembers("{kv2}streams"):
            owner = self._client.hget(b"{kv2}stream:" + name, "owner") or b""
            owners[name.decode()] = owner.decode().rpartition("-")[0]
        return owners

    async def shares(self) -> dict[str, int]:
        """Indexer -> how many streams it owns."""
        return dict(Counter(self.owners().values()))

    async def is_owned_by(self, *names: str) -> bool:
        """Whether these indexers share all streams among them."""
        return set(self.owners().values()) == set(names)

    def fences(self) -> dict[str, int]:
        """Stream -> fence."""
        names = self._client.smembers("{kv2}streams")
        return {name.decode(): int(self._client.hget(b"{kv2}stream:" + name, "fence")) for name in names}

    def epochs(self) -> dict[str, int]:
        """Stream -> epoch."""
        names = self._client.smembers("{kv2}streams")
        return {name.decode(): int(self._client.hget(b"{kv2}stream:" + name, "epoch")) for name in names}

    async def equals(self, *pods: BusyPod) -> None:
        """Wait until the index holds exactly what the pods hold, copy for copy, and contradicts itself nowhere."""
        await self.holds({pod.name: pod.held for pod in pods})

    async def holds(self, caches: dict[str, Counter[int]]) -> None:
        """As `equals`, of caches by stream."""

        async def counted() -> tuple[dict[str, Counter[int]], list[str]]:
            now = recount(self._client)
            return now.held, now.unlike

        await eventually(counted, (caches, []))


@pytest.fixture
def mesh(redis_server: RedisServer, tmp_path: Path) -> Iterator[Mesh]:
    with ExitStack() as stack:
        yield Mesh(redis_server, tmp_path, stack)


def assert_nothing_was_replayed_from_the_start(*pods: BusyPod) -> None:
    assert [request for pod in pods for request in pod.pod.requests if request == 0] == []


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)], ids=["killed", "stopped"]
)
async def test_another_takes_over_what_an_ended_indexer_followed_and_no_block_is_lost_or_doubled(
    mesh: Mesh, number: signal.Signals, status: int
) -> None:
    async with busy_pods(4) as pods:
        first = await mesh.indexer("first", *pods)
        second = await mesh.indexer("second", *pods)
        await eventually(mesh.shares, {"first": 2, "second": 2})
        async with at_work(pods):
            await eventually(lambda: has_published(pods, 20), True)
            epochs, fences = mesh.epochs(), mesh.fences()
            lost = [stream for stream, owner in mesh.owners().items() if owner == "first"]
            for pod in pods:
                pod.pod.requests.clear()

            assert first.end(number) == status
            if number is signal.SIGTERM:
                assert "first" not in mesh.owners().values()  # given back before it ended
            seconds = await eventually(lambda: mesh.is_owned_by("second"), True)
            await eventually(lambda: has_published(pods, 100), True)

        print(f"takeover after {number.name}: {seconds:.2f} s")
        assert seconds < TAKEOVER_SECONDS + MACHINE_SECONDS
        await mesh.equals(*pods)
        assert mesh.epochs() == epochs
        assert {stream for stream, fence in mesh.fences().items() if fence > fences[stream]} == set(lost)
        assert_nothing_was_replayed_from_the_start(*pods)
        await eventually(second.is_ready, True)
        assert await second.owners() == {pod.name: "second" for pod in pods}


async def has_published(pods: list[BusyPod], events: int) -> bool:
    return all(pod.events >= events for pod in pods)


async def test_simulated_pods_are_indexed_exactly_through_a_takeover(mesh: Mesh) -> None:
    engine = EngineSettings(total_blocks=80, prefill_tokens_per_second=1e6, inter_token_seconds=0.001)
    async with running_pods(
        PodSettings(max_model_len=1024, engine=engine),
        folder=load_model_folder(TINY_MODEL),
        publisher=PublisherSettings(host="127.0.0.1"),
        count=2,
    ) as pods:
        endpoints = [f"127.0.0.1:{pod.port}" for pod in pods]
        first = await mesh.indexer_of("first", endpoints)
        await mesh.indexer_of("second", endpoints)
        await eventually(mesh.shares, {"first": 1, "second": 1})

        await complete_prompts(endpoints, range(40))
        first.end(signal.SIGKILL)
        await complete_prompts(endpoints, range(30, 70))  # some are cached, most evict others
        await eventually(mesh.shares, {"second": 2})
        await complete_prompts(endpoints, range(60, 80))

        await mesh.holds({f"{endpoint}#0": cache_of(pod) for endpoint, pod in zip(endpoints, pods, strict=True)})


async def complete_prompts(endpoints: list[str], numbers: range) -> None:
    """Send each endpoint one prompt of 16 to 112 tokens a number."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_SECONDS)) as http:
        for number in numbers:
            prompt = [number % 7] * 16 + [number + 100] * 16 * (number % 7)
            for endpoint in endpoints:
                body = {"prompt": prompt, "max_tokens": 1}
                async with http.post(f"http://{endpoint}/v1/completions", json=body) as answer:
                    assert answer.status == 200, await answer.text()


def cache_of(pod: RunningPod) -> Counter[int]:
    """The pod's own account of its blocks, as engine hash -> copies."""
    return Counter(event_hash(digest) for digest in pod.pod.scheduler.pool._hash_of if digest is not None)


async def test_a_frozen_indexer_loses_its_streams_and_what_it_writes_when_it_wakes_is_refused(mesh: Mesh) -> None:
    async with busy_pods(2) as pods:
        first = await mesh.indexer("first", *pods)
        await asyncio.gather(*(pod.work(20) for pod in pods))
        await mesh.equals(*pods)
        second = await mesh.indexer("second", *pods)
        await eventually(mesh.shares, {"first": 1, "second": 1})

        first.send(signal.SIGSTOP)
        await asyncio.gather(*(pod.work(50) for pod in pods))  # also waits in the sockets of the frozen one
        seconds = await eventually(lambda: mesh.is_owned_by("second"), True)
        await mesh.equals(*pods)
        fences = mesh.fences()

        # it wakes while nobody answers: whatever it does next, it does on its old claim
        mesh.redis.freeze()
        first.send(signal.SIGCONT)
        await eventually(lambda: status_of(first, "/readyz"), 503)
        second.send(signal.SIGSTOP)
        await asyncio.gather(*(pod.work(1) for pod in pods))
        mesh.redis.thaw()
        # whichever comes first, its refused write or its tick
        refused = ("what was written last was refused", "another indexer follows it")
        await eventually(lambda: has_logged(first, *refused), True)
        second.send(signal.SIGCONT)

        print(f"takeover after SIGSTOP: {seconds:.2f} s")
        assert seconds < TAKEOVER_SECONDS + MACHINE_SECONDS
        await eventually(mesh.shares, {"first": 1, "second": 1})  # it is one of two again
        await asyncio.gather(*(pod.work(20) for pod in pods))
        await mesh.equals(*pods)
        assert all(fence >= fences[stream] for stream, fence in mesh.fences().items())
        await eventually(first.is_ready, True)
        await eventually(second.is_ready, True)


async def has_logged(process: IndexerProcess, *words: str) -> bool:
    return any(each in process.log() for each in words)


async def status_of(process: IndexerProcess, path: str) -> int:
    return (await process.page(path))[0]


async def test_indexers_with_different_endpoints_leave_each_others_streams_alone(mesh: Mesh) -> None:
    async with busy_pods(3) as (left, both, right):
        await mesh.indexer("first", left, both)
        await mesh.indexer("second", both, right)
        for _ in range(5):
            await asyncio.gather(*(pod.work(10) for pod in (left, both, right)))
            await mesh.equals(left, both, right)

        assert {mesh.owners()[left.name], mesh.owners()[right.name]} == {"first", "second"}


async def test_an_endpoint_that_no_living_indexer_lists_is_dropped(mesh: Mesh) -> None:
    async with busy_pods(2) as (old, kept):
        first = await mesh.indexer("first", old, kept)
        second = await mesh.indexer("second", kept)
        await asyncio.gather(old.work(20), kept.work(20))
        await mesh.equals(old, kept)

        first.end(signal.SIGTERM)
        await mesh.equals(kept)
        assert await second.owners() == {kept.name: "second"}


async def test_streams_move_to_an_indexer_that_joins_and_back_when_it_leaves_without_a_replay_from_the_start(
    mesh: Mesh,
) -> None:
    async with busy_pods(4) as pods:
        await mesh.indexer("first", *pods)
        await asyncio.gather(*(pod.work(20) for pod in pods))
        await mesh.equals(*pods)
        epochs = mesh.epochs()
        for pod in pods:
            pod.pod.requests.clear()

        async with at_work(pods):
            second = await mesh.indexer("second", *pods)
            await eventually(mesh.shares, {"first": 2, "second": 2})
            await eventually(lambda: has_published(pods, 80), True)
            second.end(signal.SIGTERM)
            await eventually(mesh.shares, {"first": 4})
            await eventually(lambda: has_published(pods, 120), True)

        await mesh.equals(*pods)
        assert mesh.epochs() == epochs
        assert_nothing_was_replayed_from_the_start(*pods)


async def test_an_indexer_that_owns_nothing_is_ready_and_shows_the_owner(mesh: Mesh) -> None:
    async with busy_pods(1) as (pod,):
        first = await mesh.indexer("first", pod)
        spare = await mesh.indexer("spare", pod)
        await pod.work(20)
        await mesh.equals(pod)

        assert await mesh.shares() == {"first": 1}
        assert await spare.owners() == await first.owners() == {pod.name: "first"}
        assert (await spare.page("/readyz")) == (200, '{"ready":true,"not_ready":{}}')
        assert f'endpoint="{pod.pod.endpoint}",state="live"' in (await first.page("/metrics"))[1]
        assert f'endpoint="{pod.pod.endpoint}",state="live"' not in (await spare.page("/metrics"))[1]


async def test_both_recover_when_redis_was_frozen_for_longer_than_a_lease(mesh: Mesh) -> None:
    async with busy_pods(2) as pods:
        first = await mesh.indexer("first", *pods)
        second = await mesh.indexer("second", *pods)
        await asyncio.gather(*(pod.work(20) for pod in pods))
        await mesh.equals(*pods)

        mesh.redis.freeze()
        await eventually(first.is_ready, False)
        await eventually(second.is_ready, False)
        await asyncio.gather(*(pod.work(20) for pod in pods))
        mesh.redis.thaw()
        await eventually(first.is_ready, True)
        await eventually(second.is_ready, True)
        await mesh.equals(*pods)


async def test_an_emptied_redis_is_filled_again_by_both(mesh: Mesh) -> None:
    async with busy_pods(2) as pods:
        first = await mesh.indexer("first", *pods)
        second = await mesh.indexer("second", *pods)
        await asyncio.gather(*(pod.work(20) for pod in pods))
        await mesh.equals(*pods)

        mesh.redis.client().flushall()
        await mesh.equals(*pods)
        await eventually(mesh.shares, {"first": 1, "second": 1})
        await eventually(first.is_ready, True)
        await eventually(second.is_ready, True)
