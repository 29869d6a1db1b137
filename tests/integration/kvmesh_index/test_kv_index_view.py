"""What pages ask of the index in a real Redis: sources, findings, and who holds given blocks."""

import pytest

from kvmesh.blocks.block_keys import block_keys
from kvmesh.blocks.cache_groups import CacheGroup, tier_of
from kvmesh.blocks.findings import Finding
from kvmesh.errors import IndexUnavailableError
from kvmesh.index.index_view import IndexView
from kvmesh.index.redis_findings import FINDINGS, RedisFindings
from tests.integration.kv_index import A1, ROOT, A, B, blocks, redis_index
from tests.integration.kv_redis import RedisServer
from tests.unit.kv_indexer_follow.kv_fakes import BLOCK, prompt

FOUND = Finding(endpoint=A.endpoint, dp_rank=None, reason="no-events", message="none come", since=1.0)


def keys(count: int) -> bytes:
    return block_keys(prompt(count), block_size=BLOCK, parent=ROOT)


async def test_each_block_has_its_holders_with_the_best_tier_of_each(redis_server: RedisServer) -> None:
    view = IndexView(url=redis_server.url)
    async with redis_index(redis_server) as index:
        await index.apply(A, blocks(1, 3), blocks(3, 4, tier="CPU"))
        await index.apply(B, blocks(1, 1))

        look = await view.look(keys(5))

        assert look.holders == [
            {A.endpoint: "GPU", B.endpoint: "GPU"},
            {A.endpoint: "GPU"},
            {A.endpoint: "GPU"},
            {A.endpoint: "CPU"},
            {},
        ]
        assert sorted((line.endpoint, line.tier, line.cached_blocks) for line in look.status.sources) == [
            (A.endpoint, "CPU", 2),
            (A.endpoint, "GPU", 3),
            (B.endpoint, "GPU", 1),
        ]
    await view.close()


async def test_each_rank_is_a_holder_and_so_is_a_pod_with_groups_without_full_attention(
    redis_server: RedisServer,
) -> None:
    view = IndexView(url=redis_server.url)
    window = tier_of("GPU", CacheGroup(kind="sliding_window", block_size=BLOCK, sliding_window=2 * BLOCK))
    async with redis_index(redis_server) as index:
        await index.apply(A, blocks(1, 1, tier="CPU"))
        await index.apply(A1, blocks(1, 1))
        await index.apply(B, blocks(1, 1, tier=window, group=1))

        assert (await view.look(keys(1))).holders == [{A.name: "CPU", A1.name: "GPU", B.endpoint: "GPU"}]
    await view.close()


async def test_more_blocks_than_one_request_takes_are_answered_in_order(redis_server: RedisServer) -> None:
    view = IndexView(url=redis_server.url)
    async with redis_index(redis_server) as index:
        await index.apply(A, blocks(1, 1200))

        look = await view.look(keys(1300))

        assert [bool(held) for held in look.holders] == [True] * 1200 + [False] * 100
    await view.close()


async def test_an_empty_index_is_no_error(redis_server: RedisServer) -> None:
    view = IndexView(url=redis_server.url)

    look = await view.look(keys(2))

    assert (look.status.sources, look.status.indexer_alive, list(look.holders)) == ((), False, [{}, {}])
    await view.close()


async def test_what_indexers_have_found_is_there(redis_server: RedisServer) -> None:
    view, shared = IndexView(url=redis_server.url), RedisFindings(url=redis_server.url, indexer="i")
    await shared.share([FOUND], healed=[])

    assert (await view.look()).status.findings == (FOUND,)
    await shared.close()
    await view.close()


async def test_findings_that_cannot_be_read_are_said_and_the_rest_is_shown(redis_server: RedisServer) -> None:
    view = IndexView(url=redis_server.url)
    redis_server.client().set(FINDINGS, "a stranger's")
    async with redis_index(redis_server) as index:
        await index.apply(A, blocks(1, 1))

        status = (await view.look()).status

        assert [line.endpoint for line in status.sources] == [A.endpoint]
        (problem,) = status.unreadable
        assert problem.startswith("findings: ")
    await view.close()


async def test_a_redis_that_is_gone_is_said_in_time(redis_server: RedisServer) -> None:
    view = IndexView(url=redis_server.url, timeout_seconds=0.5)
    redis_server.kill()

    with pytest.raises(IndexUnavailableError):
        await view.look(keys(2))
    await view.close()
