"""The whole indexer beside simulated pods that misbehave: each finding appears, says what to do, and heals."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio
from aiohttp import web

from kv_indexer.config import IndexerSettings, parse_event_sources
from kv_indexer.follow.catch_up import RecoveryPolicy
from kv_indexer.service import IndexerService
from kv_indexer.watch.stream_activity import FindingPolicy
from kvmesh.index.redis_findings import RedisFindings
from podsim.core.events import BlockStored
from podsim.core.scheduler import EngineSettings
from podsim.model_folder import TINY_MODEL, load_model_folder
from podsim.pod import PodSettings
from podsim.publisher import PublisherSettings
from podsim.server import RunningPod, running_pods
from podsim.wire.kv_events import EventGeneration, encode_batch
from tests.integration.kv_redis import RedisServer

DEADLINE_SECONDS = 20.0
SETTINGS = PodSettings(
    max_model_len=4096,
    engine=EngineSettings(total_blocks=2000, prefill_tokens_per_second=1e7, inter_token_seconds=0.001),
)
IMPATIENT = FindingPolicy(silent_seconds=0.5, stuck_seconds=0.5, settle_seconds=0.1)


async def eventually(look: Callable[[], Awaitable[Any]], expected: Any) -> None:
    value: Any = None
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        value = await look()
        if value == expected:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still {value!r} instead of {expected!r}")


@dataclass
class SimulatedPod:
    """One podsim and what may be done to it."""

    running: RunningPod
    http: aiohttp.ClientSession
    asked: int = 0

    @property
    def endpoint(self) -> str:
        return self.running.base_url.removeprefix("http://")

    @property
    def addresses(self) -> dict[str, str]:
        return {"events": self.running.events_endpoint, "replay": self.running.replay_endpoint}

    async def serve(self, *, tokens: int, times: int = 1, again: bool = False) -> None:
        """Answer prompts of so many tokens, each of its own, or all alike."""
        for _ in range(times):
            self.asked += not again
            body = {"prompt": [self.asked % 2000 + 100] * tokens, "max_tokens": 1}
            async with self.http.post(f"{self.running.base_url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()


class World:
    """A Redis, pods, an indexer, and what it found."""

    def __init__(self, redis_server: RedisServer, stack: AsyncExitStack) -> None:
        self._redis = redis_server
        self.stack = stack
        self._shared = RedisFindings(url=redis_server.url)
        stack.push_async_callback(self._shared.close)
        self.service: IndexerService | None = None
        self._http: aiohttp.ClientSession | None = None

    async def http(self) -> aiohttp.ClientSession:
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
            self._http = await self.stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        return self._http

    async def pod(self, *, block_size: int = 16) -> SimulatedPod:
        settings = replace(SETTINGS, engine=replace(SETTINGS.engine, block_size=block_size))
        folder, publisher = load_model_folder(TINY_MODEL), PublisherSettings(host="127.0.0.1")
        (running,) = await self.stack.enter_async_context(running_pods(settings, folder=folder, publisher=publisher))
        return SimulatedPod(running, await self.http())

    def begin(self, *endpoints: str, sources: dict[str, dict[str, str]] | None = None) -> None:
        """Start the indexer."""
        self.service = IndexerService(
            IndexerSettings(
                host="127.0.0.1",
                admin_port=0,
                redis_url=self._redis.url,
                endpoints=endpoints,
                model="tiny",
                hash_seed="kvmesh",
                event_sources=parse_event_sources(sources),
                rediscover_seconds=0.2,
                rediscover_lost_seconds=0.05,
                recovery=RecoveryPolicy(attempts_without_progress=1),
                findings=IMPATIENT,
                scrape_seconds=0.05,
            )
        )
        task = asyncio.create_task(self.service.run(), name="indexer")
        self.stack.push_async_callback(_stop, task)

    async def index(self, *endpoints: str, sources: dict[str, dict[str, str]] | None = None) -> None:
        """Start the indexer and wait until it is ready."""
        self.begin(*endpoints, sources=sources)
        await eventually(self._not_ready, {})

    async def _not_ready(self) -> dict[str, str]:
        assert self.service is not None
        return dict(self.service.not_ready())

    async def found(self) -> list[tuple[str, str]]:
        """As the command line sees it."""
        return [finding.key for finding in await self._shared.read()]

    async def page(self, path: str) -> Any:
        assert self.service is not None
        http = await self.http()
        async with http.get(f"http://127.0.0.1:{self.service.admin_port}{path}") as answer:
            return await answer.json() if path == "/sources" else await answer.text()

    async def blocks(self) -> int:
        return sum(source["cached_blocks"] for source in (await self.page("/sources"))["sources"])


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def world(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> AsyncIterator[World]:
    caplog.set_level(logging.INFO)
    async with AsyncExitStack() as stack:
        yield World(redis_server, stack)


def lines(caplog: pytest.LogCaptureFixture, reason: str) -> list[str]:
    """The levels of all that was logged about one reason."""
    return [record.levelname for record in caplog.records if getattr(record, "finding", None) == reason]


async def test_a_pod_whose_events_do_not_reach_us_is_found_everywhere_and_heals_everywhere(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod, other = await world.pod(), await world.pod()
    await world.index(pod.endpoint, sources={pod.endpoint: other.addresses})  # a mistake that nothing refuses
    assert f'kvmesh_indexer_finding{{endpoint="{pod.endpoint}",reason="no-events"}} 0.0' in await world.page("/metrics")
    found = (f"{pod.endpoint}#0", "no-events")

    async def serve_and_look() -> list[tuple[str, str]]:
        await pod.serve(tokens=400)
        return await world.found()

    await eventually(serve_and_look, [found])
    assert lines(caplog, "no-events") == ["WARNING"]
    assert "--event-sources" in caplog.text
    assert f'kvmesh_indexer_finding{{endpoint="{pod.endpoint}",reason="no-events"}} 1.0' in await world.page("/metrics")

    async def on_page() -> list[tuple[str, int, str]]:
        findings = (await world.page("/sources"))["findings"]
        return [(finding["endpoint"], finding["dp_rank"], finding["reason"]) for finding in findings]

    await eventually(on_page, [(pod.endpoint, 0, "no-events")])

    await other.serve(tokens=400)
    await eventually(world.found, [])
    await eventually(on_page, [])
    assert lines(caplog, "no-events") == ["WARNING", "INFO"]
    assert f'kvmesh_indexer_finding{{endpoint="{pod.endpoint}",reason="no-events"}} 0.0' in await world.page("/metrics")


async def test_a_well_pod_is_never_found_whatever_it_serves(world: World, caplog: pytest.LogCaptureFixture) -> None:
    pod = await world.pod()
    await world.index(pod.endpoint)
    ends_at = time.monotonic() + 4
    while time.monotonic() < ends_at:
        await pod.serve(tokens=400)  # new
        await pod.serve(tokens=400, times=3, again=True)  # cached
        await pod.serve(tokens=10, times=20)  # shorter than a block
        await asyncio.sleep(0.7)  # longer than the patience of the rules
        assert await world.found() == []

    assert [record.getMessage() for record in caplog.records if hasattr(record, "finding")] == []


async def test_a_pod_that_publishes_nothing_is_told_how_to_publish(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod()

    async def without_sources(request: web.Request) -> web.StreamResponse:
        if request.path == "/kv_event_sources":
            return web.json_response({"0": None})
        async with (await world.http()).get(f"{pod.running.base_url}{request.path}") as answer:
            return web.Response(body=await answer.read(), status=answer.status)

    runner = web.ServerRunner(web.Server(without_sources), shutdown_timeout=0.01)  # type: ignore[arg-type]
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = f"127.0.0.1:{runner.addresses[0][1]}"
        await world.index(endpoint)

        async def serve_and_look() -> list[tuple[str, str]]:
            await pod.serve(tokens=400)
            return await world.found()

        await eventually(serve_and_look, [(endpoint, "no-events")])
        assert "no source of its events is known; start it with --kv-events-config" in caplog.text
    finally:
        await runner.cleanup()


async def test_events_of_another_pod_with_other_blocks_are_found_by_their_size(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod, other = await world.pod(block_size=32), await world.pod(block_size=16)
    await world.index(pod.endpoint, sources={pod.endpoint: other.addresses})
    await other.serve(tokens=400)

    await eventually(world.found, [(f"{pod.endpoint}#0", "block-size-changed")])
    assert "the index has blocks of 16 tokens, the pod says 32" in caplog.text


async def test_a_pod_with_huge_blocks_and_short_prompts_is_explained_until_a_prompt_fills_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod(block_size=528)
    await world.index(pod.endpoint)

    async def serve_and_look() -> list[tuple[str, str]]:
        await pod.serve(tokens=100, times=10)
        return await world.found()

    await eventually(serve_and_look, [(f"{pod.endpoint}#0", "short-prompts")])
    assert "its blocks have 528 tokens, and only full blocks are cached" in caplog.text
    await pod.serve(tokens=600)
    await eventually(world.found, [])


class Publisher:
    """A publisher of what one likes: the events of a pod whose HTTP side is another."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._context = zmq.asyncio.Context()
        stack.callback(self._context.destroy, linger=0)
        self._socket = self._context.socket(zmq.PUB)
        self._next = 0
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self.addresses = {"events": f"tcp://127.0.0.1:{port}"}

    async def publish(self, payload: bytes) -> None:
        await self._socket.send_multipart([b"", self._next.to_bytes(8, "big"), payload])
        self._next += 1


async def test_what_cannot_be_decoded_is_found_with_its_likely_cause(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod()
    publisher = Publisher(world.stack)
    await world.index(pod.endpoint, sources={pod.endpoint: publisher.addresses})
    newer = b"\x92\xcb" + b"\x41\xda\x00\x00\x00\x00\x00\x00" + b"\x91\x91\xabBlockMoved!"

    async def publish_and_look() -> list[tuple[str, str]]:
        await publisher.publish(newer)
        return await world.found()

    await eventually(publish_and_look, [(f"{pod.endpoint}#0", "decode-errors")])
    assert "unknown-event-type" in caplog.text
    assert "its vLLM is probably newer than this kvmesh knows" in caplog.text


async def test_a_pod_whose_cache_is_hit_while_all_its_events_are_left_out_is_found_with_the_reason(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod()
    publisher = Publisher(world.stack)
    await world.index(pod.endpoint, sources={pod.endpoint: publisher.addresses})
    event: dict[str, Any] = {"type": "BlockStored", "block_hashes": [1], "parent_block_hash": None, "block_size": 16}
    event |= {"token_ids": [7] * 16, "lora_id": None, "medium": "GPU"}

    async def serve_and_look() -> list[tuple[str, str]]:
        await pod.serve(tokens=400, again=True)
        await publisher.publish(msgspec.msgpack.encode([1000.0, [{**event, "medium": "ELSEWHERE"}]]))
        return await world.found()

    await eventually(serve_and_look, [(f"{pod.endpoint}#0", "nothing-indexed")])
    assert "events were left out: unknown-medium" in caplog.text

    async def store_and_look() -> list[tuple[str, str]]:
        # again and again: without replay, what is said while a follower begins anew is lost
        await publisher.publish(msgspec.msgpack.encode([1001.0, [event]]))
        return await world.found()

    await eventually(store_and_look, [])


async def test_a_block_size_that_changes_within_the_events_is_found(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod()
    publisher = Publisher(world.stack)
    await world.index(pod.endpoint, sources={pod.endpoint: publisher.addresses})

    def stored(number: int, *, block_size: int) -> bytes:
        digest, tokens = number.to_bytes(32, "big"), [number] * block_size
        event = BlockStored(block_hashes=[digest], parent_hash=None, token_ids=tokens, block_size=block_size)
        return encode_batch([event], generation=EventGeneration.G5, timestamp=1000.0 + number)

    async def is_indexed() -> bool:
        await publisher.publish(stored(1, block_size=16))
        return await world.blocks() == 1

    await eventually(is_indexed, True)
    await publisher.publish(stored(2, block_size=32))

    await eventually(world.found, [(f"{pod.endpoint}#0", "block-size-changed")])
    assert "Check that one pod alone publishes at this address" in caplog.text


async def test_a_replay_that_never_gets_on_is_found_until_the_follower_relies_on_live_batches_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    pod = await world.pod()
    await pod.serve(tokens=400)
    silent = Publisher(world.stack)  # takes a connection, and never answers what it is asked
    world.begin(pod.endpoint, sources={pod.endpoint: {**pod.addresses, "replay": silent.addresses["events"]}})

    await eventually(world.found, [(f"{pod.endpoint}#0", "stuck-in-replay")])
    assert "check that its replay address" in caplog.text
    await eventually(world.found, [])
    assert lines(caplog, "stuck-in-replay") == ["WARNING", "INFO"]
