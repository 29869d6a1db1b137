"""Which KV cache groups hold a prompt's whole prefix, as far as stores have told."""

from array import array
from collections.abc import Mapping
from typing import Any

import pytest

from kvmesh.blocks.cache_groups import SPARSE, CacheGroup
from kvmesh.blocks.events import MAX_GROUP, BlockStored, is_dense, is_indexed, learn, may_hold

FULL = CacheGroup(kind="full_attention", block_size=4)
WINDOW = CacheGroup(kind="sliding_window", block_size=4, sliding_window=128)
UNNAMED = CacheGroup(kind=None, block_size=4)


def stored(*, blocks: int = 1, tokens: int | None = None, **more: Any) -> BlockStored:
    count = blocks * 4 if tokens is None else tokens
    fields: dict[str, Any] = {"block_size": 4, **more}
    return BlockStored(
        block_hashes=tuple(range(blocks)), parent_block_hash=None, tokens=array("I", range(count)).tobytes(), **fields
    )


def learned(*events: BlockStored) -> Mapping[int, CacheGroup]:
    catalogue: Mapping[int, CacheGroup] = {}
    for event in events:
        catalogue = learn(catalogue, event)
    return catalogue


def test_a_group_is_learned_as_the_store_describes_it_even_where_it_is_not_indexed() -> None:
    assert learned(
        stored(group_idx=0, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=128),
        stored(group_idx=1, kv_cache_spec_kind="full_attention"),
    ) == {0: WINDOW, 1: FULL}


def test_a_store_without_group_and_kind_teaches_nothing() -> None:
    assert learned(stored()) == {}


def test_an_offload_placeholder_teaches_nothing() -> None:
    assert learned(stored(tokens=0, block_size=0, group_idx=0)) == {}


def test_what_is_known_already_gives_the_same_object_back() -> None:
    catalogue = {0: WINDOW}

    assert learn(catalogue, stored(group_idx=0)) is catalogue  # nor does a store without the kind blot it out


def test_a_later_store_corrects_kind_and_block_size() -> None:
    assert learn({0: WINDOW}, stored(group_idx=0, block_size=8, kv_cache_spec_kind="full_attention", tokens=8)) == {
        0: CacheGroup(kind="full_attention", block_size=8, sliding_window=128)
    }


def test_the_largest_block_size_of_a_group_counts() -> None:
    """The end of a prompt within a block is reported with the size of a hash's piece."""
    catalogue = learned(stored(group_idx=0, kv_cache_spec_kind="full_attention", block_size=8, tokens=8))
    part = stored(group_idx=0, kv_cache_spec_kind="full_attention")
    assert learn(catalogue, part) is catalogue


def test_a_group_without_a_kind_that_leaves_blocks_out_is_sparse() -> None:
    assert learned(stored(group_idx=0), stored(group_idx=0, tokens=16)) == {0: CacheGroup(kind=SPARSE, block_size=4)}
    assert learned(stored(group_idx=0, kv_cache_spec_kind="full_attention", tokens=16)) == {0: FULL}


def test_the_catalogue_is_bounded() -> None:
    assert len(learned(*(stored(group_idx=group) for group in range(MAX_GROUP + 50)))) == MAX_GROUP + 1


@pytest.mark.parametrize(
    ("catalogue", "group", "expected"),
    [
        ({}, None, True),  # vLLM before 0.20, other engines
        ({0: FULL}, 0, True),
        ({0: FULL, 1: WINDOW}, 0, True),
        ({0: FULL, 1: WINDOW}, 1, True),
        ({0: FULL, 1: CacheGroup(kind="sliding_window", block_size=4)}, 1, False),  # how wide?
        ({0: FULL, 1: CacheGroup(kind="chunked_local_attention", block_size=4)}, 1, False),
        ({0: UNNAMED}, 0, True),  # vLLM 0.20 and 0.21
        ({0: UNNAMED, 1: UNNAMED}, 0, False),  # either may be the sliding window
        ({0: UNNAMED, 1: FULL}, 0, False),
        ({1: UNNAMED}, 1, False),
        ({1: FULL}, 1, True),
        ({0: CacheGroup(kind=SPARSE, block_size=4)}, 0, False),
        ({0: CacheGroup(kind="mamba", block_size=528)}, 0, True),
        ({0: CacheGroup(kind="unknown", block_size=16)}, 0, False),
        ({0: WINDOW}, None, False),  # a kind without a number describes group 0, and removals would not say whose
    ],
)
def test_groups_with_a_rule_are_indexed_and_an_unnamed_one_while_it_is_alone(
    catalogue: dict[int, CacheGroup], group: int | None, expected: bool
) -> None:
    assert is_indexed(catalogue, group) is expected


@pytest.mark.parametrize("kind", ["mla_attention", "sink_full_attention"])
def test_mla_and_sink_full_groups_are_dense(kind: str) -> None:
    assert is_indexed(learned(stored(group_idx=0, kv_cache_spec_kind=kind)), 0)


@pytest.mark.parametrize(
    ("catalogue", "group", "expected"),
    [
        ({}, None, True),
        ({}, 3, True),  # never described: its removal finds nothing, which does no harm
        ({0: WINDOW}, 0, True),
        ({0: WINDOW}, None, False),
        ({0: CacheGroup(kind="chunked_local_attention", block_size=4)}, 0, False),
        ({0: WINDOW}, MAX_GROUP + 1, False),
        ({0: FULL}, 0, True),
        ({0: UNNAMED, 1: UNNAMED}, 0, True),  # was indexed while it was alone
        ({0: CacheGroup(kind=SPARSE, block_size=4)}, 0, True),  # likewise
    ],
)
def test_removals_are_dropped_only_where_nothing_was_ever_indexed(
    catalogue: dict[int, CacheGroup], group: int | None, expected: bool
) -> None:
    assert may_hold(catalogue, group) is expected


def test_an_event_is_dense_if_its_tokens_fill_its_blocks_exactly() -> None:
    assert [is_dense(stored(blocks=2, tokens=tokens)) for tokens in (8, 7, 9, 0)] == [True, False, False, False]
    assert not is_dense(stored(blocks=0, tokens=4))
