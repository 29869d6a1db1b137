"""The mark that says whose keys a stream's blocks have: the same in Redis and its twin, written under a claim alone."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_indexer.share.redis_leases import RedisLeaseBook
from kvmesh.blocks.index_changes import Clear
from kvmesh.blocks.source import Claim, Stream
from kvmesh.errors import LeaseLostError
from tests.integration.kv_index import A, B, Index, P, blocks, change, memory_index, redis_index
from tests.integration.kv_redis import RedisServer


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


async def test_a_namespace_outlives_epochs_and_is_gone_with_the_stream(index: Index) -> None:
    claim = await index.claim(A)
    assert (await index.position(A)).namespace == ""
    await index.writer.set_namespace(claim, namespace="0123456789abcdef")
    await index.apply(A, blocks(1, 2))
    before = await index.position(A)
    await index.writer.begin_epoch(claim, expected_epoch=before.epoch, last_seq=-1, degraded="")
    await index.apply(A, Clear(), blocks(1, 1))
    assert (await index.position(A)).namespace == "0123456789abcdef"
    assert (await index.position(B)).namespace == ""

    await index.drop(A)
    assert (await index.position(A)).namespace == ""


async def test_whoever_has_lost_the_stream_may_not_mark_it(index: Index) -> None:
    claim = await index.claim(A)
    with pytest.raises(LeaseLostError):
        await index.writer.set_namespace(Claim(stream=A, fence=claim.fence - 1), namespace="ff")
    assert (await index.position(A)).namespace == ""


async def test_a_longer_lease_holds_for_longer(redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    pace = 1.0
    book = RedisLeaseBook(
        url=redis_server.url, indexer="one", endpoints=[A.endpoint], lease_seconds=2.0, slowdown=lambda: pace
    )
    for pace in (1.0, 5.0):  # the book asks for it
        await book.tick({A})
        now, micros = client.time()
        left = float(str(client.hget(f"{P}stream:{A.name}", "lease_until"), "ascii")) - (now * 1000 + micros / 1000)
        assert pace * 2000 - 1500 < left <= pace * 2000
    await book.close()


async def test_spoilt_slots_of_a_large_fleet_are_found_within_a_few_ticks(redis_server: RedisServer) -> None:
    streams = {Stream(endpoint=f"10.0.{number // 250}.{number % 250}:8000") for number in range(600)}
    book = RedisLeaseBook(url=redis_server.url, indexer="one", endpoints=[each.endpoint for each in streams])
    async with redis_index(redis_server) as index:
        index.claims = dict(await book.tick(streams))
        victim = max(streams, key=lambda stream: stream.name)
        index.endpoints = {each.endpoint for each in streams}
        position = await index.writer.read_position(victim)
        await index.writer.apply(index.claims[victim], change(position, blocks(1, 2)))
        redis_server.client().delete(f"{P}slots")
        for _ in range(100):  # 256 of 600 a tick, at random: nobody is missed as often as that
            await book.tick(streams)
            if (await index.writer.read_position(victim)).reason == "registry-damaged":
                break
        assert (await index.writer.read_position(victim)).reason == "registry-damaged"
    await book.close()
