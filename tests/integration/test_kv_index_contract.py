"""What every index must do; run against Redis and against its in-memory twin."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from kv_indexer.adapters.redis_writer import RedisIndexWriter
from kv_indexer.api import MemoryPrefixIndex, PrefixIndexReader, PrefixLookup, block_keys, root_key
from kv_indexer.core.block_keys import KEY_BYTES
from kv_indexer.core.index_changes import Clear, IndexChange, Operation, Remove, Store, pack_hashes
from kv_indexer.core.source import EndpointCache, IndexStatus, SourceState, SourceStatus, Stream, StreamPosition
from kv_indexer.ports import Applied
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_apply.kv_fakes import BLOCK, prompt

ROOT = root_key(hash_seed="kvmesh", model="tiny")
A, B = Stream(endpoint="10.0.0.1:8000"), Stream(endpoint="10.0.0.2:8000")
A1 = Stream(endpoint="10.0.0.1:8000", dp_rank=1)


@dataclass
class Index:
    """Writer and reader of one index, with short ways to say things."""

    writer: Any
    reader: Any

    async def lookup(self, blocks: int) -> PrefixLookup:
        lookup: PrefixLookup = await self.reader.lookup(prompt(blocks), root=ROOT)
        return lookup

    async def matched(self, blocks: int = 5) -> dict[str, int]:
        return dict((await self.lookup(blocks)).matched_blocks)

    async def apply(self, stream: Stream, *operations: Operation) -> int:
        """Apply one batch where the stream stands; return its epoch."""
        position: StreamPosition = await self.writer.open_stream(stream)
        applied = await self.writer.apply(stream, change(position, *operations))
        assert applied is not None
        epoch: int = applied.epoch
        return epoch

    async def sweep(self, fields: int = 1000) -> int:
        slices = 0
        while await self.writer.sweep(fields=fields):
            slices += 1
        return slices


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    if request.param == "memory":
        memory = MemoryPrefixIndex(hash_seed="kvmesh")
        yield Index(writer=memory, reader=memory)
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    writer, reader = RedisIndexWriter(url=server.url), PrefixIndexReader(url=server.url, hash_seed="kvmesh")
    yield Index(writer=writer, reader=reader)
    await writer.close()
    await reader.close()


def change(position: StreamPosition, *operations: Operation) -> IndexChange:
    return IndexChange(
        epoch=position.epoch,
        previous_seq=position.last_seq,
        last_seq=position.last_seq + 1,
        last_ts=1.25,
        last_crc=7,
        operations=operations,
    )


def blocks(first: int, last: int, *, block_size: int = BLOCK, **more: Any) -> Store:
    """Store blocks first … last (from 1) of the prompt; the engine hash of a block is its place."""
    keys = block_keys(prompt(last * block_size // BLOCK), block_size=block_size, parent=ROOT)
    fields = {"tier": "GPU", "group": 0, **more}
    return Store(
        hashes=pack_hashes(range(first, last + 1)),
        keys=keys[(first - 1) * KEY_BYTES : last * KEY_BYTES],
        block_size=block_size,
        **fields,
    )


def without(*hashes: int, **more: Any) -> Remove:
    return Remove(hashes=pack_hashes(hashes), **{"tier": "GPU", "group": 0, **more})


async def test_an_empty_index_matches_nothing(index: Index) -> None:
    lookup = await index.lookup(3)

    assert (lookup.matched_blocks, lookup.block_size, lookup.endpoints) == ({}, {}, {})
    assert await index.reader.sources() == []


async def test_stored_blocks_are_found_and_removed_ones_are_not(index: Index) -> None:
    await index.apply(A, blocks(1, 4))
    assert await index.matched() == {A.endpoint: 4}

    await index.apply(A, without(3))
    assert await index.matched() == {A.endpoint: 2}


async def test_each_endpoint_is_found_with_its_own_prefix(index: Index) -> None:
    await index.apply(A, blocks(1, 4))
    await index.apply(B, blocks(1, 2))
    await index.apply(B, blocks(4, 5))

    assert await index.matched() == {A.endpoint: 4, B.endpoint: 2}
    assert (await index.lookup(5)).block_size == {A.endpoint: BLOCK, B.endpoint: BLOCK}


async def test_a_block_stored_n_times_needs_n_removals(index: Index) -> None:
    for _ in range(3):
        await index.apply(A, blocks(1, 1), blocks(1, 1))
    await index.apply(A, without(1, 1, 1), without(1, 1))
    assert await index.matched() == {A.endpoint: 1}

    await index.apply(A, without(1))
    assert await index.matched() == {}


async def test_counts_follow_the_order_of_events_within_one_change(index: Index) -> None:
    await index.apply(A, without(1), blocks(1, 2), without(2), blocks(2, 2), without(2, 2), blocks(1, 1), without(1))

    assert await index.matched() == {A.endpoint: 1}


async def test_hashes_that_repeat_within_one_operation_are_each_counted(index: Index) -> None:
    twice = blocks(1, 1)
    twice = Store(tier="GPU", group=0, block_size=BLOCK, hashes=twice.hashes * 2, keys=twice.keys * 2)
    await index.apply(A, twice, without(1))

    assert await index.matched() == {A.endpoint: 1}


async def test_removing_what_is_not_held_changes_nothing(index: Index) -> None:
    await index.apply(A, without(1), without(1, tier="CPU"))
    await index.apply(A, blocks(1, 1), without(2, 3), without(1, group=1), without(1, tier="CPU"))

    assert await index.matched() == {A.endpoint: 1}


async def test_one_pods_removal_leaves_the_others_block(index: Index) -> None:
    await index.apply(A, blocks(1, 2))
    await index.apply(B, blocks(1, 2))
    await index.apply(A, without(1, 2))

    assert await index.matched() == {B.endpoint: 2}


async def test_tiers_are_sources_of_their_own_and_complete_each_other(index: Index) -> None:
    await index.apply(A, blocks(1, 2), blocks(2, 3, tier="CPU"))
    assert await index.matched() == {A.endpoint: 3}

    await index.apply(A, without(2, tier="CPU"))
    assert await index.matched() == {A.endpoint: 3}
    await index.apply(A, without(2))
    assert await index.matched() == {A.endpoint: 1}


async def test_ranks_do_not_complete_each_other(index: Index) -> None:
    await index.apply(A, blocks(1, 2))
    await index.apply(A1, blocks(3, 4))

    assert await index.matched() == {A.endpoint: 2}


async def test_sources_with_other_block_sizes_are_found_with_their_own(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    await index.apply(B, blocks(1, 2, block_size=2 * BLOCK))
    lookup = await index.lookup(4)

    assert (lookup.matched_blocks, lookup.block_size) == (
        {A.endpoint: 3, B.endpoint: 2},
        {A.endpoint: BLOCK, B.endpoint: 2 * BLOCK},
    )


async def test_a_prompt_of_whole_blocks_never_hits_its_last_one(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    lookup = await index.reader.lookup(prompt(3)[:-4], root=ROOT)

    assert lookup.matched_blocks == {A.endpoint: 2}


async def test_another_root_matches_nothing(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    salted = root_key(hash_seed="kvmesh", model="tiny", cache_salt="tenant")

    assert (await index.reader.lookup(prompt(3), root=salted)).matched_blocks == {}


async def test_a_prompt_longer_than_any_chunk_is_found_to_its_end(index: Index) -> None:
    await index.apply(A, blocks(1, 6000))
    await index.apply(B, blocks(1, 1000))
    await index.apply(A, without(5000))

    assert await index.matched(6000) == {A.endpoint: 4999, B.endpoint: 1000}


async def test_a_change_that_does_not_follow_is_refused_and_does_nothing(index: Index) -> None:
    start = await index.writer.open_stream(A)
    first = change(start, blocks(1, 1))

    assert await index.writer.apply(A, first) == Applied(epoch=start.epoch, left_out=0)
    assert await index.writer.apply(A, first) is None  # again: a crash before the answer
    ahead = StreamPosition(epoch=start.epoch, last_seq=5)
    assert await index.writer.apply(A, change(ahead, blocks(2, 2))) is None
    stale = StreamPosition(epoch=start.epoch - 1, last_seq=0)
    assert await index.writer.apply(A, change(stale, blocks(2, 2))) is None
    assert await index.writer.apply(B, change(start, blocks(1, 1))) is None  # never opened
    assert await index.matched() == {A.endpoint: 1}


async def test_the_position_is_stored_with_the_blocks(index: Index) -> None:
    assert await index.writer.read_position(A) is None
    epoch = await index.apply(A, blocks(1, 1), blocks(1, 1, tier="CPU"))

    expected = StreamPosition(
        epoch=epoch, last_seq=0, last_ts=1.25, last_crc=7, block_sizes={"GPU": BLOCK, "CPU": BLOCK}
    )
    assert await index.writer.read_position(A) == expected
    assert await index.writer.open_stream(A) == expected


async def test_a_clear_hides_what_came_before_it_and_nothing_after(index: Index) -> None:
    before = await index.apply(A, blocks(1, 3))
    await index.apply(B, blocks(1, 1))
    after = await index.apply(A, Clear(), blocks(1, 2), Clear(), blocks(1, 1))

    assert after > before
    assert await index.matched() == {A.endpoint: 1, B.endpoint: 1}
    await index.apply(A, without(1))  # the old references are gone with their epoch
    assert await index.matched() == {B.endpoint: 1}


async def test_a_new_epoch_hides_the_old_one_at_once(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    position = await index.writer.begin_epoch(A, expected_epoch=epoch, last_seq=41, degraded="history-truncated")

    assert position == StreamPosition(epoch=position.epoch, last_seq=41, degraded="history-truncated")
    assert position.epoch > epoch
    assert await index.matched() == {}


async def test_whoever_begins_an_epoch_second_only_learns_of_it(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    first = await index.writer.begin_epoch(A, expected_epoch=epoch, last_seq=-1, degraded="")
    second = await index.writer.begin_epoch(A, expected_epoch=epoch, last_seq=9, degraded="other")

    assert first == second
    assert await index.writer.begin_epoch(B, expected_epoch=1, last_seq=-1, degraded="") is None


async def test_a_slot_is_reused_only_after_its_sweep(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    await index.writer.begin_epoch(A, expected_epoch=epoch, last_seq=-1, degraded="")
    await index.apply(B, blocks(1, 1))
    assert [line.slot for line in await index.reader.sources()] == [None, 1]
    assert await index.matched() == {B.endpoint: 1}

    await index.sweep()
    await index.apply(A, blocks(2, 2))
    assert [line.slot for line in await index.reader.sources()] == [0, 1]
    assert await index.matched() == {B.endpoint: 1}  # nothing of the old epoch came back with the slot


async def test_a_sweep_proceeds_in_bounded_slices_and_ends(index: Index) -> None:
    await index.apply(A, blocks(1, 2500))
    await index.apply(B, blocks(1, 10))
    await index.writer.drop_stream(A)

    assert await index.sweep(fields=500) >= 5
    assert await index.matched(2500) == {B.endpoint: 10}
    assert await index.sweep() == 0


async def test_a_dropped_stream_is_forgotten(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    await index.writer.drop_stream(A)
    await index.writer.drop_stream(A)

    assert await index.matched() == {}
    assert await index.reader.sources() == []
    assert await index.writer.read_position(A) is None


async def test_parents_are_found_in_every_tier_and_only_in_their_group(index: Index) -> None:
    keys = block_keys(prompt(3), block_size=BLOCK, parent=ROOT)
    await index.apply(A, blocks(1, 2), blocks(2, 3, tier="CPU"), blocks(1, 1, group=1), blocks(1, 1))

    assert await index.writer.find_block_keys(A, {(1, 1), (2, 0), (3, 0), (3, 1), (99, 0)}) == {
        1: keys[:8],
        2: keys[8:16],
        3: keys[16:24],
    }
    assert await index.writer.find_block_keys(B, {(1, 0)}) == {}


async def test_states_and_counts_are_shown(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3), blocks(1, 1), blocks(1, 2, tier="CPU"))
    await index.writer.set_state(A, epoch=epoch, state=SourceState.DEGRADED, reason="why")
    await index.writer.set_state(A, epoch=epoch - 1, state=SourceState.LIVE)  # from a past epoch: ignored
    await index.writer.set_state(B, epoch=1, state=SourceState.LIVE)  # never opened: ignored

    common: dict[str, Any] = {"endpoint": A.endpoint, "dp_rank": 0, "epoch": epoch, "state": SourceState.DEGRADED}
    common |= {"reason": "why", "last_seq": 0, "last_batch_at": 1.25, "block_size": BLOCK}
    assert await index.reader.sources() == [
        SourceStatus(tier="CPU", slot=1, cached_blocks=2, **common),
        SourceStatus(tier="GPU", slot=0, cached_blocks=3, **common),
    ]
    assert (await index.lookup(1)).endpoints == {
        A.endpoint: EndpointCache(cached_blocks=5, block_size=BLOCK, state=SourceState.DEGRADED, reason="why")
    }


async def test_an_indexer_that_is_alive_is_told_with_each_lookup_and_in_the_status(index: Index) -> None:
    await index.apply(A, blocks(1, 1))
    await index.writer.heartbeat()

    assert (await index.lookup(1)).indexer_alive
    assert await index.reader.status() == IndexStatus(
        sources=tuple(await index.reader.sources()), indexer_alive=True, unreadable=()
    )


async def test_a_degraded_epoch_stays_so_until_the_next(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 1))
    await index.writer.set_state(
        A, epoch=epoch, state=SourceState.DEGRADED, reason="undecodable-batch", degraded="undecodable-batch"
    )
    await index.writer.set_state(A, epoch=epoch, state=SourceState.LOST, reason="unreachable")
    assert (await index.writer.open_stream(A)).degraded == "undecodable-batch"

    await index.apply(A, Clear())
    assert (await index.writer.open_stream(A)).degraded == ""
