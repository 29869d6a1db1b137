"""From events to operations: what is indexed, under which keys, and what is counted instead."""

from array import array
from collections import Counter
from typing import Any

import pytest

from kv_indexer.apply.change_plan import Plan, plan_adoption, plan_change
from kv_indexer.apply.hit_reports import first_blocks_to_look_up
from kv_indexer.apply.look_ups import hashes_to_look_up
from kv_indexer.apply.remembered_keys import RememberedKeys
from kv_indexer.apply.store_rules import first_size_change
from kv_indexer.apply.stream_context import StreamContext
from kv_indexer.apply.unplaced_blocks import UnplacedBlocks
from kvmesh.blocks.block_keys import block_keys, fold_features, root_key
from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from kvmesh.blocks.index_changes import Clear, Remove, Store, pack_hashes


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


def plan(*events: Event, context: StreamContext | None = None) -> Plan:
    return plan_change(events, context=context or StreamContext(), roots=roots)


def offloaded(*hashes: int, tier: str = "CPU") -> BlockStored:
    """What OffloadingConnector says: the hashes alone."""
    return BlockStored(block_hashes=hashes, parent_block_hash=None, tokens=b"", block_size=0, medium=tier)


def gpu_removal(*hashes: int, group: int | None = 0) -> BlockRemoved:
    return BlockRemoved(block_hashes=hashes, group_idx=group)


def gpu_store(hashes: tuple[int, ...], block_keys_: bytes, **more: Any) -> Store:
    fields = {"tier": "GPU", "group": 0, "block_size": 4, **more}
    return Store(hashes=pack_hashes(hashes), keys=block_keys_, **fields)


def test_a_store_is_chained_from_the_root() -> None:
    assert plan(stored(1, 2)) == Plan(operations=[gpu_store((1, 2), keys(2))])


def test_a_child_is_chained_from_its_parent_of_the_same_change_and_merged_with_it() -> None:
    assert plan(stored(1), stored(2, first_token=4, parent=1)) == Plan(operations=[gpu_store((1, 2), keys(2))])


def test_a_child_is_chained_from_a_known_parent_and_becomes_known_itself() -> None:
    context = StreamContext(keys=RememberedKeys({7: b"parent-8"}))

    assert plan(stored(2, parent=7), context=context).operations == [gpu_store((2,), keys(1, b"parent-8"))]
    assert (context.keys[7], context.keys[2]) == (b"parent-8", keys(1, b"parent-8"))


def test_an_unknown_parent_is_counted_and_never_taken_for_a_root() -> None:
    assert plan(stored(2, parent=7)).operations == []
    assert plan(stored(2, parent=7)).skipped == {"unknown-parent": 1}


def test_hashes_to_look_up_are_those_that_nothing_explains() -> None:
    events = [
        stored(1),
        stored(2, parent=1),
        stored(3, parent=50),
        stored(4, parent=60, group_idx=2),
        stored(5, parent=3),
        stored(6, parent=61, tokens=tokens(*range(64))),  # not dense: not worth a question
        offloaded(1, 70),
    ]

    context = StreamContext(
        keys=RememberedKeys({50: b"k"}), groups={2: CacheGroup(kind="full_attention", block_size=4)}
    )
    assert hashes_to_look_up(events, context) == {(60, 2), (70, 0)}


def test_a_clear_voids_what_came_before_it_in_the_change_and_forgets_block_sizes() -> None:
    context = StreamContext()
    events = (stored(1), BlockRemoved(block_hashes=(1,), group_idx=0), AllBlocksCleared(), stored(1, medium="CPU"))

    assert plan(*events, context=context).operations == [
        Clear(),  # which voids all before it
        gpu_store((1,), keys(1), tier="CPU"),
    ]
    assert context.block_sizes == {"CPU": 4}


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
        ({"kv_cache_spec_kind": "sliding_window"}, "no-group-rule"),  # how wide?
        ({"kv_cache_spec_kind": "chunked_local_attention"}, "no-group-rule"),
        ({"kv_cache_spec_kind": "mamba", "group_idx": None}, "no-group-rule"),  # removals would not say whose
        ({"kv_cache_spec_kind": None, "group_idx": 1}, "no-group-rule"),
        ({"tokens": b"", "block_size": 0}, "placeholder"),
        ({"tokens": b"", "block_size": 0, "medium": "CPU"}, "placeholder-unknown"),
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


def test_a_removal_from_a_tier_that_is_not_indexed_is_counted() -> None:
    assert plan(BlockRemoved(block_hashes=(1,), medium="TAPE")).skipped == {"removal-of-unindexed": 1}


def test_a_removal_elsewhere_leaves_the_own_copy() -> None:
    removal = BlockRemoved(block_hashes=(1,), group_idx=0, locality="REMOTE")
    assert plan(stored(1), removal) == Plan(
        operations=[gpu_store((1,), keys(1))], skipped=Counter({"removal-of-unindexed": 1})
    )


WINDOW: dict[str, Any] = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 128, "group_idx": 1}


STATES: dict[str, Any] = {"kv_cache_spec_kind": "mamba", "group_idx": 1}
WINDOW_TIER, STATE_TIER = "GPU/sliding_window/4/128", "GPU/mamba/4"


def test_each_group_has_a_tier_of_its_own() -> None:
    context = StreamContext()

    assert plan(stored(1, **WINDOW), stored(1), gpu_removal(1, group=1), context=context).operations == [
        gpu_store((1,), keys(1), tier=WINDOW_TIER, group=1),
        gpu_store((1,), keys(1)),
        Remove(tier=WINDOW_TIER, group=1, hashes=pack_hashes((1,))),
    ]
    assert context.groups == {
        0: CacheGroup(kind="full_attention", block_size=4),
        1: CacheGroup(kind="sliding_window", block_size=4, sliding_window=128),
    }
    assert context.block_sizes == {WINDOW_TIER: 4, "GPU": 4}


def test_groups_of_other_block_sizes_have_keys_of_their_own_under_the_same_hashes() -> None:
    fine = {**WINDOW, "block_size": 2}
    halves = block_keys(tokens(*range(12)), block_size=2, parent=ROOT)
    first, second = (
        stored(1, **fine, tokens=tokens(0, 1)),
        stored(2, 3, 4, **fine, parent=1, tokens=tokens(*range(2, 8))),
    )

    context = StreamContext()
    assert plan(stored(2, 4), first, second, context=context).operations == [
        gpu_store((2, 4), keys(2)),
        gpu_store((1, 2, 3, 4), halves[: 4 * 8], tier="GPU/sliding_window/2/128", group=1, block_size=2),
    ]
    goes_on = stored(5, 6, **fine, parent=4, tokens=tokens(*range(8, 12)))
    assert plan(goes_on, context=context).operations == [
        gpu_store((5, 6), halves[4 * 8 :], tier="GPU/sliding_window/2/128", group=1, block_size=2)
    ]


COARSE: dict[str, Any] = {**WINDOW, "block_size": 8}
COARSE_TIER = "GPU/sliding_window/8/128"


def test_longer_blocks_that_are_left_out_have_their_keys_from_full_attentions_stores() -> None:
    """As in Gemma 4, whose windows report before full attention."""
    longer = block_keys(tokens(*range(32)), block_size=8, parent=ROOT)
    context = StreamContext()

    first = plan(stored(4, **COARSE, tokens=tokens(*range(16))), stored(1, 2, 3, 4), context=context)
    assert first.operations[2:] == [gpu_store((4,), longer[8:16], tier=COARSE_TIER, group=1, block_size=8)]
    goes_on = stored(8, **COARSE, parent=4, tokens=tokens(*range(16, 32)))
    second = plan(goes_on, stored(5, 6, 7, 8, parent=4, first_token=16), context=context)
    assert second.operations[1:] == [gpu_store((8,), longer[24:], tier=COARSE_TIER, group=1, block_size=8)]


def test_longer_blocks_have_the_salt_and_the_images_of_the_shorter_ones() -> None:
    image, other = ("i", 2), ("o", 3)
    context = StreamContext()
    extra = (("i", 2), "salt"), (("i", -2), ("o", 3)), None, None
    states = stored(4, **COARSE, tokens=tokens(*range(16)))
    found = plan(states, stored(1, 2, 3, 4, extra_keys=extra), context=context).operations[-1]

    folded = [fold_features([image, ("o", 7)]), None]
    longer = block_keys(tokens(*range(16)), block_size=8, parent=roots(None, "salt"), extra=folded)
    assert other[1] + 4 == 7
    assert found == gpu_store((4,), longer[8:], tier=COARSE_TIER, group=1, block_size=8)


def test_longer_blocks_with_embeddings_have_no_keys() -> None:
    context = StreamContext()
    left_out = stored(4, **COARSE, tokens=tokens(*range(16)))
    extra = ((b"one",), (b"two",), None, None)
    assert plan(left_out, stored(1, 2, 3, 4, extra_keys=extra), context=context).operations[2:] == []
    assert len(context.unplaced) == 1


def test_a_child_waits_for_a_parent_of_its_own_block_size() -> None:
    fine = {**WINDOW, "block_size": 2}
    context = StreamContext()
    plan(stored(2), context=context)

    waiting = plan(stored(3, **fine, parent=2, tokens=tokens(4, 5)), context=context)
    assert waiting == Plan(skipped=Counter({"unknown-parent": 1}))
    halves = block_keys(tokens(*range(6)), block_size=2, parent=ROOT)
    assert plan(stored(1, 2, **fine, tokens=tokens(*range(4))), context=context).operations == [
        gpu_store((1, 2, 3), halves, tier="GPU/sliding_window/2/128", group=1, block_size=2)
    ]


def test_a_state_whose_neighbours_are_left_out_has_its_place_from_full_attention() -> None:
    """vLLM reports it in the same step, before or after."""
    context = StreamContext()
    state = stored(3, **STATES, tokens=tokens(*range(12)))

    assert (
        plan(state, stored(1, 2, 3), context=context).operations
        == [
            gpu_store((), b"", tier=STATE_TIER, group=1),  # so that readers know that there is such a group
            gpu_store((1, 2, 3), keys(3)),
            gpu_store((3,), keys(3)[16:], tier=STATE_TIER, group=1),
        ]
    )
    again = stored(3, **STATES, parent=2, tokens=tokens(*range(4, 12)))
    assert plan(again, context=context).operations == [gpu_store((3,), keys(3)[16:], tier=STATE_TIER, group=1)]


def test_a_state_without_a_place_waits_for_it_or_for_its_removal() -> None:
    """As in a long batch, which is planned event by event."""
    context = StreamContext()
    sparse = {**STATES, "tokens": tokens(*range(12))}
    plan(stored(2, **sparse), stored(3, **sparse), stored(3, **sparse), context=context)
    removals = BlockRemoved(block_hashes=(2, 3), group_idx=1)

    assert plan(removals, context=context).operations == []
    assert plan(stored(1, 2, 3), context=context).operations == [
        gpu_store((1, 2, 3), keys(3)),
        gpu_store((3,), keys(3)[16:], tier=STATE_TIER, group=1),
    ]


def test_a_group_that_holds_nothing_yet_is_known_to_readers() -> None:
    context = StreamContext()
    nothing = stored(**STATES, tokens=tokens(*range(4)))
    assert plan(nothing, nothing, context=context).operations == [gpu_store((), b"", tier=STATE_TIER, group=1)]


def test_a_group_whose_blocks_have_no_place_is_not_indexed_any_longer() -> None:
    """Full attention has blocks of another size, so that it cannot say where those are that were not left out."""
    context = StreamContext()
    fine: dict[str, Any] = {**WINDOW, "block_size": 2}
    plan(stored(1), stored(9, **fine, tokens=tokens(0, 1)), context=context)

    left_out = plan(stored(3, **fine, tokens=tokens(*range(6))), context=context)
    assert left_out == Plan(operations=[Clear()], skipped=Counter({"no-group-rule": 1}))
    again = plan(stored(1, 2), stored(3, **fine, tokens=tokens(*range(6))), context=context)
    assert again == Plan(operations=[gpu_store((1, 2), keys(2))], skipped=Counter({"no-group-rule": 1}))


def test_blocks_without_a_place_are_bounded() -> None:
    context = StreamContext(unplaced=UnplacedBlocks(max_blocks=2))
    skipped = plan(stored(1, 2, 3, **STATES, tokens=tokens(*range(16))), context=context).skipped  # a Mamba model
    assert (len(context.unplaced), skipped) == (2, Counter({"unplaced": 1}))


@pytest.mark.parametrize("first_group", [0, 1])
def test_whole_blocks_replace_the_parts_that_short_prompts_were_reported_as(first_group: int) -> None:
    """As with `--prefix-match-unit`: each group reports the end of a prompt with the size of a hash's piece."""
    context = StreamContext()
    plan(stored(1, **STATES), stored(1), context=context)
    assert context.block_sizes == {STATE_TIER: 4, "GPU": 4}
    whole: dict[str, Any] = {"block_size": 8, "tokens": tokens(*range(8))}
    both = [stored(2, **whole), stored(2, **STATES | whole)]
    events = [both[first_group], both[1 - first_group]]

    key = block_keys(tokens(*range(8)), block_size=8, parent=ROOT)
    stores = [
        gpu_store((2,), key, block_size=8),
        gpu_store((2,), key, block_size=8, tier="GPU/mamba/8", group=1),
    ]
    assert first_size_change([events], context) is None
    found = plan(*events, context=context)
    assert found.operations == [Clear(), stores[first_group], stores[1 - first_group]]
    parts = plan(stored(3, first_token=8, parent=2), stored(3, **STATES, first_token=8, parent=2), context=context)
    assert parts == Plan(skipped=Counter({"partial-block": 2}))


def test_groups_are_looked_up_wherever_a_block_of_their_size_may_be_held() -> None:
    groups = {
        0: CacheGroup(kind="full_attention", block_size=4),
        1: CacheGroup(kind="sliding_window", block_size=4, sliding_window=128),
        2: CacheGroup(kind="mamba", block_size=8),
    }
    events = [
        stored(11, **WINDOW, parent=10),  # whose window has left the parent behind
        stored(12, **WINDOW, parent=11),
        stored(21, **STATES | {"group_idx": 2}, block_size=8, parent=20, tokens=tokens(*range(8))),
        stored(30, **STATES, tokens=tokens(*range(12))),
    ]
    assert hashes_to_look_up(events, StreamContext(groups=groups)) == {(10, 0), (10, 1), (20, 2), (30, 0), (30, 1)}


def test_the_first_block_of_one_group_is_no_report_of_anothers() -> None:
    context = StreamContext()
    plan(stored(1, 2), stored(1, 2, **WINDOW), context=context)
    assert not context.reports_anew
    plan(stored(1, 2, **WINDOW), context=context)
    assert context.reports_anew


def test_removals_of_a_group_that_is_not_indexed_are_dropped_early() -> None:
    context = StreamContext()
    chunked: dict[str, Any] = {"kv_cache_spec_kind": "chunked_local_attention", "group_idx": 1}

    assert plan(stored(1, **chunked), gpu_removal(1, group=1), gpu_removal(1), context=context) == Plan(
        operations=[Remove(tier="GPU", group=0, hashes=pack_hashes((1,)))],
        skipped=Counter({"no-group-rule": 1, "removal-of-unindexed": 1}),
    )


def test_groups_that_nobody_describes_are_indexed_while_there_is_one_and_void_once_there_are_two() -> None:
    context = StreamContext()
    nameless: dict[str, Any] = {"kv_cache_spec_kind": None}

    assert plan(stored(1, **nameless), context=context).operations == [gpu_store((1,), keys(1))]
    assert plan(stored(1, **nameless, group_idx=1), stored(2, **nameless), context=context) == Plan(
        operations=[Clear()], skipped=Counter({"no-group-rule": 2})
    )


def test_offloaded_blocks_take_their_keys_from_the_tier_that_told_of_them() -> None:
    context = StreamContext()

    assert plan(stored(1, 2), offloaded(2), context=context) == Plan(
        operations=[gpu_store((1, 2), keys(2)), gpu_store((2,), keys(2)[8:], tier="CPU")]
    )
    assert context.block_sizes == {"GPU": 4, "CPU": 4}


def test_an_offloaded_block_that_nobody_told_of_is_counted_and_nothing_else() -> None:
    context = StreamContext()
    plan(stored(1), context=context)

    assert plan(offloaded(77), context=context) == Plan(skipped=Counter({"placeholder-unknown": 1}))


def test_several_blocks_from_the_start_of_a_prompt_that_is_held_are_a_report_and_not_counted_again() -> None:
    assert plan(stored(1), stored(1, 2)).operations == [
        gpu_store((1,), keys(1)),
        gpu_store((1, 2), keys(2), set_only=True),
    ]


def test_a_prompt_whose_first_block_is_gone_is_computed_anew_and_counted() -> None:
    operations = plan(stored(1, 2), gpu_removal(1), stored(1, 2)).operations

    assert [each.set_only for each in operations if isinstance(each, Store)] == [False, False]


def test_a_first_block_of_which_one_copy_of_two_is_gone_is_still_held() -> None:
    operations = plan(stored(1), stored(1), gpu_removal(1), stored(1, 2)).operations

    assert operations[-1] == gpu_store((1, 2), keys(2), set_only=True)


def test_where_the_index_lacks_blocks_what_may_be_a_report_is_not_counted_twice() -> None:
    assert plan(stored(1, 2), context=StreamContext(is_exact=False)).operations == [
        gpu_store((1, 2), keys(2), set_only=True)
    ]


def test_first_blocks_to_look_up_are_those_that_we_did_not_see_stored() -> None:
    context = StreamContext(first_blocks={1: 1})
    events = [stored(1, 2), stored(3, 4), stored(5, parent=4), stored(6, medium="CPU"), stored(7, **WINDOW)]

    assert first_blocks_to_look_up(events, context) == {(3, 0)}


def test_a_lone_first_block_is_counted_until_the_publisher_reports_what_it_has() -> None:
    context = StreamContext()
    plan(stored(1), context=context)
    assert plan(stored(1), context=context).operations == [gpu_store((1,), keys(1))]

    plan(stored(1, 2), context=context)
    assert plan(stored(1), context=context).operations == [gpu_store((1,), keys(1), set_only=True)]


def test_a_prompt_that_begins_like_a_removed_one_is_no_report() -> None:
    context = StreamContext()
    plan(stored(1), gpu_removal(1), stored(1, 2), context=context)

    assert not context.reports_anew


def test_later_blocks_and_other_tiers_are_always_counted() -> None:
    operations = plan(stored(1, 2), stored(3, 4, first_token=8, parent=2), stored(1, 2, medium="CPU")).operations

    assert [(type(each), each.set_only) for each in operations if isinstance(each, Store)] == [
        (Store, False),
        (Store, False),
    ]


def test_orphans_are_stored_when_their_parent_arrives_and_theirs_after_them() -> None:
    context = StreamContext()
    assert plan(stored(3, first_token=8, parent=2), stored(2, first_token=4, parent=1), context=context) == Plan(
        skipped=Counter({"unknown-parent": 2})
    )

    assert plan(stored(1), context=context) == Plan(operations=[gpu_store((1, 2, 3), keys(3))])
    assert len(context.orphans) == 0


def test_an_orphan_that_was_removed_meanwhile_is_not_stored_but_its_children_are() -> None:
    context = StreamContext()
    orphans = (stored(2, 3, first_token=4, parent=1), stored(4, first_token=12, parent=3))
    assert plan(*orphans, gpu_removal(3), context=context).operations == []

    assert plan(stored(1), context=context).operations == [gpu_store((1, 2, 4), keys(2) + keys(4)[24:])]


def test_a_clear_forgets_orphans() -> None:
    context = StreamContext()
    plan(stored(2, first_token=4, parent=1), AllBlocksCleared(), context=context)

    assert plan(stored(1), context=context).operations == [gpu_store((1,), keys(1))]


def test_orphans_whose_parent_became_known_otherwise_are_adopted() -> None:
    context = StreamContext()
    plan(stored(2, first_token=4, parent=1), context=context)
    context.keys.update({1: keys(1)})

    assert plan_adoption(context) == Plan(operations=[gpu_store((2,), keys(2)[8:])])


def test_orphans_that_had_to_go_are_counted() -> None:
    context = StreamContext()
    orphans = [stored(number, parent=number + 1_000_000) for number in range(4098)]

    assert plan(*orphans, context=context).skipped == {"unknown-parent": 4098, "orphan-dropped": 2}


SIXTEEN: dict[str, Any] = {"block_size": 16, "tokens": tokens(*range(32))}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ((stored(1), stored(2)), None),
        ((stored(1), stored(1, 2, **SIXTEEN)), 1),
        ((stored(1), AllBlocksCleared(), stored(1, 2, **SIXTEEN)), None),
        ((stored(1), stored(1, 2, **SIXTEEN, medium="CPU")), None),  # an offloaded chunk may be larger
        ((stored(1), stored(1, 2, **SIXTEEN, group_idx=1)), None),  # a second dense group
        ((stored(1), stored(1, 2, **SIXTEEN, kv_cache_spec_kind="mamba", group_idx=1)), None),
        ((stored(1, 2, **SIXTEEN), stored(1)), None),  # a part of a block
        ((stored(1, 2, **SIXTEEN), stored(1, 2)), 1),
    ],
)
def test_only_a_new_process_changes_the_block_size_of_the_same_cache(
    events: tuple[Event, ...], expected: int | None
) -> None:
    context = StreamContext()
    plan(events[0], context=context)

    assert first_size_change([(event,) for event in events], context) == expected


def test_blocks_of_another_size_than_their_tiers_are_counted_by_cause() -> None:
    context = StreamContext()
    plan(stored(1, 2, **SIXTEEN), context=context)
    assert plan(stored(3), stored(3, 4), context=context).skipped == {"partial-block": 1, "other-block-size": 1}

    context.mixes_sizes = True
    assert plan(stored(3, 4), context=context).skipped == {"block-size-changed": 1}


def test_what_is_remembered_is_bounded() -> None:
    context = StreamContext(
        keys=RememberedKeys(dict.fromkeys(range(70_000), b"k")), first_blocks=dict.fromkeys(range(5000), 1)
    )
    context.forget_oldest()

    assert (len(context.keys), len(context.first_blocks)) == (49_152, 3072)
    assert [number in context.keys for number in (69_999, 20_848, 20_847)] == [True, True, False]
