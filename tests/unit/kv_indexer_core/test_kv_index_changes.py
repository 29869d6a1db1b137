"""From events to operations: what is indexed, under which keys, and what is counted instead."""

from array import array
from collections import Counter
from typing import Any

import pytest

from kv_indexer.core.block_keys import block_keys, root_key
from kv_indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kv_indexer.core.extra_keys import fold_features
from kv_indexer.core.index_changes import Clear, Plan, Remove, Store, pack_hashes, parents_to_look_up, plan_change


def roots(lora: str | None, cache_salt: str | None) -> bytes:
    return root_key(hash_seed="kvmesh", model="tiny", lora=lora, cache_salt=cache_salt)


ROOT = roots(None, None)


def tokens(*values: int) -> bytes:
    return array("I", values).tobytes()


def stored(*hashes: int, first_token: int = 0, parent: int | None = None, **more: Any) -> BlockStored:
    """Blocks of 4 tokens that count up."""
    count = len(hashes) * 4
    fields: dict[str, Any] = {
        "tokens": tokens(*range(first_token, first_token + count)),
        "block_size": 4,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    return BlockStored(block_hashes=hashes, parent_block_hash=parent, **{**fields, **more})


def keys(count: int, parent: bytes = ROOT, *, first_token: int = 0) -> bytes:
    return block_keys(tokens(*range(first_token, first_token + 4 * count)), block_size=4, parent=parent)


def plan(*events: Event, known: dict[int, bytes] | None = None, sizes: dict[str, int] | None = None) -> Plan:
    return plan_change(
        events, known={} if known is None else known, roots=roots, block_sizes={} if sizes is None else sizes
    )


def gpu_store(hashes: tuple[int, ...], block_keys_: bytes, **more: Any) -> Store:
    fields = {"tier": "GPU", "group": 0, "block_size": 4, **more}
    return Store(hashes=pack_hashes(hashes), keys=block_keys_, **fields)


def test_a_store_is_chained_from_the_root() -> None:
    assert plan(stored(1, 2)) == Plan(operations=[gpu_store((1, 2), keys(2))])


def test_a_child_is_chained_from_its_parent_of_the_same_change_and_merged_with_it() -> None:
    assert plan(stored(1), stored(2, first_token=4, parent=1)) == Plan(operations=[gpu_store((1, 2), keys(2))])


def test_a_child_is_chained_from_a_known_parent_and_becomes_known_itself() -> None:
    known = {7: b"parent-8"}

    assert plan(stored(2, parent=7), known=known).operations == [gpu_store((2,), keys(1, b"parent-8"))]
    assert known == {7: b"parent-8", 2: keys(1, b"parent-8")}


def test_an_unknown_parent_is_counted_and_never_taken_for_a_root() -> None:
    assert plan(stored(2, parent=7)).operations == []
    assert plan(stored(2, parent=7)).skipped == {"unknown-parent": 1}


def test_parents_to_look_up_are_those_that_nothing_explains() -> None:
    events = [
        stored(1),
        stored(2, parent=1),
        stored(3, parent=50),
        stored(4, parent=60, group_idx=2),
        stored(5, parent=3),
    ]

    assert parents_to_look_up(events, known={50: b"k"}) == {(60, 2)}


def test_order_is_kept_and_a_clear_forgets_block_sizes() -> None:
    sizes: dict[str, int] = {}
    events = (stored(1), BlockRemoved(block_hashes=(1,), group_idx=0), AllBlocksCleared(), stored(1))

    assert plan(*events, sizes=sizes).operations == [
        gpu_store((1,), keys(1)),
        Remove(tier="GPU", group=0, hashes=pack_hashes((1,))),
        Clear(),
        gpu_store((1,), keys(1)),
    ]
    assert sizes == {"GPU": 4}


def test_tiers_and_groups_stay_apart() -> None:
    assert plan(stored(1), stored(1, medium="CPU"), stored(1, group_idx=1)).operations == [
        gpu_store((1,), keys(1)),
        gpu_store((1,), keys(1), tier="CPU"),
        gpu_store((1,), keys(1), group=1),
    ]


def test_adapter_and_salt_are_part_of_the_root_and_items_of_their_block() -> None:
    event = stored(1, 2, lora_name="ad", extra_keys=(("ad", "s"), ("ad", ("mm-1", 0))))

    assert plan(event).operations == [
        gpu_store(
            (1, 2),
            block_keys(
                tokens(*range(8)), block_size=4, parent=roots("ad", "s"), extra=[None, fold_features([("mm-1", 0)])]
            ),
        )
    ]


def test_a_salt_that_the_event_names_is_part_of_the_root() -> None:
    assert plan(stored(1, cache_salt="s")).operations == [gpu_store((1,), keys(1, roots(None, "s")))]


@pytest.mark.parametrize("kind", ["full_attention", "mla_attention", "sink_full_attention"])
def test_dense_groups_are_indexed(kind: str) -> None:
    assert plan(stored(1, kv_cache_spec_kind=kind)).skipped == {}


def test_a_missing_kind_without_a_group_is_an_older_vllm_and_is_indexed() -> None:
    assert plan(stored(1, kv_cache_spec_kind=None, group_idx=None)).operations == [gpu_store((1,), keys(1))]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_spec_kind": "sliding_window"}, "not-full-attention"),
        ({"kv_cache_spec_kind": "mamba"}, "not-full-attention"),
        ({"kv_cache_spec_kind": None}, "not-full-attention"),
        ({"tokens": b"", "block_size": 0, "medium": "CPU"}, "placeholder"),
        ({"tokens": tokens(*range(64))}, "not-dense"),
        ({"medium": "TAPE"}, "unknown-medium"),
        ({"locality": "REMOTE"}, "remote"),
        ({"group_idx": 256}, "group-out-of-range"),
    ],
)
def test_what_is_not_indexed_is_counted_by_reason(changes: dict[str, Any], reason: str) -> None:
    assert plan(stored(1, **changes)) == Plan(skipped=Counter({reason: 1}))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"extra_keys": (None, None)}, "extra-keys-mismatch"), ({"extra_keys": ((7,),)}, "unknown-extra-key")],
)
def test_what_nobody_understands_is_not_indexed_and_counted_apart(changes: dict[str, Any], reason: str) -> None:
    assert plan(stored(1, **changes)) == Plan(not_understood=Counter({reason: 1}))


def test_a_block_size_that_changes_within_an_epoch_is_counted() -> None:
    assert plan(stored(1), sizes={"GPU": 16}).skipped == {"block-size-changed": 1}


def test_a_removal_from_a_tier_that_is_not_indexed_is_counted() -> None:
    assert plan(BlockRemoved(block_hashes=(1,), medium="TAPE")).skipped == {"removal-of-unindexed": 1}
