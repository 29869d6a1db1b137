"""What a real Redis says of itself reaches the metrics, and one that hangs or goes is not waited for."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from kv_indexer.telemetry import metrics
from kv_indexer.telemetry.redis_telemetry import LOOK_SECONDS, REDIS_METRICS, RedisFacts, RedisWatch
from tests.integration.kv_redis import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.start()
    yield server
    server.kill()


class Shown:
    """What was shown, in order."""

    def __init__(self) -> None:
        self.facts: list[RedisFacts | None] = []
        self.seconds: list[float] = []

    def __call__(self, facts: RedisFacts | None, seconds: float) -> None:
        self.facts.append(facts)
        self.seconds.append(seconds)


async def test_a_real_redis_tells_all_that_is_shown(server: RedisServer) -> None:
    shown = Shown()
    watch = RedisWatch(url=server.url, show=shown)
    client = redis.asyncio.Redis.from_url(server.url)
    try:
        await client.mset({f"k{i}": "v" for i in range(7)})
        assert await watch.look() == LOOK_SECONDS
    finally:
        await client.aclose()
        await watch.close()
    (facts,) = shown.facts
    assert facts is not None
    exact = {metrics.REDIS_KEYS: 7.0, metrics.REDIS_EVICTED: 0.0, metrics.REDIS_MEMORY_LIMIT: 0.0}
    assert {metric: facts[metric] for metric in exact} == exact
    assert facts[metrics.REDIS_MEMORY] > 100_000
    assert set(facts) >= set(REDIS_METRICS) - {metrics.REDIS_TRACKED_KEYS}
    assert 0 < shown.seconds[0] < 2.0


async def test_a_redis_that_hangs_or_is_gone_is_not_waited_for_and_heard_again_when_it_is_back(
    server: RedisServer,
) -> None:
    shown = Shown()
    watch = RedisWatch(url=server.url, show=shown, timeout_seconds=0.5)
    try:
        await watch.look()
        server.freeze()
        await watch.look()
        server.kill()
        await watch.look()
        server.start()
        async with asyncio.timeout(15.0):
            while shown.facts[-1] is None:
                await watch.look()
                await asyncio.sleep(0.02)
    finally:
        await watch.close()
    assert shown.facts[0] is not None
    assert shown.facts[1:3] == [None, None]
    assert max(shown.seconds) < 5.0
