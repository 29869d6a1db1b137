"""`kvmesh index verify` on a real Redis: silent on what is true, and every kind of corruption is found and named."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from kv_indexer.inspect.index_audit import Difference
from kv_indexer.inspect.inspect_index import inspect_sizes
from kv_indexer.inspect.redis_inspect import RedisInspector
from kv_indexer.inspect.verify_index import Audit, IndexVerifier
from kvmesh.blocks.index_changes import Clear
from tests.integration.kv_index import A, B, Index, blocks, redis_index, without
from tests.integration.kv_redis import RedisServer
from tests.integration.kv_redis_groups import ClusterGroup

PREFIX = b"{kv2}"
A_GPU, B_GPU = f"{A.name} GPU, slot 0", f"{B.name} GPU, slot 1"


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[Index]:
    async with redis_index(redis_server) as one:
        await one.apply(A, blocks(1, 50))
        await one.apply(B, blocks(1, 20), blocks(1, 1))
        yield one


async def verify(server: RedisServer, **how: Any) -> Audit:
    inspector = RedisInspector(server.url)
    try:
        return await IndexVerifier(inspector, pause=lambda _: asyncio.sleep(0), **how).verify()
    finally:
        await inspector.close()


def block_key(client: Any, slot: int, number: int = 0) -> tuple[bytes, bytes, bytes]:
    """The n-th field of a source: engine hash, block key, name of the key."""
    engine, value = sorted(client.hgetall(PREFIX + b"h%d" % slot).items())[number]
    return engine, value[:8], PREFIX + b"b" + value[:8]


@pytest.mark.parametrize("fields_a_pass", [10, 1_000_000])
async def test_a_true_index_has_no_differences(index: Index, redis_server: RedisServer, fields_a_pass: int) -> None:
    await index.apply(A, without(3), blocks(1, 9, tier="CPU"), blocks(60, 62))
    await index.apply(B, Clear(), blocks(1, 5))

    audit = await verify(redis_server, fields_a_pass=fields_a_pass)

    assert (audit.counts, audit.listed) == ({}, ())
    assert (audit.sources, audit.waiting_for_sweep) == (3, 1)
    assert audit.held_blocks == 49 + 3 + 9 + 5 + 20
    assert audit.passes == (9 if fields_a_pass == 10 else 1)


async def test_an_empty_index_and_an_empty_redis_have_no_differences(redis_server: RedisServer) -> None:
    assert (await verify(redis_server)).counts == {}


async def test_blocks_that_only_some_groups_hold_are_no_difference(index: Index, redis_server: RedisServer) -> None:
    await index.apply(A, blocks(1, 5, group=1), without(2, group=1))

    audit = await verify(redis_server)

    assert (audit.counts, audit.partial_blocks) == ({}, 1)


def add_a_bit(client: Any) -> Difference:
    _, key, name = block_key(client, 0, 0)
    held_by_b = {value[:8] for value in client.hvals(PREFIX + b"h1")}
    for number in range(50):
        _, key, name = block_key(client, 0, number)
        if key not in held_by_b:
            break
    client.set(name, b"B\xc0")
    return Difference(kind="extra", where=B_GPU, detail=f"block {key.hex()}")


def take_a_bit(client: Any) -> Difference:
    _, key, name = block_key(client, 1, 0)
    client.set(name, b"0")
    return Difference(kind="missing", where=B_GPU, detail=f"block {key.hex()}")


def delete_a_key(client: Any) -> Difference:
    held_by_b = {value[:8] for value in client.hvals(PREFIX + b"h1")}
    for number in range(50):
        _, key, name = block_key(client, 0, number)
        if key not in held_by_b:
            break
    client.delete(name)
    return Difference(kind="missing", where=A_GPU, detail=f"block {key.hex()}")


def lose_a_field(client: Any) -> Difference:
    engine, key, _ = block_key(client, 1, 3)
    client.hdel(PREFIX + b"h1", engine)
    return Difference(kind="extra", where=B_GPU, detail=f"block {key.hex()}")


def leave_a_bit_of_a_retired_slot(client: Any) -> Difference:
    client.set(PREFIX + b"bLEFTOVER"[:9], b"7")
    return Difference(kind="leftover", where="slot 7", detail=f"block {b'LEFTOVER'.hex()}")


def spoil_a_count(client: Any) -> Difference:
    engine, key, _ = block_key(client, 1, 2)
    client.hset(PREFIX + b"h1", engine, key + b"0")
    return Difference(kind="entry", where=f"{B_GPU}, {engine.hex()}", detail="a reference count of b'0'")


def spoil_holders(client: Any) -> Difference:
    client.set(PREFIX + b"bSTRANGER", b"somebody")
    return Difference(
        kind="holders", where=f"block {b'STRANGER'.hex()}", detail="neither a slot nor a bitmap: b'somebody'"
    )


def write_one_holder_as_a_bitmap(client: Any) -> Difference:
    held_by_b = {value[:8] for value in client.hvals(PREFIX + b"h1")}
    for number in range(50):
        _, key, name = block_key(client, 0, number)
        if key not in held_by_b:
            break
    client.set(name, b"B\x80")
    return Difference(kind="holders", where=f"block {key.hex()}", detail="a bitmap for fewer than two slots: b'B\\x80'")


def make_a_block_a_list(client: Any) -> Difference:
    client.rpush(PREFIX + b"bSTRANGER", 1)
    return Difference(kind="type", where=f"block {b'STRANGER'.hex()}", detail="a list")


def make_a_source_a_string(client: Any) -> Difference:
    client.set(PREFIX + b"h99", b"x")
    return Difference(kind="type", where="slot 99", detail="its blocks are not a hash")


def leave_an_orphan_slot(client: Any) -> Difference:
    client.hset(PREFIX + b"h9", b"12345678", b"ORPHAN!!")
    client.set(PREFIX + b"bORPHAN!!", b"9")
    return Difference(kind="orphan-slot", where="slot 9", detail="1 blocks")


def take_a_slot_from_its_stream(client: Any) -> Difference:
    client.hdel(f"{{kv2}}stream:{B.name}", "slot:GPU")
    return Difference(kind="unnamed-slot", where=B_GPU)


def name_a_slot_that_is_not_there(client: Any) -> Difference:
    client.hset(f"{{kv2}}stream:{B.name}", "slot:CPU", 5)
    return Difference(kind="wrong-slot", where=f"{B.name} CPU, slot 5", detail="has no readable record")


def name_the_slot_of_another(client: Any) -> Difference:
    client.hset(f"{{kv2}}stream:{B.name}", "slot:CPU", 0)
    return Difference(kind="wrong-slot", where=f"{B.name} CPU, slot 0", detail=f"belongs to {A.name} GPU")


def unregister_a_stream(client: Any) -> Difference:
    client.hset("{kv2}stream:10.9.9.9:1#0", "epoch", 1)
    return Difference(kind="stream", where="10.9.9.9:1#0", detail="has a record, but is not registered")


def put_the_epochs_back(client: Any) -> Difference:
    greatest = max(int(client.hget(f"{{kv2}}stream:{stream.name}", "epoch")) for stream in (A, B))
    client.hset("{kv2}registry", "epochs", 0)
    return Difference(kind="counter", where="epochs", detail=f"0, but a stream has {greatest}")


def leave_a_foreign_key(client: Any) -> Difference:
    client.set("{kv2}note", "remember the milk")
    return Difference(kind="foreign", where="{kv2}note")


@pytest.mark.parametrize(
    "corrupt",
    [
        add_a_bit,
        take_a_bit,
        delete_a_key,
        lose_a_field,
        leave_a_bit_of_a_retired_slot,
        spoil_a_count,
        spoil_holders,
        write_one_holder_as_a_bitmap,
        make_a_block_a_list,
        make_a_source_a_string,
        leave_an_orphan_slot,
        take_a_slot_from_its_stream,
        name_a_slot_that_is_not_there,
        name_the_slot_of_another,
        unregister_a_stream,
        put_the_epochs_back,
        leave_a_foreign_key,
    ],
    ids=lambda corrupt: corrupt.__name__,
)
async def test_a_corruption_is_found_and_named(
    index: Index, redis_server: RedisServer, corrupt: Callable[[Any], Difference]
) -> None:
    expected = corrupt(redis_server.client())

    audit = await verify(redis_server)

    assert [one for one in audit.listed if one.kind == expected.kind] == [expected]
    assert audit.counts[expected.kind] == 1
    assert set(audit.counts) - {"unreadable"} == {expected.kind}  # a spoilt record may also be one that nobody believes


async def test_an_unreadable_record_is_named(index: Index, redis_server: RedisServer) -> None:
    redis_server.client().hset("{kv2}slots", 12, "{}")

    audit = await verify(redis_server)

    assert [one.where.partition(":")[0] for one in audit.listed] == ["slot 12"]
    assert audit.counts == {"unreadable": 1}


async def test_all_differences_are_counted_and_only_the_first_are_listed(
    index: Index, redis_server: RedisServer
) -> None:
    client: Any = redis_server.client()
    client.delete(*client.keys("{kv2}b*"))

    audit = await verify(redis_server, listed=5)

    assert (audit.counts, len(audit.listed)) == ({"missing": 50 + 20}, 5)


async def test_a_slot_that_waits_for_its_sweep_and_what_the_sweep_leaves_are_no_differences(
    index: Index, redis_server: RedisServer
) -> None:
    await index.apply(A, Clear())
    waiting = await verify(redis_server)
    await index.sweep()
    swept = await verify(redis_server)

    assert (waiting.counts, waiting.waiting_for_sweep, waiting.held_blocks) == ({}, 1, 70)
    assert (swept.counts, swept.waiting_for_sweep, swept.held_blocks) == ({}, 0, 20)


async def test_an_index_in_use_has_no_differences(index: Index, redis_server: RedisServer) -> None:
    async def churn() -> None:
        number = 0
        while True:
            number += 1
            first = 100 + number % 7 * 40
            await index.apply(A, blocks(first, first + 60), without(*range(first, first + 30)))
            await index.apply(B, blocks(first, first + 20), *([Clear()] if number % 5 == 0 else []))
            if number % 3 == 0:
                await index.sweep()

    task = asyncio.create_task(churn(), name="churn")
    try:
        audits = [await verify(redis_server, fields_a_pass=100) for _ in range(5)]
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    error = None if task.cancelled() else task.exception()

    assert error is None
    assert [audit.counts for audit in audits] == [{}] * 5
    assert sum(audit.looked_at_again for audit in audits) > 0, "nothing changed while it was read"


async def test_an_index_in_a_redis_cluster_is_read_on_the_node_that_has_it(tmp_path: Path) -> None:
    cluster = ClusterGroup(tmp_path)
    try:
        await cluster.formed()
        server: Any = cluster  # all that is asked of it is its address
        async with redis_index(server) as index:
            await index.apply(A, blocks(1, 50))
            await index.apply(B, blocks(1, 20))
        audit = await verify(server)
        inspector = RedisInspector(cluster.url)
        sizes = await inspect_sizes(inspector)
        await inspector.close()
    finally:
        cluster.kill()

    assert (audit.counts, audit.held_blocks, audit.block_keys) == ({}, 70, 50)
    assert [(one.endpoint, one.blocks) for one in sizes.sources] == [(A.endpoint, 50), (B.endpoint, 20)]


async def test_a_clear_by_hand_hides_the_blocks_and_asks_for_a_replay(index: Index, redis_server: RedisServer) -> None:
    inspector = RedisInspector(redis_server.url)
    before = await index.matched(60)
    epoch = await inspector.clear(A.name)
    unknown = await inspector.clear("10.9.9.9:1#0")
    record = redis_server.client().hgetall(f"{{kv2}}stream:{A.name}")
    await inspector.close()

    assert before == {A.endpoint: 50, B.endpoint: 20}
    assert await index.matched(60) == {B.endpoint: 20}
    assert (int(record[b"epoch"]), int(record[b"last_seq"]), record[b"reason"]) == (epoch, -1, b"cleared-by-hand")
    assert unknown is None
    slots: Any = redis_server.client().hgetall("{kv2}slots")
    assert {slot: json.loads(each)["state"] for slot, each in slots.items()} == {b"0": "sweeping", b"1": "live"}
    assert (await verify(redis_server)).counts == {}
