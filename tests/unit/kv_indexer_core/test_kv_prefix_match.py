"""The longest prefix of each endpoint from runs of slot bitmaps."""

from kv_indexer.core.prefix_match import match_table, prefix_lookup, runs_of, usable_tokens
from kv_indexer.core.source import EndpointCache, Registry, SlotRecord, SourceState, StreamRecord


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
    """The string that SETBIT would make."""
    value = bytearray(max(slots) // 8 + 1)
    for number in slots:
        value[number // 8] |= 0x80 >> number % 8
    return bytes(value)


def matched(known: Registry, *blocks: bytes | None) -> dict[str, int]:
    return dict(prefix_lookup(match_table(known), {16: runs_of(blocks)}).matched_blocks)


def test_runs_end_at_the_first_block_that_nobody_holds() -> None:
    assert runs_of([b"\x80", b"\x80", b"\xc0", None, b"\x80"]) == [(b"\x80", 2), (b"\xc0", 1)]
    assert runs_of([]) == []


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


def test_ranks_do_not_complete_each_other_and_the_longest_counts() -> None:
    known = registry(slot(0, "a:1", rank=0), slot(1, "a:1", rank=1))

    assert matched(known, bitmap(0, 1), bitmap(1), bitmap(0)) == {"a:1": 2}


def test_slots_that_the_registry_does_not_know_are_ignored() -> None:
    assert matched(registry(slot(9, "a:1")), bitmap(9), bitmap(9, 77), bitmap(0)) == {"a:1": 2}


def test_several_block_sizes_are_matched_separately_and_compared_by_tokens() -> None:
    known = registry(slot(0, "a:1", block_size=16), slot(1, "b:1", block_size=32), slot(2, "c:1", block_size=32))
    runs = {16: runs_of([bitmap(0, 1)] * 3), 32: runs_of([bitmap(0, 1)] * 2)}

    lookup = prefix_lookup(match_table(known), runs)

    assert dict(lookup.matched_blocks) == {"a:1": 3, "b:1": 2}
    assert dict(lookup.block_size) == {"a:1": 16, "b:1": 32, "c:1": 32}


def test_an_endpoint_is_as_good_as_the_worst_of_its_streams() -> None:
    known = Registry(
        version=b"1",
        streams=(stream("a:1"), stream("a:1", rank=1, state=SourceState.DEGRADED, reason="history-truncated")),
        slots=(slot(0, "a:1"), slot(1, "a:1", tier="CPU")),
    )

    assert match_table(known).endpoints == {
        "a:1": EndpointCache(cached_blocks=20, block_size=16, state=SourceState.DEGRADED, reason="history-truncated")
    }


def test_an_empty_registry_matches_nothing() -> None:
    assert prefix_lookup(match_table(Registry(version=b"1")), {}).matched_blocks == {}


def test_the_last_token_of_a_prompt_is_never_a_hit() -> None:
    assert [usable_tokens(bytes(4 * count)) for count in (0, 1, 16, 17)] == [0, 0, 15, 16]
