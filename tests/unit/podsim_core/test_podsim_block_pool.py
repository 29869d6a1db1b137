from podsim.core.block_pool import BlockPool
from podsim.core.events import AllBlocksCleared, BlockRemoved, BlockStored

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def stored(*hashes: bytes) -> BlockStored:
    return BlockStored(block_hashes=hashes, parent_hash=None, token_ids=(), block_size=4)


def cached(pool: BlockPool, *hashes: bytes) -> list[int]:
    blocks = pool.allocate(len(hashes))
    pool.cache(blocks, stored(*hashes))
    return blocks


def test_one_block_of_the_pool_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert (pool.free_blocks, pool.allocate(3), pool.free_blocks, pool.usage) == (3, [1, 2, 3], 0, 1.0)


def test_a_freed_block_stays_cached_until_it_is_allocated_again() -> None:
    pool = BlockPool(3)
    pool.release(cached(pool, A))
    assert pool.cached_prefix([A], max_blocks=1) == [1]
    pool.allocate(2)
    assert pool.cached_prefix([A], max_blocks=1) == []
    assert pool.take_events() == [stored(A), BlockRemoved(block_hash=A)]


def test_a_sequences_last_block_is_evicted_first_and_its_first_block_last() -> None:
    pool = BlockPool(4)
    pool.release(cached(pool, A, B, C))
    pool.take_events()
    pool.allocate(3)
    assert pool.take_events() == [BlockRemoved(block_hash=digest) for digest in (C, B, A)]


def test_blocks_without_content_are_reused_before_any_cached_block() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.cache(blocks[:1], stored(A))
    pool.release(blocks)
    assert pool.allocate(2) == [3, 2], "the sequence's last block comes first"
    assert pool.cached_prefix([A], max_blocks=1) == [1]


def test_a_touched_block_is_not_evicted_and_counts_its_users() -> None:
    pool = BlockPool(3)
    pool.release(cached(pool, A))
    pool.touch([1])
    pool.touch([1])
    assert pool.free_blocks == 1
    pool.release([1])
    assert pool.free_blocks == 1
    pool.release([1])
    assert (pool.free_blocks, pool.unused([1])) == (2, 1)


def test_a_prefix_ends_at_the_first_block_that_is_missing_or_over_the_limit() -> None:
    pool = BlockPool(5)
    blocks = cached(pool, A, B)
    assert pool.cached_prefix([A, C, B], max_blocks=3) == blocks[:1]
    assert pool.cached_prefix([A, B], max_blocks=1) == blocks[:1]
    assert pool.cached_prefix([C, A], max_blocks=2) == []


def test_equal_content_in_two_blocks_is_stored_twice_and_removed_twice() -> None:
    pool = BlockPool(4)
    first, second = cached(pool, A), cached(pool, A)
    pool.release(first)
    pool.release(second)
    pool.allocate(1)  # the block that was never used
    pool.allocate(1)
    assert pool.cached_prefix([A], max_blocks=1) == second, "the other copy is still there"
    pool.allocate(1)
    assert pool.cached_prefix([A], max_blocks=1) == []
    assert pool.take_events() == [stored(A), stored(A), BlockRemoved(block_hash=A), BlockRemoved(block_hash=A)]


def test_a_younger_copy_can_go_before_the_oldest() -> None:
    pool = BlockPool(4)
    first, second, third = cached(pool, A), cached(pool, A), cached(pool, A)
    pool.release(second)
    pool.allocate(1)
    assert pool.cached_prefix([A], max_blocks=1) == first
    pool.release(first)
    pool.allocate(1)
    assert pool.cached_prefix([A], max_blocks=1) == third


def test_a_reset_forgets_everything_but_is_refused_while_a_block_is_in_use() -> None:
    pool = BlockPool(4)
    blocks = cached(pool, A, B)
    assert not pool.reset()
    pool.release(blocks)
    pool.take_events()
    assert pool.reset()
    assert pool.cached_prefix([A], max_blocks=1) == []
    assert pool.take_events() == [AllBlocksCleared()]
    pool.allocate(3)
    assert pool.take_events() == [], "nothing is left to be removed"
