"""What keeps the index bounded: full sources, generations; run against Redis and against its in-memory twin."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvmesh.blocks.index_changes import Clear
from kvmesh.blocks.source import SourceState
from tests.integration.kv_index import A, B, Index, blocks, change, memory_index, redis_index, without


@pytest.fixture(params=["memory", "redis"])
async def small(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    """An index whose sources hold 10 blocks at most and whose generations last 100 s."""
    policy: dict[str, Any] = {"max_blocks_per_source": 10, "tier_ttl_seconds": 100.0}
    if request.param == "memory":
        opened = memory_index(**policy)
    else:
        opened = redis_index(request.getfixturevalue("redis_server"), **policy)
    async with opened as one:
        yield one


async def test_a_full_source_leaves_the_rest_out_and_says_so(small: Index) -> None:
    claim, start = await small.claim(A), await small.position(A)
    await small.writer.set_state(claim, epoch=start.epoch, state=SourceState.LIVE)
    within = await small.writer.apply(claim, change(start, blocks(1, 8), blocks(1, 3)))
    beyond = await small.writer.apply(claim, change(await small.position(A), blocks(8, 20), blocks(21, 22)))

    assert (within.left_out, beyond.left_out) == ({}, {"source-full": 2})
    assert await small.matched(22) == {A.endpoint: 10}
    assert (await small.position(A)).degraded == "source-full"
    (line,) = await small.reader.sources()
    assert (line.cached_blocks, line.state, line.reason) == (10, SourceState.DEGRADED, "source-full")

    await small.apply(A, without(8, 8, 9), blocks(8, 9))
    assert await small.matched(22) == {A.endpoint: 10}
    await small.apply(B, blocks(1, 10))  # another source has its own
    assert await small.matched(22) == {A.endpoint: 10, B.endpoint: 10}


async def test_what_a_full_source_left_out_before_a_clear_degrades_nothing(small: Index) -> None:
    claim = await small.claim(A)
    before = change(await small.position(A), blocks(1, 11), Clear(), blocks(1, 2))
    assert (await small.writer.apply(claim, before)).left_out == {"source-full": 1}
    assert (await small.position(A)).degraded == ""

    after = change(await small.position(A), Clear(), blocks(1, 11))
    assert (await small.writer.apply(claim, after)).left_out == {"source-full": 1}
    assert (await small.position(A)).degraded == "source-full"


async def test_a_full_source_still_counts_what_it_holds(small: Index) -> None:
    await small.apply(A, blocks(1, 10))
    await small.apply(A, blocks(1, 12), without(1))

    assert await small.matched(12) == {A.endpoint: 10}


async def test_blocks_of_a_tier_that_never_removes_live_for_one_to_two_generations(small: Index) -> None:
    await small.apply(A, blocks(1, 3), blocks(1, 4, tier="STORAGE"))
    await small.pass_time(101)
    await small.apply(A, blocks(1, 2, tier="STORAGE"))  # stored again
    assert await small.matched() == {A.endpoint: 4}

    await small.pass_time(101)
    await small.apply(A, blocks(2, 2, tier="STORAGE"))
    assert (await small.lookup(5)).tiers == {A.endpoint: {"GPU": 3}}
    await small.apply(A, without(3), blocks(5, 5))
    assert await small.matched() == {A.endpoint: 2}
    await small.sweep()
    assert sorted((line.tier, line.cached_blocks) for line in await small.reader.sources()) == [
        ("GPU", 3),
        ("STORAGE", 1),
        ("STORAGE", 2),
    ]


async def test_generations_pass_also_where_nothing_is_stored_any_more(small: Index) -> None:
    await small.apply(A, blocks(1, 3, tier="STORAGE"), blocks(1, 1))
    for expected in (3, 3, 1, 1):
        assert await small.matched() == {A.endpoint: expected}
        await small.pass_time(101)
        await small.sweep()

    await small.apply(A, blocks(2, 2, tier="STORAGE"))
    assert await small.matched() == {A.endpoint: 2}


@pytest.mark.parametrize("tier", ["GPU", "CPU"])
async def test_a_tier_that_removes_never_grows_old(small: Index, tier: str) -> None:
    await small.apply(A, blocks(1, 3, tier=tier), *([without(99, tier=tier)] if tier == "CPU" else []))
    for _ in range(3):
        await small.pass_time(101)
        await small.apply(A, blocks(4, 4, tier=tier))
        await small.sweep()

    assert await small.matched() == {A.endpoint: 4}


async def test_the_first_removal_hides_the_generation_before(small: Index) -> None:
    await small.apply(A, blocks(1, 3, tier="CPU"))
    await small.pass_time(101)
    await small.apply(A, blocks(1, 2, tier="CPU"))
    assert await small.matched() == {A.endpoint: 3}

    await small.apply(A, without(2, tier="CPU"))
    assert await small.matched() == {A.endpoint: 1}


async def test_parents_are_found_in_the_generation_before(small: Index) -> None:
    await small.apply(A, blocks(1, 3, tier="CPU"))
    await small.pass_time(101)
    await small.apply(A, blocks(1, 2, tier="CPU"))

    assert (await small.writer.find_block_keys(A, {(3, 0)})).keys() == {3}
    assert (await small.writer.find_block_keys_elsewhere(B, {3}))[A].keys() == {3}
