"""An eviction policy that would make the index wrong is warned of once, shown, and seen to be mended."""

import logging

import pytest

from kv_indexer.telemetry.indexer_telemetry import PrometheusTelemetry
from kv_indexer.watch.watch_index import EVICTION_LOOK_SECONDS, EVICTION_RETRY_SECONDS, EvictionWatch, eviction_policy
from tests.integration.kv_redis import RedisServer


def test_the_policy_is_read_from_what_redis_says_of_its_memory() -> None:
    assert eviction_policy("# Memory\r\nmaxmemory:0\r\nmaxmemory_policy:allkeys-lru\r\n") == "allkeys-lru"
    assert eviction_policy("# Memory\r\nmaxmemory_policy:made-up\r\n") == "unknown"
    assert eviction_policy("") == "unknown"


async def test_a_policy_that_evicts_is_said_once_with_the_remedy_and_once_more_when_mended(
    redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    shown: list[str] = []
    watch = EvictionWatch(url=redis_server.url, show=shown.append)
    caplog.set_level(logging.INFO, logger="kv_indexer")
    await watch.look()
    redis_server.client().config_set("maxmemory-policy", "volatile-ttl")
    for _ in range(3):
        assert await watch.look() == EVICTION_LOOK_SECONDS
    redis_server.client().config_set("maxmemory-policy", "noeviction")
    await watch.look()
    await watch.close()

    assert shown == ["noeviction", *["volatile-ttl"] * 3, "noeviction"]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "Redis evicts keys when its memory is full (maxmemory-policy volatile-ttl), which would make the index "
            "wrong: CONFIG SET maxmemory-policy noeviction, and give it enough memory (docs/reference/redis.md says "
            "how much)",
        ),
        ("INFO", "Redis evicts no keys any more"),
    ]


async def test_an_absent_redis_is_no_failure_and_shown_as_unknown(redis_server: RedisServer) -> None:
    shown: list[str] = []
    watch = EvictionWatch(url=redis_server.url, show=shown.append)
    redis_server.kill()

    assert await watch.look() == EVICTION_RETRY_SECONDS
    assert shown == ["unknown"]
    await watch.close()


def test_the_metric_names_the_policy_of_now() -> None:
    telemetry = PrometheusTelemetry()
    for policy in ("allkeys-lru", "noeviction"):
        telemetry.eviction_policy(policy)

    lines = [line for line in telemetry.render().decode().splitlines() if "eviction_policy{" in line]
    assert lines == ['kvmesh_indexer_redis_eviction_policy{policy="noeviction"} 1.0']
