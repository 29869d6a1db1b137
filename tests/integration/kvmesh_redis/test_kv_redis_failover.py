"""A killed master is replaced by its replica, and a link finds it by itself: real Sentinels and a real cluster."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.keys import KEY_SLOT
from kvmesh.redis.link import RedisLink, Script
from tests.integration.kv_index import A, blocks, redis_index
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import (
    DEADLINE_SECONDS,
    RIGHTS,
    ClusterGroup,
    SentinelGroup,
    command,
    eventually,
)

KEY = b"{kv2}test"
COUNT = Script("return redis.call('INCR', KEYS[1])")


async def write_until_it_works(link: RedisLink) -> tuple[int, list[str]]:
    """Return what the first successful write answered, and what was said before."""
    deadline, said = time.monotonic() + DEADLINE_SECONDS, list[str]()
    while True:
        try:
            async with asyncio.timeout(3.0):  # longer than any attempt: the link's own deadlines must end it
                return int(await link.run(COUNT, keys=[KEY], arguments=[])), said
        except IndexUnavailableError as error:
            said.append(str(error))
        assert time.monotonic() < deadline, said[-5:]
        await asyncio.sleep(0.02)


@pytest.fixture
async def sentinels(tmp_path: Path) -> AsyncIterator[SentinelGroup]:
    group = SentinelGroup(tmp_path)
    try:
        await group.formed()
        yield group
    finally:
        group.kill()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[ClusterGroup]:
    group = ClusterGroup(tmp_path)
    try:
        await group.formed()
        yield group
    finally:
        group.kill()


async def the_index_outlives(group: Any, *, master: RedisServer) -> None:
    """Write blocks, kill the master, write more: the reader finds all of them."""
    async with redis_index(group) as index:
        await index.apply(A, blocks(1, 3))
        assert await index.matched() == {A.endpoint: 3}
        client: Any = master.client()
        assert client.wait(1, 5000) == 1  # the replica has it
        master.kill()
        deadline, seen = time.monotonic() + DEADLINE_SECONDS, dict[str, int]()
        while seen != {A.endpoint: 5}:
            assert time.monotonic() < deadline, seen
            await asyncio.sleep(0.02)
            with suppress(IndexUnavailableError):
                if not seen:
                    await index.apply(A, blocks(4, 5))
                seen = await index.matched()


async def test_the_index_outlives_its_master_behind_sentinels(sentinels: SentinelGroup) -> None:
    await the_index_outlives(sentinels, master=sentinels.first)


async def test_the_index_outlives_its_master_in_a_cluster(cluster: ClusterGroup) -> None:
    await the_index_outlives(cluster, master=cluster.owner)


async def test_the_documented_rights_suffice_in_a_cluster(cluster: ClusterGroup) -> None:
    for server in cluster.servers:
        command(server, "ACL", "SETUSER", "kvmesh", "on", ">s3cret", *RIGHTS, "+cluster|slots")
    link = RedisLink(cluster.url.replace("://", "://kvmesh:s3cret@"))

    assert await write_until_it_works(link) == (1, [])
    await link.close()


async def test_sentinels_lead_to_the_promoted_replica_and_never_back(sentinels: SentinelGroup) -> None:
    link = RedisLink(sentinels.url)
    assert await write_until_it_works(link) == (1, [])
    await eventually(lambda: sentinels.second.client().get(KEY) == b"1", "a copy")
    sentinels.first.kill()

    count, said = await write_until_it_works(link)
    assert count == 2
    assert said
    sentinels.first.start()  # it thinks that it is a master, and it is empty
    for expected in range(3, 8):
        assert await write_until_it_works(link) == (expected, [])
    assert sentinels.second.client().get(KEY) == b"7"
    await link.close()


async def test_a_frozen_master_is_given_up_and_gets_nothing_when_it_wakes(sentinels: SentinelGroup) -> None:
    link = RedisLink(sentinels.url, stall_seconds=0.5)
    assert await write_until_it_works(link) == (1, [])
    await eventually(lambda: sentinels.second.client().get(KEY) == b"1", "a copy")
    sentinels.first.freeze()
    with pytest.raises((TimeoutError, IndexUnavailableError)):  # whichever limit is noticed first
        async with asyncio.timeout(0.6):
            await link.run(COUNT, keys=[KEY], arguments=[])

    assert (await write_until_it_works(link))[0] == 2
    sentinels.first.thaw()
    assert await write_until_it_works(link) == (3, [])
    await link.close()


async def test_a_link_moves_with_the_sentinels_although_the_old_master_lives(sentinels: SentinelGroup) -> None:
    link = RedisLink(sentinels.url, recheck_seconds=0.1)
    assert await write_until_it_works(link) == (1, [])
    await eventually(lambda: sentinels.second.client().get(KEY) == b"1", "a copy")
    command(sentinels.sentinels[0], "SENTINEL", "FAILOVER", sentinels.name)
    await eventually(lambda: sentinels.second.client().info("replication")["role"] == "master", "a promotion")

    # the Sentinels take about ten seconds to tell the old master, which takes writes until then
    deadline = time.monotonic() + 5
    while sentinels.second.client().get(KEY) == b"1":
        assert time.monotonic() < deadline, "the link stays with the old master"
        await write_until_it_works(link)
    await link.close()


async def test_some_nodes_of_a_cluster_lead_to_the_one_that_has_the_index(cluster: ClusterGroup) -> None:
    strangers = [one for one in cluster.masters if one is not cluster.owner]
    link = RedisLink(f"redis+cluster://127.0.0.1:{strangers[0].port},127.0.0.1:{strangers[1].port}")

    assert await write_until_it_works(link) == (1, [])
    assert cluster.owner.client().get(KEY) == b"1"
    await link.close()


async def test_a_cluster_goes_on_with_the_replica_of_a_killed_master(cluster: ClusterGroup) -> None:
    link = RedisLink(cluster.url)
    assert await write_until_it_works(link) == (1, [])
    await eventually(lambda: command(cluster.replica, "CLUSTER", "COUNTKEYSINSLOT", KEY_SLOT) == 1, "a copy")
    cluster.owner.kill()

    count, said = await write_until_it_works(link)
    assert count == 2
    assert said
    assert cluster.replica.client().get(KEY) == b"2"
    await link.close()


async def test_a_moved_slot_is_followed_within_the_request(cluster: ClusterGroup) -> None:
    link = RedisLink(cluster.url)
    assert await write_until_it_works(link) == (1, [])
    command(cluster.replica, "CLUSTER", "FAILOVER")
    await eventually(lambda: cluster.replica.client().info("replication")["role"] == "master", "a handover")

    assert await link.run(COUNT, keys=[KEY], arguments=[]) == 2
    assert cluster.replica.client().get(KEY) == b"2"
    await link.close()


async def test_while_its_slot_is_moved_the_index_is_unavailable_and_afterwards_whole(cluster: ClusterGroup) -> None:
    half = Script("return {redis.call('GET', KEYS[1] .. 'test'), redis.call('GET', KEYS[1] .. 'other')}")
    target = next(one for one in cluster.masters if one is not cluster.owner)
    link = RedisLink(cluster.url)
    await link.call("SET", KEY, "a")
    await link.call("SET", b"{kv2}other", "b")
    command(target, "CLUSTER", "SETSLOT", KEY_SLOT, "IMPORTING", cluster.id_of(cluster.owner))
    command(cluster.owner, "CLUSTER", "SETSLOT", KEY_SLOT, "MIGRATING", cluster.id_of(target))
    command(cluster.owner, "MIGRATE", "127.0.0.1", target.port, KEY.decode(), 0, 1000)

    with pytest.raises(IndexUnavailableError, match="is moving the index's slot"):
        await link.run(half, keys=[b"{kv2}"], arguments=[])
    command(cluster.owner, "MIGRATE", "127.0.0.1", target.port, "{kv2}other", 0, 1000)
    for one in (target, cluster.owner):
        command(one, "CLUSTER", "SETSLOT", KEY_SLOT, "NODE", cluster.id_of(target))
    assert await link.run(half, keys=[b"{kv2}"], arguments=[]) == [b"a", b"b"]
    await link.close()
