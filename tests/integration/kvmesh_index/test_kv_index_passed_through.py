"""What goes along with a lookup: the caller's own commands, what enters keys beside tokens, the keys themselves."""

from collections.abc import AsyncIterator
from typing import Any

import hiredis
import pytest

from kvmesh.blocks.block_keys import block_keys
from kvmesh.blocks.index_changes import Store, pack_hashes
from kvmesh.redis.link import pack
from tests.integration.kv_index import ROOT, A, B, Index, blocks, memory_index, redis_index
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


@pytest.fixture
async def in_redis(redis_server: RedisServer) -> AsyncIterator[Index]:
    async with redis_index(redis_server) as one:
        yield one


def store(keys: bytes, *, tier: str = "GPU") -> Store:
    hashes = range(1000, 1000 + len(keys) // 8)
    return Store(tier=tier, block_size=BLOCK, group=0, hashes=pack_hashes(list(hashes)), keys=keys)


async def test_a_lookup_tells_the_keys_of_the_whole_prompt(index: Index) -> None:
    await index.apply(A, blocks(1, 2))
    for asked in (4, 300):
        lookup = await index.lookup(asked)
        # `prompt` has the tokens of so many blocks and one more
        assert lookup.keys == {BLOCK: block_keys(prompt(asked)[:-4], block_size=BLOCK, parent=ROOT)}


async def test_an_empty_index_has_no_block_size_to_make_keys_for(index: Index) -> None:
    assert (await index.lookup(4)).keys == {}


async def test_what_enters_a_block_beside_its_tokens_changes_it_and_all_after_it(index: Index) -> None:
    extra = [None, b"image", None, None]
    with_image = block_keys(prompt(4)[:-4], block_size=BLOCK, parent=ROOT, extra=extra)
    await index.apply(A, blocks(1, 4))
    await index.apply(B, store(with_image))

    def asked(block_size: int) -> list[bytes | None]:
        assert block_size == BLOCK
        return extra

    lookup = await index.reader.lookup(prompt(4), root=ROOT, extra=asked)
    assert (lookup.matched_blocks, lookup.keys) == ({A.endpoint: 1, B.endpoint: 4}, {BLOCK: with_image})
    # nothing of it is taken for the same tokens without an image, nor the other way round
    assert await index.matched(4) == {A.endpoint: 4, B.endpoint: 1}
    without = await index.reader.lookup(prompt(4), root=ROOT, extra=lambda _: None)
    assert without.matched_blocks == {A.endpoint: 4, B.endpoint: 1}


async def test_commands_of_the_caller_are_answered_in_the_same_round_trip(
    in_redis: Index, redis_server: RedisServer
) -> None:
    await in_redis.apply(A, blocks(1, 4))
    client: Any = redis_server.client()
    client.set("{kv2}mine", "text")
    commands = pack("MGET", "{kv2}mine", "{kv2}none") + pack("GET", "{kv2}mine") + pack("SMEMBERS", "{kv2}none")

    lookup = await in_redis.reader.lookup(prompt(4), root=ROOT, also=commands, also_replies=3)
    assert (lookup.matched_blocks, lookup.also) == ({A.endpoint: 4}, [[b"text", None], b"text", []])
    assert (await in_redis.lookup(4)).also == ()


async def test_a_caller_is_answered_when_the_index_is_empty(in_redis: Index) -> None:
    lookup = await in_redis.reader.lookup(b"", root=ROOT, also=pack("ECHO", "x"), also_replies=1)

    assert (lookup.matched_blocks, lookup.also) == ({}, [b"x"])


async def test_what_redis_refuses_the_caller_spoils_no_lookup(in_redis: Index, redis_server: RedisServer) -> None:
    await in_redis.apply(A, blocks(1, 4))
    client: Any = redis_server.client()
    client.rpush("{kv2}list", "x")
    commands = pack("GET", "{kv2}list") + pack("NOSUCHCOMMAND") + pack("ECHO", "x")

    lookup = await in_redis.reader.lookup(prompt(4), root=ROOT, also=commands, also_replies=3)
    assert lookup.matched_blocks == {A.endpoint: 4}
    refused, unknown, echo = lookup.also
    assert (type(refused), type(unknown), echo) == (hiredis.ReplyError, hiredis.ReplyError, b"x")


async def test_a_lookup_of_several_round_trips_passes_commands_through_once(
    in_redis: Index, redis_server: RedisServer
) -> None:
    await in_redis.apply(A, blocks(1, 512))
    async with redis_index(redis_server) as other:  # which has not seen the prompt, and asks in growing chunks
        count = pack("INCR", "{kv2}count")
        lookup = await other.reader.lookup(prompt(512), root=ROOT, also=count, also_replies=1)
        assert (lookup.matched_blocks, lookup.also) == ({A.endpoint: 512}, [1])


async def test_sources_that_change_meanwhile_pass_commands_through_once(
    in_redis: Index, redis_server: RedisServer
) -> None:
    await in_redis.apply(A, blocks(1, 4))
    await in_redis.matched(4)  # the reader knows the sources
    await in_redis.apply(B, blocks(1, 4))  # and now there is another one

    lookup = await in_redis.reader.lookup(prompt(4), root=ROOT, also=pack("INCR", "{kv2}count"), also_replies=1)
    assert (lookup.matched_blocks, lookup.also) == ({A.endpoint: 4, B.endpoint: 4}, [1])


@pytest.mark.parametrize("held", [0, 4, 40])
async def test_keys_made_while_redis_works_are_those_made_afterwards(
    in_redis: Index, redis_server: RedisServer, held: int
) -> None:
    if held:
        await in_redis.apply(A, blocks(1, held))
    else:
        await in_redis.apply(A, blocks(1001, 1))
    async with redis_index(redis_server) as other:  # which has not seen the prompt
        for _ in range(3):  # not connected yet, never seen before, seen before
            lookup = await other.reader.lookup(prompt(300), root=ROOT)
            assert lookup.keys == {BLOCK: block_keys(prompt(300)[:-4], block_size=BLOCK, parent=ROOT)}
            assert lookup.matched_blocks == ({A.endpoint: held} if held else {})
