"""What only a real Redis can show: leftovers, lost connections, deadlines, restarts, forgotten scripts."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kvmesh.blocks.index_changes import Clear, Operation
from kvmesh.blocks.source import SourceStatus, Stream
from kvmesh.errors import IndexUnavailableError
from kvmesh.redis.link import RedisLink, Script, pack
from tests.integration.kv_index import A1, A, B, Index, P, blocks, change, memory_index, redis_index, without
from tests.integration.kv_redis import RedisServer, free_port


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[Index]:
    async with redis_index(redis_server) as one:
        yield one


async def test_nothing_is_left_of_removed_cleared_and_dropped_blocks(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 50), blocks(1, 9, tier="CPU"), blocks(1, 4))
    await index.apply(B, blocks(1, 20))
    await index.apply(B, without(*range(1, 21)))
    await index.apply(A, Clear(), blocks(1, 5))
    await index.apply(A, without(*range(1, 6)))
    await index.drop(A)
    await index.drop(B)
    await index.sweep()

    client: Any = redis_server.client()
    assert sorted(client.keys()) == [f"{P}{name}".encode() for name in ("heartbeat", "indexers", "pulses", "registry")]
    assert int(client.hget(f"{P}registry", "swept")) == 50 + 9  # the others were removed one by one


async def test_a_lookup_that_is_given_up_leaves_the_connection_usable(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 3))
    assert await index.matched() == {A.endpoint: 3}
    redis_server.freeze()
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await index.matched(2)
    redis_server.thaw()

    assert [await index.matched(number) for number in (1, 2, 3)] == [
        {A.endpoint: 1},
        {A.endpoint: 2},
        {A.endpoint: 3},
    ]
    assert len(redis_server.client().client_list()) == 3  # writer, reader, and this one


async def test_lookups_at_the_same_time_get_their_own_answers(index: Index) -> None:
    await index.apply(A, blocks(1, 30))

    answers = await asyncio.gather(*(index.matched(number) for number in range(1, 31)))

    assert answers == [{A.endpoint: number} for number in range(1, 31)]


async def test_redis_down_is_an_error_at_once_and_forgotten_when_it_is_back(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 3))
    assert await index.matched() == {A.endpoint: 3}
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(IndexUnavailableError):
            await index.matched()
        with pytest.raises(IndexUnavailableError):
            await index.writer.sweep(fields=1)
    redis_server.start()
    index.claims.clear()

    assert await index.matched() == {}  # it came back empty
    await index.apply(B, blocks(1, 2))
    assert await index.matched() == {B.endpoint: 2}


async def test_a_refilled_redis_is_not_taken_for_the_old_one(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 3))
    assert await index.matched() == {A.endpoint: 3}
    redis_server.client().flushall()
    index.claims.clear()
    await index.apply(B, blocks(1, 3))  # same slot, same counter, another pod

    assert await index.matched() == {B.endpoint: 3}


async def test_a_reader_sees_a_change_of_slots_in_the_very_next_lookup(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    assert await index.matched() == {A.endpoint: 3}
    await index.drop(A)
    await index.sweep()
    await index.apply(B, blocks(1, 2))  # takes A's slot

    assert await index.matched() == {B.endpoint: 2}


async def test_scripts_survive_a_flush_of_the_script_cache(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 1))
    redis_server.client().script_flush()
    await index.apply(A, blocks(2, 2))

    assert await index.matched() == {A.endpoint: 2}


async def test_a_frozen_redis_is_an_error_for_the_writer_within_its_deadline(
    index: Index, redis_server: RedisServer
) -> None:
    await index.writer.sweep(fields=1)
    redis_server.freeze()
    with pytest.raises(IndexUnavailableError, match="did not answer within 1 s"):
        await index.writer.sweep(fields=1)
    redis_server.thaw()

    await index.writer.sweep(fields=1)


async def test_a_full_redis_refuses_writes_and_serves_lookups(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 3))
    redis_server.client().config_set("maxmemory", 1)
    with pytest.raises(IndexUnavailableError, match="OOM"):
        await index.apply(A, blocks(4, 5))
    assert await index.matched() == {A.endpoint: 3}
    redis_server.client().config_set("maxmemory", 0)

    await index.apply(A, blocks(4, 5))
    assert await index.matched() == {A.endpoint: 5}


async def test_a_password_is_used_and_a_missing_one_reported(redis_server: RedisServer) -> None:
    redis_server.client().config_set("requirepass", "s3cret")
    with_password = RedisLink(redis_server.url.replace("redis://", "redis://:s3cret@"))
    without_password = RedisLink(redis_server.url)

    assert await with_password.call("PING") == b"PONG"
    with pytest.raises(IndexUnavailableError, match="NOAUTH"):
        await without_password.call("PING")
    await with_password.close()
    await without_password.close()


async def test_a_server_that_is_no_redis_is_reported() -> None:
    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    link = RedisLink(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(IndexUnavailableError):
        await link.call("PING")
    await link.close()
    server.close()


async def test_a_closed_port_is_reported_with_its_cause() -> None:
    link = RedisLink(f"redis://127.0.0.1:{free_port()}")

    with pytest.raises(IndexUnavailableError, match="cannot connect to Redis"):
        await link.call("PING")


async def test_pipelined_requests_are_answered_in_order(redis_server: RedisServer) -> None:
    link = RedisLink(redis_server.url)
    echo = Script("return ARGV[1]")

    answers = await asyncio.gather(*(link.run(echo, keys=[], arguments=[number]) for number in range(100)))
    pair = await link.request(pack("ECHO", "a") + pack("ECHO", "b"), replies=2)
    await link.close()

    assert (answers, pair) == ([b"%d" % number for number in range(100)], [b"a", b"b"])


async def test_a_warm_prompt_is_one_round_trip(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 512))
    assert await index.matched(512) == {A.endpoint: 512}
    assert await round_trips(index, redis_server, 512) == {"mget": 1, "hmget": 2}


async def round_trips(index: Index, redis_server: RedisServer, blocks_: int) -> dict[str, int]:
    """What one lookup asks Redis for."""
    client: Any = redis_server.client()
    client.config_resetstat()
    await index.matched(blocks_)
    stats = client.info("commandstats")
    return {name: stats[f"cmdstat_{name}"]["calls"] for name in ("mget", "hmget", "eval") if f"cmdstat_{name}" in stats}


async def test_a_cold_prompt_costs_one_small_chunk(index: Index, redis_server: RedisServer) -> None:
    await index.apply(B, blocks(600, 600))  # there is something in the index
    await index.matched(1)
    client: Any = redis_server.client()
    before = client.info("stats")["keyspace_misses"]
    assert await round_trips(index, redis_server, 512) == {"mget": 1, "hmget": 2}
    assert await round_trips(index, redis_server, 512) == {"mget": 1, "hmget": 2}  # and it stays so

    assert client.info("stats")["keyspace_misses"] - before <= 2 * 32


async def test_a_warm_prompt_that_this_reader_has_not_seen_takes_two_round_trips(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 512))
    await index.matched(1)
    async with redis_index(redis_server) as other:
        await other.matched(1)
        assert await round_trips(other, redis_server, 512) == {"mget": 2, "hmget": 4}
        assert await round_trips(other, redis_server, 512) == {"mget": 1, "hmget": 2}


async def test_a_walk_ends_where_only_pods_go_on_that_joined_later(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 10))
    await index.apply(B, blocks(2, 2000))
    await index.matched(1)

    assert await round_trips(index, redis_server, 2000) == {"mget": 1, "hmget": 2}
    assert await index.matched(2000) == {A.endpoint: 10}


async def test_any_stream_of_changes_leaves_redis_and_its_twin_equal(index: Index) -> None:
    async with memory_index() as twin:
        await compare(index, twin)


async def compare(index: Index, twin: Index) -> None:
    dice = random.Random(20)
    streams = [A, B, *(Stream(endpoint="10.0.0.3:8000", dp_rank=rank) for rank in range(9))]

    def operation() -> Operation:
        where: dict[str, Any] = {"tier": dice.choice(["GPU", "GPU", "CPU"]), "group": dice.choice([0, 0, 0, 1])}
        first = dice.randint(1, 12)
        if dice.random() < 0.05:
            return Clear()
        if dice.random() < 0.55:
            return blocks(first, first + dice.randint(0, 6), **where)
        return without(*dice.choices(range(1, 19), k=dice.randint(1, 8)), **where)

    for step in range(250):
        stream = dice.choice(streams)
        operations = [operation() for _ in range(dice.randint(1, 4))]
        await index.apply(stream, *operations)
        await twin.apply(stream, *operations)
        if dice.random() < 0.1:
            await asyncio.gather(index.writer.sweep(fields=3), twin.writer.sweep(fields=3))
            await asyncio.gather(index.sweep(), twin.sweep())
        if dice.random() < 0.02:
            await asyncio.gather(index.drop(stream), twin.drop(stream))
        assert await index.matched(18) == await twin.matched(18), step
        assert await index.position(stream) == await twin.position(stream), step
        assert lines_of(await index.reader.sources()) == lines_of(await twin.reader.sources()), step


def lines_of(lines: list[SourceStatus]) -> list[SourceStatus]:
    """Without what depends on the clock."""
    return [replace(line, applied_at=0.0, owner="") for line in lines]


async def test_one_indexer_sweeps_at_a_time_and_a_silent_one_gives_way(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 1000))
    await index.drop(A)
    other = RedisIndexWriter(url=redis_server.url)
    assert [await each.sweep(fields=100) for each in (index.writer, other, index.writer)] == [True, False, True]

    redis_server.client().hset(f"{P}registry", "sweeper_until", 0)  # instead of waiting for its 2 s
    assert [await each.sweep(fields=100) for each in (other, index.writer)] == [True, False]
    while await other.sweep(fields=100):
        pass
    assert not redis_server.client().hexists(f"{P}registry", "sweeper")
    await index.apply(B, blocks(1, 10))
    await index.drop(B)
    assert await index.sweep() > 0
    await other.close()


async def test_a_search_among_other_streams_comes_in_slices(index: Index, redis_server: RedisServer) -> None:
    for number in range(20):
        await index.apply(Stream(endpoint=f"10.0.4.{number}:8000"), blocks(1, 2))
    redis_server.client().config_resetstat()
    await index.writer.find_block_keys_elsewhere(A, set(range(64)))

    stats: dict[str, Any] = redis_server.client().info("commandstats")
    assert sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")) >= 4


async def test_without_a_free_slot_a_source_is_left_out_and_its_stream_goes_on(
    index: Index, redis_server: RedisServer
) -> None:
    start = await index.position(A)
    record = '{"endpoint":"x:1","rank":0,"tier":"GPU","epoch":1,"block_size":4,"state":"live"}'
    taken: dict[Any, Any] = dict.fromkeys(map(str, range(4096)), record)
    redis_server.client().hset(f"{P}slots", mapping=taken)

    applied = await index.writer.apply(await index.claim(A), change(start, blocks(1, 2), without(1)))

    assert (applied.left_out, (await index.position(A)).last_seq) == ({"no-free-slot": 1}, 0)
    assert (await index.position(A)).degraded == "no-free-slot"
    assert await index.matched() == {}


def take_slots(server: RedisServer, first: int, last: int, *, endpoint: str) -> None:
    """Have a pod hold these slots."""
    record = json.dumps({"endpoint": endpoint, "rank": 0, "tier": "GPU", "epoch": 1, "block_size": 4, "state": "live"})
    taken: dict[Any, Any] = dict.fromkeys(map(str, range(first, last)), record.replace(" ", ""))
    server.client().hset(f"{P}slots", mapping=taken)


async def test_a_pod_with_its_share_gets_no_more_slots_once_half_are_taken(
    index: Index, redis_server: RedisServer
) -> None:
    take_slots(redis_server, 0, 1900, endpoint="x:1")
    take_slots(redis_server, 1900, 2047, endpoint=A.endpoint)
    await index.apply(A, blocks(1, 2))  # there is plenty still

    claim = await index.claim(A1)
    refused = await index.writer.apply(claim, change(await index.position(A1), blocks(1, 1), blocks(1, 1, tier="CPU")))
    assert refused.left_out == {"slot-share": 2}
    assert (await index.position(A1)).degraded == "slot-share"
    await index.apply(B, blocks(1, 1))  # another pod has its own share
    assert await index.matched() == {A.name: 2, B.endpoint: 1}

    redis_server.client().hdel(f"{P}slots", *range(1900, 2047))
    again = change(await index.position(A1), blocks(1, 1), Clear(), blocks(1, 1))
    assert (await index.writer.apply(claim, again)).left_out == {"slot-share": 2}  # not asked for again so soon
    client: Any = redis_server.client()
    stream = f"{P}stream:{A1.name}"
    assert client.hkeys(stream).count(b"refused:GPU") == 1
    client.hset(stream, "refused:GPU", "1 slot-share")  # a second later
    applied = await index.writer.apply(claim, change(await index.position(A1), blocks(1, 1)))
    assert applied.left_out == {}


async def test_one_call_of_the_sweep_frees_many_slots_that_hold_next_to_nothing(
    index: Index, redis_server: RedisServer
) -> None:
    for _ in range(100):  # a pod that clears its cache after each block
        await index.apply(A, Clear(), blocks(1, 1))
    assert await index.sweep(fields=150) == 2
    assert redis_server.client().hlen(f"{P}slots") == 1
    assert await index.matched() == {A.endpoint: 1}


async def test_everything_works_on_a_redis_cluster_node(tmp_path: Path) -> None:
    server = RedisServer(tmp_path, "--cluster-enabled", "yes")
    server.start()
    try:
        client: Any = server.client()
        client.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
        deadline = time.monotonic() + 10
        while "cluster_state:ok" not in str(client.execute_command("CLUSTER", "INFO")):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        async with redis_index(server) as index:
            await index.apply(A, blocks(1, 5), without(5), blocks(1, 2, tier="CPU"))
            await index.apply(B, blocks(1, 2), Clear(), blocks(1, 1))

            assert await index.matched() == {A.endpoint: 4, B.endpoint: 1}
            assert await index.sweep() > 0
    finally:
        server.kill()


class ChangingLink:
    """Stands between the reader and Redis, and shows another version after the first reads."""

    def __init__(self, link: RedisLink, changes: int) -> None:
        self._link = link
        self.changes_left = changes
        self.lookups = 0

    async def request(self, commands: bytes, replies: int) -> list[Any]:
        answer = await self._link.request(commands, replies=replies)
        if b"MGET" in commands and replies > 1:
            self.lookups += 1
            if self.changes_left:
                self.changes_left -= 1
                nonce, version = answer[-1]
                answer[-1] = [nonce, b"%d" % (int(version) + 1)]
        return answer

    def begin(self, commands: bytes, *, replies: int) -> Awaitable[list[Any]]:
        return self.request(commands, replies=replies)

    async def close(self) -> None:
        await self._link.close()


async def test_sources_that_change_while_they_are_read_are_read_again(
    index: Index, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await index.apply(A, blocks(1, 3))
    link = ChangingLink(RedisLink(redis_server.url), changes=2)
    monkeypatch.setattr(index.reader, "_link", link)

    assert await index.matched() == {A.endpoint: 3}
    assert link.lookups == 3
    link.changes_left = 99
    with pytest.raises(IndexUnavailableError, match="changed during each"):
        await index.matched()
    await link.close()
