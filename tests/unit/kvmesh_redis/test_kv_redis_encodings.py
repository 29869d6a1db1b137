"""Names and encodings in Redis that reader and writer share."""

from typing import Any

import hiredis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from kvmesh.blocks.cache_groups import CacheGroup
from kvmesh.blocks.index_changes import Clear, IndexChange, Remove, Store
from kvmesh.blocks.source import Claim, Registry, SlotRecord, SourceState, Stream, StreamPosition, StreamRecord
from kvmesh.index.prefix_match import match_table
from kvmesh.redis.keys import (
    KEY_SLOT,
    PREFIX,
    change_arguments,
    engine_field,
    pack_mget,
    parse_position,
    parse_registry,
)

CLAIM = Claim(stream=Stream(endpoint="10.0.0.1:8000", dp_rank=0), fence=7)


def test_the_handwritten_mget_is_what_a_client_library_writes() -> None:
    keys = [bytes([value]) * 8 for value in range(200)] + [b"\r\n$4\r\nAB"]

    assert pack_mget(b"".join(keys)) == hiredis.pack_command(("MGET", *(PREFIX + b"b" + key for key in keys)))  # type: ignore[arg-type]


def test_all_keys_share_one_hash_tag() -> None:
    assert PREFIX.count(b"{") == PREFIX.count(b"}") == 1


def test_the_slot_of_all_keys_is_what_a_client_library_computes() -> None:
    assert key_slot(PREFIX + b"registry") == KEY_SLOT
    assert PREFIX.index(b"{") + 1 < PREFIX.index(b"}")  # an empty tag would not count


def test_group_zero_costs_no_byte() -> None:
    assert (engine_field(1, 0), engine_field(1, 3)) == (b"\0\0\0\0\0\0\0\1", b"\0\0\0\0\0\0\0\1\3")


def test_a_change_becomes_script_arguments_in_order() -> None:
    change = IndexChange(
        epoch=3,
        previous_seq=-1,
        last_seq=1,
        last_ts=1.1,
        last_crc=5,
        events=4,
        degraded="undecodable-event",
        operations=(
            Store(tier="GPU", group=0, block_size=16, hashes=b"h" * 8, keys=b"k" * 8),
            Clear(),
            Remove(tier="CPU", group=2, hashes=b"r" * 8),
            Store(tier="CPU", group=2, block_size=16, hashes=b"h" * 8, keys=b"k" * 8, set_only=True),
        ),
    )

    assert change_arguments(CLAIM, change) == [
        *(CLAIM.stream.name, 7, 3, -1, 1, "1.1", 5, 4, b"", "undecodable-event", 0, 0),
        *("S", "GPU", 16, b"", b"h" * 8, b"k" * 8),
        *("C", "", 0, b"", b"", b""),
        *("R", "CPU", 0, b"\2", b"r" * 8, b""),
        *("F", "CPU", 16, b"\2", b"h" * 8, b"k" * 8),
    ]


def test_a_catalogue_of_groups_survives_its_way_through_redis() -> None:
    groups = {0: CacheGroup(kind="full_attention", block_size=16), 3: CacheGroup(kind=None, block_size=8)}
    change = IndexChange(epoch=1, previous_seq=-1, last_seq=0, last_ts=1.0, last_crc=0, groups=groups)
    written = change_arguments(CLAIM, change)[8]
    fields = [text.encode() for pair in POSITION.items() for text in pair]

    position = parse_position([*fields, b"groups", written, b"started_at", b"1758.5"])
    assert position is not None
    assert (position.groups, position.started_at) == (groups, 1758.5)


def test_a_position_survives_its_way_through_redis_exactly() -> None:
    fields = [b"epoch", b"4", b"last_seq", b"9", b"last_ts", repr(1758.123456789).encode(), b"last_crc", b"77"]

    assert parse_position([*fields, b"degraded", b"x", b"size:GPU", b"16", b"slot:GPU", b"0"]) == StreamPosition(
        epoch=4, last_seq=9, last_ts=1758.123456789, last_crc=77, degraded="x", block_sizes={"GPU": 16}
    )
    shown = parse_position([*fields, b"degraded", b"x", b"state", b"lost", b"reason", b"unreachable"])
    assert shown is not None
    assert (shown.state, shown.reason) == (SourceState.LOST, "unreachable")
    strange = parse_position([*fields, b"degraded", b"x", b"state", b"paused"])
    assert strange is not None
    assert (strange.state, strange.reason) == (None, "")
    assert parse_position([]) is None


POSITION = {"epoch": "4", "last_seq": "9", "last_ts": "1.5", "last_crc": "", "degraded": ""}


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"epoch": "new"}, "invalid literal"),
        ({"last_ts": "nan"}, "a time of nan"),
        ({"size:GPU": "x"}, "invalid literal"),
        ({"groups": "{"}, "groups: "),
        ({"groups": '{"x": 1}'}, "groups: "),
        ({"started_at": "inf"}, "a time of inf"),
        ({"degraded": None}, "no degraded"),
        (dict.fromkeys(POSITION, None) | {"foo": "bar"}, "no epoch, last_seq, last_ts, last_crc, degraded"),
    ],
)
def test_a_position_that_someone_else_wrote_is_a_value_error_that_says_why(
    changes: dict[str, str | None], why: str
) -> None:
    fields = {name: value for name, value in {**POSITION, **changes}.items() if value is not None}

    with pytest.raises(ValueError, match=why):
        parse_position([text.encode() for pair in fields.items() for text in pair])


def test_slots_that_wait_for_their_sweep_are_not_in_the_registry() -> None:
    slots = [b"0", slot_json(state="sweeping"), 9, b"1", slot_json(), 4]

    assert parse_registry([b"n", b"7", 1, slots, STREAM]) == Registry(
        version=b"n.7", streams=(STREAM_RECORD,), slots=(SLOT_RECORD,), indexer_alive=True
    )


def test_the_slot_of_a_group_has_a_state_that_readers_of_before_do_not_believe() -> None:
    slot = slot_json(tier="GPU/mamba/16", state="group")
    assert parse_registry([b"n", b"7", 1, [b"1", slot, 4], STREAM]).slots == (
        SlotRecord(slot=1, endpoint="a:1", dp_rank=0, tier="GPU/mamba/16", epoch=2, block_size=16, blocks=4),
    )


def test_an_empty_redis_is_an_empty_registry() -> None:
    assert parse_registry([None, None, 0, [], []]) == Registry(version=b".0")


def slot_json(**changes: Any) -> bytes:
    fields = {"endpoint": "a:1", "rank": 0, "tier": "GPU", "epoch": 2, "block_size": 16, "state": "live", **changes}
    return msgspec.json.encode(fields)


LEASE: list[Any] = [b"indexer-1", b"1763726400123", b"1763726401.500", b"77", 1]
STREAM: list[Any] = [b"a:1#0", b"a:1", b"0", b"2", b"5", b"1.5", b"live", b"", *LEASE]
STREAM_RECORD = StreamRecord(
    endpoint="a:1",
    dp_rank=0,
    epoch=2,
    last_seq=5,
    last_ts=1.5,
    state=SourceState.LIVE,
    reason="",
    owner="indexer-1",
    fence=1763726400123,
    applied_at=1763726401.5,
    events=77,
)
SLOT_RECORD = SlotRecord(slot=1, endpoint="a:1", dp_rank=0, tier="GPU", epoch=2, block_size=16, blocks=4)


@pytest.mark.parametrize(
    ("slot", "why"),
    [
        ([b"7", b"garbage", 1], "slot 7: JSON is malformed: invalid character (byte 0)"),
        ([b"7", b"5", 1], "slot 7: Expected `object`, got `int`"),
        ([b"7", b"[" * 100_000, 1], "slot 7: "),
        ([b"7", slot_json(epoch="x"), 1], "slot 7: Expected `int`, got `str` - at `$.epoch`"),
        ([b"7", slot_json(state="paused"), 1], "slot 7: unknown state 'paused'"),
        ([b"7", slot_json(tier="GPU/mamba/16"), 1], "slot 7: unknown state 'live'"),  # of no version
        ([b"7", slot_json(state="group"), 1], "slot 7: unknown state 'group'"),
        ([b"7", slot_json(tier="GPU/later/16", state="group"), 1], "slot 7: tier 'GPU/later/16': no rule is known"),
        ([b"7", slot_json(tier="GPU/mamba/8", state="group"), 1], "slot 7: another block size than its group's"),
        ([b"7", slot_json(block_size=0), 1], "slot 7: a block size of 0"),
        ([b"7", slot_json(), -1], "slot 7: its blocks are not a hash"),
        ([b"-1", slot_json(), 1], "slot -1: not a number from 0 to 4095"),
        ([b"9999999999", slot_json(), 1], "slot 9999999999: not a number from 0 to 4095"),
        ([b"01", slot_json(), 1], "slot 01: not a number from 0 to 4095"),
        ([b"\xff", slot_json(), 1], "slot \\xff: "),
        ([b"7", slot_json(endpoint="b:1"), 1], "slot 7: belongs to no readable stream's epoch"),
        ([b"7", slot_json(epoch=1), 1], "slot 7: belongs to no readable stream's epoch"),
    ],
)
def test_a_slot_that_someone_else_wrote_is_named_and_the_others_are_believed(slot: list[Any], why: str) -> None:
    registry = parse_registry([b"n", b"7", 0, [*slot, b"1", slot_json(), 4], STREAM])

    assert (registry.streams, registry.slots, len(registry.unreadable)) == ((STREAM_RECORD,), (SLOT_RECORD,), 1)
    assert registry.unreadable[0].startswith(why)


NAME = b"b:1#0"
LACKS = "stream b:1#0: is missing, no hash, or lacks fields"


@pytest.mark.parametrize(
    ("name", "fields", "why"),
    [
        (NAME, [None] * 12, LACKS),
        (
            NAME,
            [b"b:1", b"0", b"2", None, b"1.5", b"live", b"", *LEASE],
            LACKS,
        ),
        (NAME, [b"b:1", b"0", b"x", b"5", b"1.5", b"live", b"", *LEASE], "stream b:1#0: invalid literal"),
        (NAME, [b"b:1", b"0", b"2", b"5", b"nan", b"live", b"", *LEASE], "stream b:1#0: a time of nan"),
        (NAME, [b"\xff", b"0", b"2", b"5", b"1.5", b"live", b"", *LEASE], "stream b:1#0: 'utf-8' codec"),
        (b"other", [b"a:1", b"0", b"2", b"5", b"1.5", b"live", b"", *LEASE], "stream other: describes a:1#0"),
    ],
)
def test_a_stream_that_someone_else_wrote_takes_its_slots_along_and_nothing_else(
    name: bytes, fields: list[bytes | None], why: str
) -> None:
    slots = [b"3", slot_json(endpoint="b:1"), 1, b"1", slot_json(), 4]
    registry = parse_registry([b"n", b"7", 0, slots, [name, *fields, *STREAM]])

    assert (registry.streams, registry.slots, len(registry.unreadable)) == ((STREAM_RECORD,), (SLOT_RECORD,), 2)
    assert registry.unreadable[0].startswith(why)


@pytest.mark.parametrize("state", [b"paused", b"", b"\xff"])
def test_an_unknown_state_reads_as_degraded(state: bytes) -> None:
    stream = [*STREAM[:6], state, b"for maintenance", *LEASE]
    registry = parse_registry([b"n", b"7", 0, [b"1", slot_json(), 4], stream])

    assert [(line.state, line.reason, line.cached_blocks) for line in registry.sources()] == [
        (SourceState.DEGRADED, "unknown-state", 4)
    ]
    assert registry.unreadable == ()


ANYTHING = st.one_of(st.binary(max_size=12), st.sampled_from([b"a:1", b"0", b"live", b"1e999", b"{}", slot_json()]))


@pytest.mark.thorough
@given(
    slots=st.lists(st.tuples(ANYTHING, ANYTHING, st.integers(-1, 9)), max_size=4),
    streams=st.lists(st.tuples(ANYTHING, *[st.none() | ANYTHING] * 11, st.integers(0, 1)), max_size=4),
)
def test_no_content_of_redis_keeps_the_rest_from_being_read(
    slots: list[tuple[Any, ...]], streams: list[tuple[Any, ...]]
) -> None:
    flat_slots = [field for slot in slots for field in slot] + [b"1", slot_json(), 4]
    registry = parse_registry([b"n", b"7", 0, flat_slots, [field for stream in streams for field in stream] + STREAM])

    assert STREAM_RECORD in registry.streams
    assert SLOT_RECORD in registry.slots
    assert match_table(registry).masks


def test_a_stream_whose_lease_has_run_out_has_no_owner() -> None:
    registry = parse_registry([b"n", b"7", 0, [], [*STREAM[:-1], 0]])

    assert [stream.owner for stream in registry.streams] == [""]


def test_a_stream_that_lacks_what_is_only_shown_is_believed() -> None:
    registry = parse_registry([b"n", b"7", 0, [], [*STREAM[:8], None, None, None, None, 0]])

    (stream,) = registry.streams
    assert (stream.owner, stream.fence, stream.applied_at, stream.events) == ("", 0, 0.0, 0)
