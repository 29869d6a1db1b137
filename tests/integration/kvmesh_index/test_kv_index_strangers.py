"""What others may have written under our keys: a newer version, another tenant, a human with redis-cli."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.service import IndexerService
from kvmesh.blocks.source import Registry, SourceState
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.redis_reader import PrefixIndexReader
from tests.integration.kv_index import A1, ALL_DAY, A, B, Index, P, blocks, change, redis_index, without
from tests.integration.kv_indexer_follow.test_kv_index_recovery import Mesh, eventually, is_logged, mesh, page  # noqa: F401  a fixture
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import stored


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[Index]:
    async with redis_index(redis_server) as one:
        yield one


async def reread(index: Index) -> dict[str, int]:
    """What a reader matches that has just come."""
    await index.reader.status()
    return await index.matched()


@pytest.mark.parametrize("field", ["epoch", "last_seq", "last_ts", "rank"])
async def test_a_stream_with_a_field_that_is_no_number_is_not_believed(
    index: Index, redis_server: RedisServer, field: str
) -> None:
    await index.apply(A, blocks(1, 3))
    await index.apply(B, blocks(1, 2))
    redis_server.client().hset(f"{P}stream:{A.name}", field, "many")

    assert await reread(index) == {B.endpoint: 2}
    assert len((await index.reader.status()).unreadable) == 2  # the stream and its slot
    await index.apply(B, blocks(3, 3))
    assert await index.matched() == {B.endpoint: 3}


@pytest.mark.parametrize(("field", "value"), [("owner", None), ("fence", None), ("fence", "many"), ("fence", "0x1")])
async def test_a_leased_stream_without_a_readable_owner_or_fence_stops_no_indexer_and_is_taken_once_it_ends(
    index: Index, redis_server: RedisServer, field: str, value: str | None
) -> None:
    one, two = index.lease_book("one"), index.lease_book("two")
    assert (await one.tick({A, B})).keys() == {A, B}
    client = redis_server.client()
    if value is None:
        client.hdel(f"{P}stream:{A.name}", field)
    else:
        client.hset(f"{P}stream:{A.name}", field, value)

    assert (await one.tick({A, B})).keys() == {B}
    assert await two.tick({A, B}) == {}
    client.hset(f"{P}stream:{A.name}", "lease_until", 0)
    assert (await two.tick({A, B})).keys() == {A}
    await one.close()
    await two.close()


async def test_a_strangers_record_that_describes_another_stream_is_not_dropped_with_what_it_names(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 3))
    client: Any = redis_server.client()
    copy = client.hgetall(f"{P}stream:{A.name}")
    client.hset(f"{P}stream:10.9.9.9:1#0", mapping={**copy, "lease_until": 0, "owner": ""})
    client.sadd(f"{P}streams", "10.9.9.9:1#0")

    book = index.lease_book("one")
    await book.tick({B})  # nobody lists 10.9.9.9:1
    assert await reread(index) == {A.endpoint: 3}
    await book.close()


async def test_a_state_that_a_newer_version_wrote_is_degraded_and_its_blocks_are_believed(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 3))
    redis_server.client().hset(f"{P}stream:{A.name}", "state", "paused")
    redis_server.client().hincrby(f"{P}registry", "version", 1)
    lookup = await index.lookup(5)
    cache = lookup.endpoints[A.endpoint]

    assert (lookup.matched_blocks, cache.state, cache.reason) == (
        {A.endpoint: 3},
        SourceState.DEGRADED,
        "unknown-state",
    )


@pytest.mark.parametrize("record", ["garbage", "[]", "{}", '{"state": "live"}', "\xff"])
async def test_a_foreign_record_among_the_slots_is_skipped_and_sweeps_go_on(
    index: Index, redis_server: RedisServer, record: str
) -> None:
    redis_server.client().hset(f"{P}slots", mapping={"0": record, "foreign": record})
    await index.apply(A, blocks(1, 3))
    await index.apply(B, blocks(1, 2))
    await index.drop(A)

    assert await reread(index) == {B.endpoint: 2}
    assert await index.sweep() > 0
    assert redis_server.client().hgetall(f"{P}slots").keys() == {b"0", b"foreign", b"2"}
    assert len((await index.reader.status()).unreadable) == 2


async def test_a_spoilt_slot_record_is_replaced_when_its_stream_gives_the_slot_back(
    index: Index, redis_server: RedisServer
) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    redis_server.client().hset(f"{P}slots", "0", "garbage")
    assert await reread(index) == {}

    await index.writer.begin_epoch(await index.claim(A), expected_epoch=epoch, last_seq=-1, degraded="")
    await index.sweep()
    await index.apply(A, blocks(1, 2))
    assert await reread(index) == {A.endpoint: 2}
    assert (await index.reader.status()).unreadable == ()


async def test_a_slot_number_that_is_none_is_replaced_by_one_that_is(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 1))
    for number in ("-1", "99999999999", "x", "01", "1.5"):
        redis_server.client().hset(f"{P}stream:{A.name}", "slot:GPU", number)
        await index.apply(A, blocks(1, 2))
        assert await reread(index) == {A.endpoint: 2}, number


async def test_a_slot_whose_sweep_finds_another_type_keeps_no_other_from_being_swept(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 3))
    await index.apply(B, blocks(1, 3))
    redis_server.client().delete(f"{P}h0")
    redis_server.client().set(f"{P}h0", "foreign")
    assert await reread(index) == {B.endpoint: 3}
    await index.drop(A)
    await index.drop(B)
    await index.sweep()

    assert redis_server.client().hkeys(f"{P}slots") == [b"0"]


async def test_lost_slots_make_no_false_claims_and_their_streams_begin_anew(
    index: Index, redis_server: RedisServer
) -> None:
    await index.claim(B)  # a stream that is taken is believed, and so is what was taken before it
    await index.apply(A, blocks(1, 5))
    before = await index.position(A)
    redis_server.client().delete(f"{P}slots")
    await index.apply(B, blocks(7, 8))  # takes a slot whose number nobody has left blocks under
    assert await reread(index) == {}

    assert await index.writer.apply(await index.claim(A), change(before, blocks(6, 6))) is None
    after = await index.position(A)
    assert (after.epoch > before.epoch, after.last_seq, after.state, after.reason) == (
        True,
        -1,
        SourceState.REPLAYING,
        "registry-damaged",
    )
    await index.apply(A, blocks(1, 2))
    assert await index.matched() == {}
    await index.believe(await index.claim(A))
    await index.sweep()
    assert await index.matched() == {A.endpoint: 2}
    client: Any = redis_server.client()
    assert sorted(client.keys(f"{P}h[0-9]*")) == sorted(f"{P}h".encode() + slot for slot in client.hkeys(f"{P}slots"))


async def test_a_record_that_another_stream_has_by_now_is_not_voided_with_the_stream_that_lost_it(
    index: Index, redis_server: RedisServer
) -> None:
    await index.claim(B)
    await index.apply(A, blocks(1, 1))
    before = await index.position(A)
    await index.apply(A, without(1))  # nothing is left under its number
    redis_server.client().delete(f"{P}slots")
    await index.apply(B, blocks(1, 3))
    assert await reread(index) == {B.endpoint: 3}

    book = index.lease_book("test", lease_seconds=ALL_DAY, endpoints=(A.endpoint, B.endpoint))
    await book.tick({A, B})  # the pod of A is silent: a beat notices
    await book.close()
    assert (await index.position(A)).epoch > before.epoch
    assert (await index.matched(), await index.sweep()) == ({B.endpoint: 3}, 0)


async def test_what_lost_slots_left_behind_is_swept_though_nobody_takes_its_number(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 5))
    await index.drop(A)
    redis_server.client().delete(f"{P}slots")
    for _ in range(2 * 4096 // 64):
        await index.sweep()

    assert redis_server.client().keys(f"{P}h[0-9]*") == redis_server.client().keys(f"{P}b????????") == []


async def test_a_stream_that_the_lost_list_named_is_listed_again_under_a_new_epoch(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 5))
    before, claim = await index.position(A), await index.claim(A)
    redis_server.client().delete(f"{P}streams")
    assert await reread(index) == {}

    book = index.lease_book("test", lease_seconds=ALL_DAY)
    assert await book.tick({A}) == {A: claim}
    await book.close()
    assert await index.writer.apply(claim, change(before, blocks(6, 6))) is None
    await index.apply(A, blocks(1, 2))
    await index.believe(claim)
    assert (await index.matched(), (await index.position(A)).epoch > before.epoch) == ({A.endpoint: 2}, True)


@pytest.mark.parametrize("key", ["slots", "streams"])
async def test_losing_one_key_of_the_registry_heals_by_itself_though_the_pod_is_silent(
    mesh: Mesh,  # noqa: F811
    key: str,
) -> None:
    client: Any = mesh.redis.client()
    pod = await mesh.pod()
    async with mesh.indexer(pod):
        await pod.publish(stored(1, 2))
        await mesh.becomes({pod: 2})
        epoch = client.hget(f"{P}stream:{pod.endpoint}#0", "epoch")
        client.delete(P + key)
        await eventually(lambda: has_epoch_after(mesh, pod.endpoint, epoch), True)
        await mesh.becomes({pod: 2})
        await pod.publish(stored(3, parent=2))
        await mesh.becomes({pod: 3})


async def has_epoch_after(mesh: Mesh, endpoint: str, epoch: bytes) -> bool:  # noqa: F811
    client: Any = mesh.redis.client()
    return int(client.hget(f"{P}stream:{endpoint}#0", "epoch")) > int(epoch)


async def test_a_value_that_is_no_block_record_explains_no_parent_and_can_be_removed(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 1))
    field = (2).to_bytes(8, "big")
    redis_server.client().hset(f"{P}h0", field, b"short")

    assert (await index.writer.find_block_keys(A, {(1, 0), (2, 0)})).keys() == {1}
    await index.apply(A, without(2))
    assert not redis_server.client().hexists(f"{P}h0", field)
    assert await index.matched() == {A.endpoint: 1}


@pytest.mark.parametrize("key", ["registry", "slots", "streams"])
async def test_a_key_of_another_type_is_an_error_that_names_it_for_reader_and_writer(
    index: Index, redis_server: RedisServer, key: str
) -> None:
    await index.apply(A, blocks(1, 3))
    redis_server.client().delete(P + key)
    redis_server.client().set(P + key, "foreign")
    expected = rf"Redis refuses: WRONGTYPE .* \({P}{key}\)".replace("{", r"\{")

    for ask in (index.matched, index.reader.sources, index.reader.status, index.writer.read_registry):
        with pytest.raises(IndexUnavailableError, match=expected):
            await ask()
    await index.apply(B, blocks(1, 1))  # its lease book's beat deletes the key
    assert (await index.matched())[B.endpoint] == 1


async def test_a_registry_that_becomes_another_type_is_an_error_in_the_very_next_lookup(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, blocks(1, 3))
    assert await index.matched() == {A.endpoint: 3}
    redis_server.client().delete(f"{P}registry")
    redis_server.client().lpush(f"{P}registry", "foreign")

    with pytest.raises(IndexUnavailableError, match="WRONGTYPE"):
        await index.matched()


@pytest.mark.parametrize("spoil", ["text", "fields"])
async def test_a_stream_record_that_is_none_stops_its_stream_alone_and_is_named(
    index: Index, redis_server: RedisServer, spoil: str
) -> None:
    await index.apply(A, blocks(1, 3))
    await index.apply(A1, blocks(1, 1))
    key = f"{P}stream:{A.name}"
    redis_server.client().delete(key)
    if spoil == "text":
        redis_server.client().set(key, "foreign")
    else:
        redis_server.client().hset(key, "note", "foreign")

    assert await reread(index) == {A.endpoint: 1}  # of the other rank
    with pytest.raises(
        IndexUnavailableError, match="WRONGTYPE" if spoil == "text" else f"{A.name} that cannot be read"
    ):
        await index.position(A)
    await index.apply(A1, blocks(2, 2))
    assert await index.matched() == {A.endpoint: 2}
    book = index.lease_book("other")
    await index.pass_time(100_000)
    assert (await book.tick({A, A1})).keys() == {A1}  # and the stranger's record is left alone
    await book.close()
    assert redis_server.client().exists(key)


async def test_of_changes_in_one_call_each_has_its_own_end(index: Index, redis_server: RedisServer) -> None:
    streams = (A, A1, B)
    for stream in streams:
        await index.apply(stream, blocks(1, 1))
    changes = [(await index.claim(stream), change(await index.position(stream), blocks(9, 9))) for stream in streams]
    client: Any = redis_server.client()
    client.set(f"{P}stream:{A1.name}", "foreign")
    before = client.info("commandstats")["cmdstat_evalsha"]["calls"]

    one, broken, other = await asyncio.gather(
        *(index.writer.apply(claim, each) for claim, each in changes), return_exceptions=True
    )

    assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before + 1
    assert isinstance(broken, IndexUnavailableError)
    assert "WRONGTYPE" in str(broken)
    assert not isinstance(one, BaseException)
    assert not isinstance(other, BaseException)
    assert {stream: (await index.position(stream)).last_seq for stream in (A, B)} == {A: 1, B: 1}


async def test_a_host_that_is_no_host_name_is_an_unavailable_index() -> None:
    reader = PrefixIndexReader(url="redis://a..b:1", hash_seed="kvmesh")

    with pytest.raises(IndexUnavailableError, match="cannot connect"):
        await reader.sources()


@pytest.mark.parametrize("answer", [b"+OK\r\n", b"*0\r\n", b":1\r\n", b"$-1\r\n", b"*2\r\n$1\r\na\r\n*0\r\n"])
async def test_a_server_that_answers_something_else_is_an_unavailable_index(answer: bytes) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        writer.write(answer * 3)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    reader = PrefixIndexReader(url=f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}", hash_seed="kvmesh")
    with pytest.raises(IndexUnavailableError):
        await reader.lookup(bytes(400), root=bytes(8))
    await reader.close()
    server.close()


async def test_an_indexer_that_ends_is_noticed_by_readers(mesh: Mesh) -> None:  # noqa: F811
    async def alive() -> tuple[bool, bool]:
        lookup = await mesh.reader.lookup(b"", root=bytes(8))
        return lookup.indexer_alive, (await mesh.reader.status()).indexer_alive

    heartbeat = f"{P}heartbeat"
    assert await alive() == (False, False)
    async with mesh.indexer(), mesh.indexer():
        await eventually(alive, (True, True))
        mesh.redis.client().delete(heartbeat)
        await eventually(alive, (True, True))  # it beats on
        client: Any = mesh.redis.client()
        beat, now, left = client.get(heartbeat), client.time()[0], client.pttl(heartbeat)
        assert abs(int(beat) - now) <= 5
        assert 0 < left <= 5000
    assert mesh.redis.client().pexpire(heartbeat, 1)  # instead of waiting for its 5 s
    await eventually(alive, (False, False))


async def test_a_heartbeat_costs_a_lookup_no_round_trip(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 3))
    await index.matched()
    redis_server.client().config_resetstat()
    for _ in range(20):
        await index.matched()

    stats: dict[str, Any] = redis_server.client().info("commandstats")
    assert stats["cmdstat_mget"]["calls"] == 20
    assert stats.get("cmdstat_eval", {"calls": 0})["calls"] <= 2  # one a second


async def test_an_indexer_goes_on_beside_strangers_and_tells_of_each_once(
    mesh: Mesh,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = mesh.redis.client()
    client.hset(f"{P}slots", "9", "garbage")
    client.sadd(f"{P}streams", "10.9.9.9:1#0")
    client.set(f"{P}stream:10.9.9.9:1#0", "foreign")
    pod = await mesh.pod()
    async with mesh.indexer(pod) as service:
        await pod.publish(stored(1, 2))
        await mesh.becomes({pod: 2})
        client.hset(f"{P}stream:{pod.endpoint}#0", "state", "paused")

        status, text = await page(service, "/sources")
        (line,) = json.loads(text)["sources"]
        assert (status, line["state"], line["reason"]) == (200, "degraded", "unknown-state")
        assert (json.loads(text)["indexer_alive"], len(json.loads(text)["unreadable"])) == (True, 2)
        status, text = await page(service, "/metrics")
        assert (status, "kvmesh_indexer_unreadable_records 2.0" in text) == (200, True)
        assert caplog.text.count("2 records in Redis cannot be read and are not believed: slot 9: ") == 1

        client.hdel(f"{P}slots", "9")
        client.srem(f"{P}streams", "10.9.9.9:1#0")
        await eventually(lambda: is_shown(service, "kvmesh_indexer_unreadable_records 0.0"), True)
        await pod.publish(stored(3, parent=2))
        await mesh.becomes({pod: 3})


async def is_shown(service: IndexerService, metric: str) -> bool:
    return metric in (await page(service, "/metrics"))[1]


async def test_a_defect_in_watching_redis_ends_no_stream(
    mesh: Mesh,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def fail(_: RedisIndexWriter) -> Registry:
        raise RuntimeError("a defect of ours")

    pod = await mesh.pod()
    async with mesh.indexer(pod):
        monkeypatch.setattr(RedisIndexWriter, "read_registry", fail)
        await eventually(lambda: is_logged(caplog, "a defect of ours"), True)
        await pod.publish(stored(1, 2))
        await mesh.becomes({pod: 2})
