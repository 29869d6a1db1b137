"""What every index must do for hybrid models; run against Redis and against its in-memory twin."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kv_indexer.inspect.redis_inspect import RedisInspector
from kv_indexer.inspect.verify_index import IndexVerifier
from kvmesh.blocks.cache_groups import CacheGroup, tier_of
from kvmesh.blocks.index_changes import Clear, Operation
from kvmesh.index.group_match import HeldBack
from tests.integration.kv_index import A1, A, B, Index, blocks, memory_index, redis_index, without
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK

WINDOW = CacheGroup(kind="sliding_window", block_size=BLOCK, sliding_window=2 * BLOCK)  # needs two blocks
FINE = CacheGroup(kind="sliding_window", block_size=BLOCK // 2, sliding_window=2)
STATE = CacheGroup(kind="mamba", block_size=BLOCK)
OF_WINDOW: dict[str, Any] = {"tier": tier_of("GPU", WINDOW), "group": 1}
OF_STATE: dict[str, Any] = {"tier": tier_of("GPU", STATE), "group": 2}


@pytest.fixture(params=["memory", "redis"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    opened = memory_index() if request.param == "memory" else redis_index(request.getfixturevalue("redis_server"))
    async with opened as one:
        yield one


def window(first: int, last: int, *, group: int = 1) -> Operation:
    return blocks(first, last, tier=tier_of("GPU", WINDOW), group=group)


async def test_a_hit_needs_the_last_blocks_of_the_window(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 5))
    await index.apply(B, blocks(1, 5))
    await index.apply(A, without(1, 2, 3, **OF_WINDOW))
    assert await index.matched(5) == {A.endpoint: 5, B.endpoint: 5}

    await index.apply(A, without(5, **OF_WINDOW))
    found = await index.lookup(5)
    assert found.matched_blocks == {B.endpoint: 5}
    assert found.held_back == {A.endpoint: HeldBack(tokens=5 * BLOCK, by=WINDOW)}

    await index.apply(A, window(3, 3))
    found = await index.lookup(5)
    assert found.matched_blocks == {A.endpoint: 4, B.endpoint: 5}
    assert found.held_back == {A.endpoint: HeldBack(tokens=5 * BLOCK, by=WINDOW)}


async def test_what_full_attention_lacks_bounds_the_others(index: Index) -> None:
    await index.apply(A, blocks(1, 3), window(1, 5))
    found = await index.lookup(5)
    assert (found.matched_blocks, found.held_back) == ({A.endpoint: 3}, {})


async def test_a_state_is_needed_just_where_the_hit_ends(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 5), blocks(2, 2, **OF_STATE), blocks(4, 4, **OF_STATE))
    assert await index.matched(5) == {A.endpoint: 4}
    await index.apply(A, without(4, **OF_STATE))
    assert await index.matched(5) == {A.endpoint: 2}


async def test_a_group_that_holds_nothing_yet_allows_no_hit(index: Index) -> None:
    await index.apply(A, blocks(1, 5), blocks(1, 0, **OF_STATE))
    assert await index.matched(5) == {}


async def test_groups_that_are_described_alike_hold_what_all_of_them_hold(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 5, group=1), window(1, 5, group=2))
    await index.apply(A, without(5, tier=OF_WINDOW["tier"], group=2))
    assert await index.matched(5) == {A.endpoint: 4}


async def test_a_window_of_finer_blocks_is_asked_for_by_its_own_keys(index: Index) -> None:
    fine: dict[str, Any] = {"tier": tier_of("GPU", FINE), "group": 1}
    await index.apply(A, blocks(1, 5), blocks(7, 8, block_size=BLOCK // 2, **fine))
    await index.apply(B, blocks(1, 5))
    found = await index.lookup(5)
    assert found.matched_blocks == {A.endpoint: 4, B.endpoint: 5}
    assert found.block_size == {A.endpoint: BLOCK, B.endpoint: BLOCK}
    assert found.keys.keys() == {BLOCK}


async def test_without_full_attention_the_last_blocks_suffice(index: Index) -> None:
    await index.apply(A, window(3, 4))
    await index.apply(B, window(2, 2))
    assert await index.matched(5) == {A.endpoint: 4}
    assert (await index.lookup(5)).endpoints[A.endpoint].cached_blocks == 2


async def test_a_long_prompt_without_full_attention_is_searched_to_its_end(index: Index) -> None:
    await index.apply(A, window(2899, 2900))
    assert await index.matched(3000) == {A.endpoint: 2900}


async def test_each_rank_has_its_own_groups(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 2))
    await index.apply(A1, blocks(1, 3))
    found = await index.lookup(5)
    assert found.matched_blocks == {A.name: 2, A1.name: 3, A.endpoint: 2}
    assert found.held_back.keys() == {A.name}


async def test_other_tiers_complete_each_group(index: Index) -> None:
    """What a connector has taken out of the GPU is loaded again."""
    on_cpu: dict[str, Any] = {"tier": tier_of("CPU", WINDOW), "group": 1}
    await index.apply(A, blocks(1, 3), blocks(4, 5, tier="CPU"), window(1, 3), blocks(4, 4, **on_cpu))
    found = await index.lookup(5)
    assert found.matched_blocks == {A.endpoint: 4}
    assert found.tiers == {A.endpoint: {"GPU": 3, "CPU": 1}}


async def test_a_clear_and_an_epoch_void_all_groups(index: Index) -> None:
    await index.apply(A, window(1, 5), blocks(1, 5))
    assert await index.matched(5) == {A.endpoint: 5}
    await index.apply(A, Clear(), window(1, 1))
    assert await index.matched(5) == {A.endpoint: 1}  # a model without full attention, for all we know now

    epoch = (await index.position(A)).epoch
    await index.writer.begin_epoch(await index.claim(A), expected_epoch=epoch, last_seq=-1, degraded="")
    await index.believe(await index.claim(A))
    assert await index.matched(5) == {}
    await index.sweep()
    assert await index.reader.sources() != []


async def test_a_gpus_group_that_reports_no_removals_does_not_grow_old(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 5))
    await index.pass_time(7200)
    await index.sweep()
    await index.apply(A, window(6, 6))
    assert await index.matched(5) == {A.endpoint: 5}


async def test_a_source_says_of_which_group_it_is_and_a_pods_blocks_are_those_of_full_attention(index: Index) -> None:
    await index.apply(A, blocks(1, 5), window(1, 3))
    assert [(line.tier, line.cached_blocks) for line in await index.reader.sources()] == [
        ("GPU", 5),
        (f"GPU/sliding_window/{BLOCK}/{2 * BLOCK}", 3),
    ]
    assert (await index.lookup(5)).endpoints[A.endpoint].cached_blocks == 5


async def test_the_audit_understands_groups(redis_server: RedisServer) -> None:
    async with redis_index(redis_server) as index:
        await index.apply(A, blocks(1, 5), window(1, 5), window(1, 5, group=2))
        await index.apply(A, without(5, tier=OF_WINDOW["tier"], group=2), window(6, 6))
        inspector = RedisInspector(url=redis_server.url)
        try:
            audit = await IndexVerifier(inspector).verify()
        finally:
            await inspector.close()
    assert (audit.counts, audit.sources, audit.partial_blocks) == ({}, 2, 1)
