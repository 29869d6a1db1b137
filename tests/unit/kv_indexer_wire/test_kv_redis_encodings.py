"""Names and encodings in Redis that reader and writer share."""

import hiredis

from kv_indexer.core.index_changes import Clear, IndexChange, Remove, Store
from kv_indexer.core.source import Registry, SlotRecord, SourceState, StreamPosition, StreamRecord
from kv_indexer.wire.redis_keys import PREFIX, change_arguments, engine_field, pack_mget, parse_position, parse_registry


def test_the_handwritten_mget_is_what_a_client_library_writes() -> None:
    keys = [bytes([value]) * 8 for value in range(200)] + [b"\r\n$4\r\nAB"]

    assert pack_mget(b"".join(keys)) == hiredis.pack_command(("MGET", *(PREFIX + b"b:" + key for key in keys)))  # type: ignore[arg-type]


def test_all_keys_share_one_hash_tag() -> None:
    assert PREFIX.count(b"{") == PREFIX.count(b"}") == 1
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
        operations=(
            Store(tier="GPU", group=0, block_size=16, hashes=b"h" * 8, keys=b"k" * 8),
            Clear(),
            Remove(tier="CPU", group=2, hashes=b"r" * 8),
        ),
    )

    assert change_arguments(change) == [
        *(3, -1, 1, "1.1", 5),
        *("S", "GPU", 16, b"", b"h" * 8, b"k" * 8),
        *("C", "", 0, b"", b"", b""),
        *("R", "CPU", 0, b"\2", b"r" * 8, b""),
    ]


def test_a_position_survives_its_way_through_redis_exactly() -> None:
    fields = [b"epoch", b"4", b"last_seq", b"9", b"last_ts", repr(1758.123456789).encode(), b"last_crc", b"77"]

    assert parse_position([*fields, b"degraded", b"x", b"size:GPU", b"16", b"slot:GPU", b"0"]) == StreamPosition(
        epoch=4, last_seq=9, last_ts=1758.123456789, last_crc=77, degraded="x", block_sizes={"GPU": 16}
    )
    assert parse_position([]) is None


def test_slots_that_wait_for_their_sweep_are_not_in_the_registry() -> None:
    record = b'{"endpoint":"a:1","rank":0,"tier":"GPU","epoch":2,"block_size":16,"state":"%s"}'
    stream = [b"a:1", b"0", b"2", b"5", b"1.5", b"live", b""]

    assert parse_registry([b"n", b"7", [b"0", record % b"sweeping", 9, b"1", record % b"live", 4], stream]) == Registry(
        version=b"n.7",
        streams=(
            StreamRecord(
                endpoint="a:1", dp_rank=0, epoch=2, last_seq=5, last_ts=1.5, state=SourceState.LIVE, reason=""
            ),
        ),
        slots=(SlotRecord(slot=1, endpoint="a:1", dp_rank=0, tier="GPU", epoch=2, block_size=16, blocks=4),),
    )


def test_an_empty_redis_is_an_empty_registry() -> None:
    assert parse_registry([None, None, [], []]) == Registry(version=b".0")
