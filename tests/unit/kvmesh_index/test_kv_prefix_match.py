"""The longest prefix of each endpoint from the values of its leading blocks."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.blocks.source import EndpointCache, Registry, SlotRecord, SourceState, StreamRecord
from kvmesh.index.prefix_match import (
    PrefixWalk,
    held_mask,
    match_table,
    runs_of,
    usable_tokens,
    whole_pods,
)
from tests.unit.kvmesh_index.kv_memory_index import match_prompt


def slot(number: int, endpoint: str, *, rank: int = 0, tier: str = "GPU", block_size: int = 16) -> SlotRecord:
    return SlotRecord(
        slot=number, endpoint=endpoint, dp_rank=rank, tier=tier, epoch=1, block_size=block_size, blocks=10
    )


def stream(endpoint: str, *, rank: int = 0, state: SourceState = SourceState.LIVE, reason: str = "") -> StreamRecord:
    return StreamRecord(endpoint=endpoint, dp_rank=rank, epoch=1, last_seq=0, last_ts=0.0, state=state, reason=reason)


def registry(*slots: SlotRecord) -> Registry:
    streams = {(each.endpoint, each.dp_rank): stream(each.endpoint, rank=each.dp_rank) for each in slots}
    return Registry(version=b"1", streams=tuple(streams.values()), slots=slots)


def bitmap(*slots: int) -> bytes:
    """What Redis has for a block that these slots hold."""
    if len(slots) == 1:
        return b"%d" % slots
    value = bytearray(max(slots) // 8 + 1)
    for number in slots:
        value[number // 8] |= 0x80 >> number % 8
    return b"B" + value


def matched(known: Registry, *blocks: bytes | None) -> dict[str, int]:
    return dict(match_prompt(match_table(known), {16: blocks}).matched_blocks)


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        (b"0", {0}),
        (b"15", {15}),
        (b"16", set()),  # beyond what the registry knows
        (b"B\x81\x40", {0, 7, 9}),
        (b"B\x00\x00\xff", set()),
        (b"B", set()),
        (b"", set()),
        (b"x", set()),
        (b"-1", set()),
        (b"1.5", set()),
        (b"\xff\xff", set()),
        (b"9" * 5000, set()),
    ],
)
def test_a_value_names_its_slots_and_a_strangers_value_names_none(value: bytes, slots: set[int]) -> None:
    mask = held_mask(value, width=2)

    assert {slot for slot in range(16) if mask >> (15 - slot) & 1} == slots


def test_a_prompt_may_be_fed_in_chunks_until_nobody_holds_it() -> None:
    table = match_table(registry(slot(0, "a:1"), slot(1, "b:1")))
    walk = PrefixWalk(table.masks[16], width=table.width)

    assert [
        walk.feed([(bitmap(0, 1), 2)]),
        walk.feed([(bitmap(0), 1)]),
        walk.feed([(bitmap(1), 1), (bitmap(0), 1)]),
    ] == [*(True, True, False)]
    assert ({name: match.blocks for name, match in walk.matches().items()}, walk.blocks) == ({"a:1": 3, "b:1": 2}, 3)


def test_each_block_counts_in_its_best_tier() -> None:
    known = registry(slot(0, "a:1", tier="STORAGE"), slot(1, "a:1", tier="CPU"), slot(2, "a:1"), slot(3, "b:1"))
    lookup = match_prompt(match_table(known), {16: [bitmap(0, 1, 2), bitmap(0, 1), bitmap(1), bitmap(0, 3)]})

    assert dict(lookup.tiers) == {"a:1": {"GPU": 1, "CPU": 2, "STORAGE": 1}}


@pytest.mark.parametrize(("first", "second"), [("GPU", "CPU"), ("CPU", "GPU")])
def test_of_two_ranks_with_equal_prefixes_the_worse_tier_counts_for_the_pod(first: str, second: str) -> None:
    known = registry(slot(0, "a:1", rank=0, tier=first), slot(1, "a:1", rank=1, tier=second))

    tiers = match_prompt(match_table(known), {16: [bitmap(0, 1)]}).tiers
    assert tiers == {"a:1#0": {first: 1}, "a:1#1": {second: 1}, "a:1": {"CPU": 1}}


def test_each_endpoint_is_credited_up_to_its_first_hole() -> None:
    known = registry(slot(0, "a:1"), slot(1, "b:1"))

    assert matched(known, bitmap(0, 1), bitmap(0, 1), bitmap(0), bitmap(0, 1)) == {"a:1": 4, "b:1": 2}


def test_an_endpoint_that_joins_after_the_first_block_never_starts() -> None:
    known = registry(slot(0, "a:1"), slot(1, "b:1"))

    assert matched(known, bitmap(0), bitmap(0, 1), bitmap(1)) == {"a:1": 2}


def test_the_first_block_held_by_nobody_means_no_match() -> None:
    assert matched(registry(slot(0, "a:1")), None, bitmap(0)) == {}


def test_tiers_of_one_rank_complete_each_other() -> None:
    known = registry(slot(0, "a:1"), slot(1, "a:1", tier="CPU"))

    assert matched(known, bitmap(0), bitmap(1), bitmap(0, 1), None) == {"a:1": 3}


def test_each_rank_has_its_own_match_and_the_pod_the_shortest() -> None:
    known = registry(slot(0, "a:1", rank=4), slot(1, "a:1", rank=5))

    assert matched(known, bitmap(0, 1), bitmap(1), bitmap(0)) == {"a:1#4": 1, "a:1#5": 2, "a:1": 1}
    assert matched(known, bitmap(1), bitmap(1)) == {"a:1#5": 2}
    assert matched(registry(slot(0, "a:1", rank=3)), bitmap(0)) == {"a:1": 1}  # its only rank


def test_a_request_for_any_rank_counts_on_what_each_of_them_holds() -> None:
    known = registry(slot(0, "a:1", rank=0), slot(1, "a:1", rank=1), slot(2, "b:1"))

    lookup = match_prompt(match_table(known), {16: [bitmap(0, 1, 2), bitmap(1, 2)]})
    assert dict(whole_pods(lookup).matched_blocks) == {"a:1": 1, "a:1#0": 1, "a:1#1": 1, "b:1": 2}
    lookup = match_prompt(match_table(known), {16: [bitmap(1, 2)]})
    assert dict(whole_pods(lookup).matched_blocks) == {"b:1": 1}


def test_slots_that_the_registry_does_not_know_are_ignored() -> None:
    assert matched(registry(slot(9, "a:1")), bitmap(9), bitmap(9, 77), bitmap(0)) == {"a:1": 2}


def test_several_block_sizes_are_matched_separately_and_compared_by_tokens() -> None:
    known = registry(slot(0, "a:1", block_size=16), slot(1, "b:1", block_size=32), slot(2, "c:1", block_size=32))
    lookup = match_prompt(match_table(known), {16: [bitmap(0, 1)] * 3, 32: [bitmap(0, 1)] * 2})

    assert dict(lookup.matched_blocks) == {"a:1": 3, "b:1": 2}
    assert dict(lookup.block_size) == {"a:1": 16, "b:1": 32, "c:1": 32}


def test_an_endpoint_is_as_good_as_the_worst_of_its_streams() -> None:
    known = Registry(
        version=b"1",
        streams=(stream("a:1"), stream("a:1", rank=1, state=SourceState.DEGRADED, reason="history-truncated")),
        slots=(slot(0, "a:1"), slot(1, "a:1", tier="CPU")),
    )

    degraded: dict[str, Any] = {"state": SourceState.DEGRADED, "reason": "history-truncated"}
    assert match_table(known).endpoints == {
        "a:1": EndpointCache(cached_blocks=20, block_size=16, **degraded),
        "a:1#0": EndpointCache(cached_blocks=20, block_size=16, state=SourceState.LIVE, reason=""),
        "a:1#1": EndpointCache(cached_blocks=0, block_size=None, **degraded),
    }


@pytest.mark.parametrize("state", SourceState)
def test_blocks_attract_requests_only_while_it_is_known_that_they_are_there(state: SourceState) -> None:
    slots = (slot(0, "a"), slot(1, "b"))

    streams = (stream("a", state=state, reason="why"), stream("b"))

    seen = matched(Registry(version=b"1", streams=streams, slots=slots), bitmap(0, 1), bitmap(0, 1))

    assert seen == ({"a": 2, "b": 2} if state in (SourceState.LIVE, SourceState.DEGRADED) else {"b": 2})


def test_an_empty_registry_matches_nothing() -> None:
    assert match_prompt(match_table(Registry(version=b"1")), {}).matched_blocks == {}


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    assert [usable_tokens(bytes(4 * count)) for count in (0, 1, 16, 17)] == [0, 0, 15, 16]


@given(
    st.lists(st.sampled_from([b"1", b"2", b"B\xc0", None]), max_size=12).map(
        lambda runs: [v for v in runs for _ in range(3)]
    )
)
def test_equal_values_in_a_row_are_put_together(values: list[bytes | None]) -> None:
    runs = runs_of(values)
    assert [value for value, count in runs for _ in range(count)] == values
    assert all(one[0] != other[0] for one, other in pairwise(runs))
