"""Redis serves nobody while a script runs: ours are cut into pieces, and another's that runs too long is waited for."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import hiredis
import pytest
import redis

from kv_indexer.apply.redis_writer import RedisIndexWriter
from kv_indexer.share.redis_leases import LOOKED_AT_ONCE, RedisLeaseBook
from kvmesh.blocks.source import Claim, SourceState, Stream
from kvmesh.errors import IndexUnavailableError
from kvmesh.index import redis_reader
from kvmesh.redis.keys import PREFIX, parse_registry
from kvmesh.redis.scripts import SNAPSHOT
from kvmesh.redis.snapshot import ATTEMPTS, READ_AT_ONCE, read_snapshot
from tests.integration.kv_index import P, blocks, change, redis_index
from tests.integration.kv_redis import RedisServer

STREAMS = frozenset(Stream(endpoint=f"10.0.{number // 250}.{number % 250}:8000") for number in range(350))
ENDLESS = "while true do end"


@pytest.fixture
async def book(redis_server: RedisServer) -> AsyncIterator[RedisLeaseBook]:
    book = RedisLeaseBook(url=redis_server.url, indexer="one", endpoints=[each.endpoint for each in STREAMS])
    yield book
    await book.close()


def scripts_run(client: Any) -> int:
    return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


async def test_a_beat_looks_at_a_bounded_number_of_streams_at_a_time(
    redis_server: RedisServer, book: RedisLeaseBook
) -> None:
    client = redis_server.client()
    claims = await book.tick(STREAMS)
    before = scripts_run(client)
    assert await book.tick(STREAMS) == claims
    pieces = -(-len(STREAMS) // LOOKED_AT_ONCE)
    assert claims.keys() == STREAMS
    assert scripts_run(client) - before == 1 + pieces


async def test_the_slots_of_each_of_many_streams_are_looked_at_within_as_many_beats_as_there_are_pieces(
    redis_server: RedisServer, book: RedisLeaseBook
) -> None:
    claims = await book.tick(STREAMS)
    client: Any = redis_server.client()
    ordered = sorted(STREAMS, key=lambda stream: stream.name)
    looked_at = [ordered[number] for number in (0, 1, 99, 100, 174, 298, 348, 349)]
    async with redis_index(redis_server) as index:
        for stream in looked_at:
            position = await index.writer.read_position(stream)
            assert position is not None
            await index.writer.apply(claims[stream], change(position, blocks(1, 3)))
        client.delete(f"{P}slots")
        for _ in range(-(-len(STREAMS) // LOOKED_AT_ONCE)):
            await book.tick(STREAMS)
        reasons = [client.hget(f"{P}stream:{stream.name}", "reason") for stream in looked_at]
    assert reasons == [b"registry-damaged"] * len(looked_at)


async def test_a_large_registry_is_read_in_portions_as_a_small_one_is_at_once(
    redis_server: RedisServer, book: RedisLeaseBook
) -> None:
    assert len(STREAMS) > READ_AT_ONCE
    claims = await book.tick(STREAMS)
    client: Any = redis_server.client()
    async with redis_index(redis_server) as index:
        held = sorted(STREAMS)[7]
        position = await index.writer.read_position(held)
        assert position is not None
        await index.writer.apply(claims[held], change(position, blocks(1, 3)))
        await index.writer.set_state(claims[held], epoch=position.epoch, state=SourceState.LIVE)
        client.set(f"{P}stream:{sorted(STREAMS)[9].name}", "a stranger's")
        registry = await index.writer.read_registry()
        by_hand = client.eval(SNAPSHOT.source, 1, PREFIX)
    assert registry == parse_registry(by_hand, True)
    assert (len(registry.streams), registry.slots[0].blocks, len(registry.unreadable)) == (len(STREAMS) - 1, 3, 1)
    assert next(each for each in registry.streams if each.owner == "one").fence > 0


async def test_a_lookup_waits_for_the_reading_of_a_large_registry_only_where_it_knows_none_that_could_be_read(
    redis_server: RedisServer, book: RedisLeaseBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    claims, held = await book.tick(STREAMS), min(STREAMS)
    goes_on, spoilt = asyncio.Event(), asyncio.Event()

    async def read_late(ask: Any) -> Any:
        await goes_on.wait()
        if spoilt.is_set():
            raise IndexUnavailableError("spoilt")
        return await read_snapshot(ask)

    async with redis_index(redis_server) as index:
        position = await index.writer.read_position(held)
        assert position is not None
        await index.writer.apply(claims[held], change(position, blocks(1, 3)))
        await index.believe(claims[held])
        assert await index.matched() == {held.endpoint: 3}
        monkeypatch.setattr(redis_reader, "SNAPSHOT_MAX_AGE_SECONDS", -1.0)  # whatever is known is too old
        monkeypatch.setattr(redis_reader, "read_snapshot", read_late)
        for _ in range(2):
            async with asyncio.timeout(5.0):
                assert await index.matched() == {held.endpoint: 3}

        # what cannot be read at all is no secret, and once it can be read all is well again
        spoilt.set()
        goes_on.set()
        async with asyncio.timeout(5.0):
            with pytest.raises(IndexUnavailableError, match="spoilt"):
                while True:
                    await index.matched()
        spoilt.clear()
        assert await index.matched() == {held.endpoint: 3}


async def test_a_registry_that_changes_all_the_time_is_read_without_what_contradicts_itself() -> None:
    asked = 0
    stream = [b"10.0.0.1:8000", b"0", b"1", b"0", b"0", b"live", b"", b"one", b"5", b"0", b"0", b"9999999999999"]
    record = b'{"endpoint":"10.0.0.1:8000","rank":0,"tier":"GPU","epoch":2,"block_size":4,"state":"live"}'

    async def ask(commands: bytes, replies: int) -> list[Any]:
        nonlocal asked
        if b"EVAL" in commands[:20]:
            asked += 1
            return [[b"nonce", b"%d" % asked, 1, [b"0", record], [b"10.0.0.1:8000#0"], b"unread"]]
        if b"HLEN" in commands:
            return [3]
        return [[b"1", b"0"], [], stream] if replies == 3 else [[b"nonce", b"%d" % (asked + 1)]]

    registry = parse_registry(*await read_snapshot(ask))
    assert (asked, registry.version, registry.slots, registry.unreadable) == (ATTEMPTS, b"nonce.3", (), ())
    assert [(each.endpoint, each.owner, each.fence) for each in registry.streams] == [("10.0.0.1:8000", "one", 5)]


@pytest.mark.parametrize("refused", [b"EVAL", b"HLEN", b"TIME", b"pulses", b"stream:", b"version"])
async def test_a_refusal_in_the_middle_of_a_reading_is_none_of_a_record_that_cannot_be_read(refused: bytes) -> None:
    record = b'{"endpoint":"10.0.0.1:8000","rank":0,"tier":"GPU","epoch":2,"block_size":4,"state":"live"}'
    busy = hiredis.ReplyError("BUSY Redis is busy running a script.")

    async def ask(commands: bytes, replies: int) -> list[Any]:
        if b"EVAL" in commands[:20]:
            answer: list[Any] = [[b"nonce", b"1", 1, [b"0", record], [b"10.0.0.1:8000#0"], b"unread"]]
        elif b"HLEN" in commands:
            answer = [3]
        elif b"TIME" in commands:
            stream = [b"10.0.0.1:8000", b"0", b"2", b"0", b"0", b"live", b"", b"one", b"5", b"0", b"0", b"9"]
            usual = {b"TIME": [b"1", b"0"], b"pulses": [], b"stream:": stream}
            return [busy if refused == name else reply for name, reply in usual.items()]
        else:
            answer = [[b"nonce", b"1"]]
        return [busy] if refused in commands[:20] or refused in commands[-12:] else answer

    with pytest.raises(IndexUnavailableError, match="BUSY"):
        await read_snapshot(ask)


async def test_a_redis_that_another_script_keeps_busy_is_said_to_be_and_all_goes_on_afterwards(
    redis_server: RedisServer, book: RedisLeaseBook
) -> None:
    client: Any = redis_server.client()
    claims = await book.tick(STREAMS)
    stream = min(STREAMS)
    async with redis_index(redis_server) as index:
        client.config_set("lua-time-limit", 20)
        endless = asyncio.create_task(asyncio.to_thread(_run_endless, redis_server))
        writer = RedisIndexWriter(url=redis_server.url)
        await _until_busy(writer, stream)
        for refused in (book.tick(STREAMS), writer.sweep(fields=1), writer.read_registry(), index.reader.sources()):
            with pytest.raises(IndexUnavailableError, match=r"BUSY.*a script keeps it busy"):
                await refused
        client.script_kill()
        await endless

        assert await book.tick(STREAMS) == claims  # no lease was lost
        assert len((await writer.read_registry()).streams) == len(STREAMS)
        position = await writer.read_position(stream)
        assert position is not None
        assert await writer.apply(Claim(stream=stream, fence=claims[stream].fence), change(position, blocks(1, 2)))
        await writer.close()


def _run_endless(server: RedisServer) -> None:
    with pytest.raises(redis.ResponseError, match="killed"):
        server.client().eval(ENDLESS, 0)


async def _until_busy(writer: RedisIndexWriter, stream: Stream) -> None:
    async with asyncio.timeout(5.0):
        while True:
            try:
                await writer.read_position(stream)
            except IndexUnavailableError:
                return
            await asyncio.sleep(0.005)
