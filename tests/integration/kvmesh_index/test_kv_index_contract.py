"""What every index must do; run against Redis and against its in-memory twin."""

import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.blocks.block_keys import block_keys, root_key
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.index_changes import Applied, Clear, Operation, Store
from kvmesh.blocks.source import (
    EndpointCache,
    IndexStatus,
    SourceState,
    SourceStatus,
    Stream,
    StreamPosition,
)
from tests.integration.kv_index import A1, ROOT, A, B, Index, blocks, change, memory_index, redis_index, without
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt

C = Stream(endpoint="10.0.0.3:8000")


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


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

    assert await index.matched() == {A.name: 2}
    await index.apply(A1, blocks(1, 1))
    assert await index.matched() == {A.name: 2, A1.name: 1, A.endpoint: 1}


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
    start = await index.position(A)
    claim = await index.claim(A)
    first = change(start, blocks(1, 1))

    assert await index.writer.apply(claim, first) == Applied(epoch=start.epoch, left_out={})
    assert await index.writer.apply(claim, first) is None  # again: a crash before the answer
    ahead = StreamPosition(epoch=start.epoch, last_seq=5)
    assert await index.writer.apply(claim, change(ahead, blocks(2, 2))) is None
    stale = StreamPosition(epoch=start.epoch - 1, last_seq=0)
    assert await index.writer.apply(claim, change(stale, blocks(2, 2))) is None
    assert await index.matched() == {A.endpoint: 1}


async def test_the_position_is_stored_with_the_blocks(index: Index) -> None:
    assert await index.writer.read_position(A) is None
    epoch = await index.apply(A, blocks(1, 1), blocks(1, 1, tier="CPU"))

    expected = StreamPosition(
        epoch=epoch,
        last_seq=0,
        last_ts=1.25,
        last_crc=7,
        block_sizes={"GPU": BLOCK, "CPU": BLOCK},
        state=SourceState.LIVE,
    )
    assert await index.writer.read_position(A) == expected
    assert await index.position(A) == expected


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
    claim, why = await index.claim(A), "history-truncated"
    position = await index.writer.begin_epoch(claim, expected_epoch=epoch, last_seq=41, degraded=why)

    expected = StreamPosition(epoch=position.epoch, last_seq=41, degraded=why, state=SourceState.LIVE)
    assert position == expected
    assert position.epoch > epoch
    assert await index.matched() == {}


async def test_whoever_begins_an_epoch_second_only_learns_of_it(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    first = await index.writer.begin_epoch(await index.claim(A), expected_epoch=epoch, last_seq=-1, degraded="")
    second = await index.writer.begin_epoch(await index.claim(A), expected_epoch=epoch, last_seq=9, degraded="other")

    assert first == second
    assert first == await index.writer.read_position(A)


async def test_a_slot_is_reused_only_after_its_sweep(index: Index) -> None:
    epoch = await index.apply(A, blocks(1, 3))
    await index.writer.begin_epoch(await index.claim(A), expected_epoch=epoch, last_seq=-1, degraded="")
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
    await index.drop(A)

    assert await index.sweep(fields=500) >= 5
    assert await index.matched(2500) == {B.endpoint: 10}
    assert await index.sweep() == 0


async def test_a_dropped_stream_is_forgotten(index: Index) -> None:
    await index.apply(A, blocks(1, 3))
    await index.drop(A)
    await index.drop(A)

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
    claim = await index.claim(A)
    await index.writer.set_state(claim, epoch=epoch, state=SourceState.DEGRADED, reason="why")
    await index.writer.set_state(claim, epoch=epoch - 1, state=SourceState.LIVE)  # from a past epoch: ignored
    position = await index.position(A)
    assert (position.state, position.reason) == (SourceState.DEGRADED, "why")

    common: dict[str, Any] = {"endpoint": A.endpoint, "dp_rank": 0, "epoch": epoch, "state": SourceState.DEGRADED}
    common |= {"reason": "why", "last_seq": 0, "last_batch_at": 1.25, "block_size": BLOCK}
    lines = await index.reader.sources()
    common |= {"owner": lines[0].owner, "applied_at": lines[0].applied_at, "events": 1}
    assert lines == [
        SourceStatus(tier="CPU", slot=1, cached_blocks=2, **common),
        SourceStatus(tier="GPU", slot=0, cached_blocks=3, **common),
    ]
    assert (await index.lookup(1)).endpoints == {
        A.endpoint: EndpointCache(cached_blocks=5, block_size=BLOCK, state=SourceState.DEGRADED, reason="why")
    }


async def test_an_indexer_that_is_alive_is_told_with_each_lookup_and_in_the_status(index: Index) -> None:
    await index.apply(A, blocks(1, 1))  # with a lease, whose every beat says so

    assert (await index.lookup(1)).indexer_alive
    assert await index.reader.status() == IndexStatus(
        sources=tuple(await index.reader.sources()), indexer_alive=True, unreadable=()
    )


async def apply_doubtful(index: Index, why: str, *operations: Operation) -> StreamPosition:
    doubtful = change(await index.position(A), *operations, degraded=why)
    assert await index.writer.apply(await index.claim(A), doubtful) is not None
    return await index.position(A)


async def test_a_degraded_epoch_stays_so_until_the_next(index: Index) -> None:
    doubted = await apply_doubtful(index, "undecodable-batch", blocks(1, 1))
    claim = await index.claim(A)
    await index.writer.set_state(claim, epoch=doubted.epoch, state=SourceState.LOST, reason="unreachable")
    assert (await index.position(A)).degraded == "undecodable-batch"

    await index.apply(A, Clear())
    assert (await index.position(A)).degraded == ""


async def test_a_change_that_leaves_doubt_degrades_the_epoch_in_the_same_step(index: Index) -> None:
    start = await index.position(A)
    await index.writer.set_state(await index.claim(A), epoch=start.epoch, state=SourceState.LIVE)
    first = await apply_doubtful(index, "undecodable-event", blocks(1, 2))
    second = await apply_doubtful(index, "undecodable-batch", blocks(3, 3))
    third = await apply_doubtful(index, "")

    seen = [(each.last_seq, each.degraded, each.state, each.reason) for each in (first, second, third)]
    assert seen == [(seq, "undecodable-event", SourceState.DEGRADED, "undecodable-event") for seq in range(3)]
    assert (await index.lookup(3)).endpoints[A.endpoint].state is SourceState.DEGRADED


async def test_doubt_that_is_told_with_a_clear_is_of_the_new_epoch(index: Index) -> None:
    await apply_doubtful(index, "old", blocks(1, 2))
    assert (await apply_doubtful(index, "", Clear(), blocks(1, 1))).degraded == ""
    assert (await apply_doubtful(index, "new", Clear(), blocks(1, 1))).degraded == "new"


async def test_groups_and_the_start_of_the_publisher_are_kept_with_the_position(index: Index) -> None:
    groups = {0: CacheGroup(kind="full_attention", block_size=BLOCK), 1: CacheGroup(kind=None, block_size=8)}
    claim, start = await index.claim(A), await index.position(A)
    await index.writer.apply(claim, change(start, blocks(1, 1), groups=groups))
    await index.writer.set_started_at(claim, started_at=1758.125)
    await index.apply(A, Clear(), blocks(1, 1))
    kept = await index.position(A)
    assert (kept.groups, kept.started_at) == (groups, 1758.125)  # a clear is no restart

    await index.writer.begin_epoch(claim, expected_epoch=kept.epoch, last_seq=-1, degraded="")
    after = await index.position(A)
    assert (after.groups, after.started_at) == ({}, 1758.125)


async def test_what_is_held_already_is_set_and_not_counted_by_a_restore(index: Index) -> None:
    await index.apply(A, blocks(1, 2), blocks(1, 3, set_only=True), blocks(3, 3, set_only=True))
    assert await index.matched() == {A.endpoint: 3}
    await index.apply(A, without(1, 2, 3))
    assert await index.matched() == {}

    await index.apply(A, blocks(1, 1), blocks(1, 1), blocks(1, 1, set_only=True), without(1))
    assert await index.matched() == {A.endpoint: 1}  # the restore kept the count of two


async def test_a_block_that_many_hold_is_found_while_any_of_them_is_left(index: Index) -> None:
    pods = [Stream(endpoint=f"10.0.1.{number}:8000") for number in range(20)]
    for pod in pods:
        await index.apply(pod, blocks(1, 2))
    dice = random.Random(7)
    dice.shuffle(pods)
    while pods:
        assert await index.matched(2) == {pod.endpoint: 2 for pod in pods}
        await index.apply(pods.pop(), without(2, 1))
    assert await index.matched(2) == {}
    await index.apply(A, blocks(1, 2))
    assert await index.matched(2) == {A.endpoint: 2}


async def test_several_groups_of_one_source_are_counted_apart_and_the_first_removal_hides_the_block(
    index: Index,
) -> None:
    await index.apply(A, blocks(1, 3), blocks(1, 3, group=1), blocks(1, 1, group=255))
    assert await index.matched() == {A.endpoint: 3}
    await index.apply(A, without(3, group=1), without(3, group=1))
    assert await index.matched() == {A.endpoint: 2}
    await index.apply(A, without(3), blocks(3, 3))
    assert await index.matched() == {A.endpoint: 3}


async def test_hashes_that_repeat_across_operations_and_sources_are_each_counted(index: Index) -> None:
    again = blocks(1, 2)
    mixed = Store(tier="GPU", group=0, block_size=BLOCK, hashes=again.hashes * 3, keys=again.keys * 3)
    await index.apply(A, blocks(1, 1), mixed, without(1, 1), again)
    await index.apply(B, mixed, without(1, 2, 1, 2))
    assert await index.matched() == {A.endpoint: 2, B.endpoint: 2}

    await index.apply(A, without(1, 1, 1))  # 1 + 3 + 1 references, 2 + 3 removals
    await index.apply(B, without(1, 2))
    assert await index.matched() == {}


async def test_the_tiers_of_a_match_are_told_each_block_in_its_best(index: Index) -> None:
    await index.apply(A, blocks(1, 2), blocks(2, 3, tier="CPU"), blocks(1, 4, tier="STORAGE"))
    await index.apply(B, blocks(1, 1, tier="FS"), blocks(2, 2, tier="unheard-of"))
    lookup = await index.lookup(5)

    assert lookup.tiers == {A.endpoint: {"GPU": 2, "CPU": 1, "STORAGE": 1}, B.endpoint: {"FS": 1, "unheard-of": 1}}
    assert lookup.matched_blocks == {A.endpoint: 4, B.endpoint: 2}


async def test_block_keys_are_found_in_other_streams_with_their_owner(index: Index) -> None:
    keys = block_keys(prompt(3), block_size=BLOCK, parent=ROOT)
    await index.apply(A, blocks(1, 2), blocks(3, 3, tier="CPU"))
    await index.apply(A1, blocks(1, 1), blocks(2, 2, group=1))
    await index.apply(B, blocks(1, 3))
    epoch = await index.apply(C, blocks(1, 3))
    await index.writer.begin_epoch(await index.claim(C), expected_epoch=epoch, last_seq=-1, degraded="")

    assert await index.writer.find_block_keys_elsewhere(B, {1, 2, 3, 99}) == {
        A: {1: keys[:8], 2: keys[8:16], 3: keys[16:24]},
        A1: {1: keys[:8]},
    }
    assert await index.writer.find_block_keys_elsewhere(B, set()) == {}
    many = set(range(1, 2500))
    assert (await index.writer.find_block_keys_elsewhere(A, many))[B].keys() == {1, 2, 3}


async def test_block_keys_are_found_in_many_other_streams(index: Index) -> None:
    pods = [Stream(endpoint=f"10.0.4.{number}:8000") for number in range(20)]
    for pod in pods:
        await index.apply(pod, blocks(1, 100), blocks(101, 101, tier="CPU"))

    found = await index.writer.find_block_keys_elsewhere(pods[0], set(range(1, 200)))
    assert {pod: set(keys) for pod, keys in found.items()} == {pod: set(range(1, 102)) for pod in pods[1:]}
