"""What the golden payloads do not show: odd forms, broken events, garbage."""

from typing import Any

import msgspec
import pytest

from kv_indexer.events.vllm_events import MAX_EVENTS, MAX_PAYLOAD_BYTES, decode_batch
from kvmesh.blocks.events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch
from kvmesh.errors import DecodeError

pack = msgspec.msgpack.encode
TOKENS_0_TO_3 = b"\x00\0\0\0\x01\0\0\0\x02\0\0\0\x03\0\0\0"
STORED = BlockStored(block_hashes=(9,), parent_block_hash=None, tokens=TOKENS_0_TO_3, block_size=4)


def decode_events(*events: Any) -> tuple[list[Any], dict[str, int]]:
    batch = decode_batch(pack([1.5, list(events), 0]))
    return list(batch.events), dict(batch.skipped)


@pytest.mark.parametrize(
    "batch", [[1.5, []], [1.5, [], None], [1.5, [], 0, "future"], {"ts": 1.5, "events": []}, [1, []]]
)
def test_a_batch_may_have_two_or_more_elements_or_be_a_map(batch: Any) -> None:
    decoded = decode_batch(pack(batch))

    assert (decoded.ts, decoded.events) == (float(decoded.ts), ())


def test_a_map_batch_keeps_its_rank() -> None:
    assert decode_batch(pack({"data_parallel_rank": 3, "ts": 2.0, "events": [["AllBlocksCleared"]]})) == decode_batch(
        pack([2.0, [["AllBlocksCleared"]], 3])
    )


@pytest.mark.parametrize("length", [5, 6, 7, 12, 14])
def test_missing_trailing_fields_have_defaults_and_further_ones_are_ignored(length: int) -> None:
    event = ["BlockStored", [9], None, [0, 1, 2, 3], 4, *[None] * 7, "future", 1][:length]

    assert decode_events(event) == ([STORED], {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [(42, 42), (-5, 2**64 - 5), (b"\0\0\0\0\0\0\x30\x39", 12345), (b"\xaa" * 24 + b"\0" * 7 + b"\x07", 7)],
)
def test_hashes_are_unsigned_64_bit_whatever_their_form(value: int | bytes, expected: int) -> None:
    assert decode_events(["BlockRemoved", [value]]) == ([BlockRemoved(block_hashes=(expected,))], {})


def test_parent_zero_means_none() -> None:
    assert decode_events(["BlockStored", [9], 0, [0, 1, 2, 3], 4]) == ([STORED], {})


@pytest.mark.parametrize(
    ("medium", "expected"), [(None, "GPU"), ("", "GPU"), ("cpu", "CPU"), ("STORAGE", "STORAGE"), ("New", "NEW")]
)
def test_the_medium_is_upper_case_and_gpu_by_default(medium: str | None, expected: str) -> None:
    assert decode_events(["BlockRemoved", [1], medium]) == ([BlockRemoved(block_hashes=(1,), medium=expected)], {})


def test_sglang_names_the_salt_in_the_place_of_the_adapter() -> None:
    events, skipped = decode_events(["BlockStored", [9], None, [0, 1, 2, 3], 4, None, "GPU", {"cache_salt": "x"}])

    assert (events, skipped) == ([msgspec.structs.replace(STORED, cache_salt="x")], {})


def test_sglang_may_name_a_session_beside_the_salt_and_anything_else() -> None:
    metadata = {"cache_salt": "x", "session_id": "s", "future": [1]}

    assert decode_events(["BlockStored", [9], None, [0, 1, 2, 3], 4, None, "GPU", metadata]) == (
        [msgspec.structs.replace(STORED, cache_salt="x", session_id="s")],
        {},
    )


def test_sglang_map_events_name_salt_and_session_themselves() -> None:
    assert decode_events(stored(cache_salt="x", session_id="s")) == (
        [msgspec.structs.replace(STORED, cache_salt="x", session_id="s")],
        {},
    )


def test_a_session_that_is_no_text_is_left_out() -> None:
    assert decode_events(stored(session_id=7)) == ([STORED], {})


def test_eagle_pairs_are_read_by_their_first_token() -> None:
    pairs = [[0, 1], [1, 2], [2, 3], [3, 900]]

    assert decode_events(["BlockStored", [9], None, pairs, 4, None, "GPU"]) == ([STORED], {})


def test_an_adapter_known_by_number_alone_gets_a_name_that_no_request_has() -> None:
    named = msgspec.structs.replace(STORED, lora_id=3, lora_name="\0lora-id:3")

    assert decode_events(["BlockStored", [9], None, [0, 1, 2, 3], 4, 3]) == ([named], {})
    assert decode_events(["BlockStored", [9], None, [0, 1, 2, 3], 4, 0]) == (
        [msgspec.structs.replace(STORED, lora_id=0)],  # numbers begin at 1
        {},
    )


def test_multimodal_items_of_trt_llm_are_folded_into_the_first_block_of_the_event() -> None:
    items = [
        {"type": "mm_key", "hash": "ab12", "start_offset": 3, "uuid": None},
        {"type": "mm_key", "hash": "cd34", "start_offset": 0, "uuid": "cat"},
    ]
    event = stored(block_hashes=[9, 10], token_ids=list(range(4)) * 2, mm_keys=items)

    assert decode_events(event) == (
        [
            msgspec.structs.replace(
                STORED,
                block_hashes=(9, 10),
                tokens=TOKENS_0_TO_3 * 2,
                extra_keys=((("ab12", 3), ("cat", 0)), None),
            )
        ],
        {},
    )
    assert decode_events(stored(mm_keys=[])) == ([STORED], {})


def test_token_ids_may_be_written_as_strings() -> None:
    assert decode_events(["BlockStored", [9], None, ["0", "1", "2", "3"], 4]) == ([STORED], {})


def stored(**changes: Any) -> dict[str, Any]:
    plain = {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": None, "token_ids": [0, 1, 2, 3]}
    return {**plain, "block_size": 4, **changes}


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "SomethingNew"}, "unknown-event-type"),
        (["SomethingNew", 1], "unknown-event-type"),
        ({"block_hashes": [1]}, "event-without-type"),
        ({"type": 7}, "event-without-type"),
        ([], "event-without-type"),
        ("AllBlocksCleared", "event-without-type"),
        (["BlockStored", [9], None, [0]], "too-few-fields"),
        (["BlockRemoved"], "too-few-fields"),
        (stored(block_hashes=[b""]), "bad-block-hash"),
        (stored(block_hashes=["not a hash"]), "bad-block-hash"),
        (stored(block_hashes=[True]), "bad-block-hash"),
        (stored(block_hashes=None), "bad-block-hash"),
        (stored(parent_block_hash=1.5), "bad-block-hash"),
        (stored(token_ids=[[0, 1], [2, 3]]), "bad-token-ids"),  # pairs, but not of neighbours
        (stored(token_ids=[[0, 1, 2]]), "bad-token-ids"),
        (stored(token_ids=[[-1, 0]]), "bad-token-ids"),
        (stored(token_ids=[0, [1, 2]]), "bad-token-ids"),
        (stored(token_ids=[1.0]), "bad-token-ids"),
        (stored(token_ids="0123"), "bad-token-ids"),
        (stored(token_ids=[-1]), "bad-token-ids"),
        (stored(token_ids=[1 << 32]), "bad-token-ids"),
        (stored(token_ids=["x"]), "bad-token-ids"),
        (stored(token_ids=None), "bad-token-ids"),
        (stored(block_size=-1), "bad-block-size"),
        (stored(block_size="4"), "bad-block-size"),
        (stored(medium=5), "bad-medium"),
        (stored(medium="x" * 1000), "bad-medium"),
        (stored(lora_name=5), "bad-lora"),
        (stored(lora_id="ad"), "bad-lora"),
        (stored(cache_salt=5), "bad-cache-salt"),
        (stored(locality=5), "bad-locality"),
        (stored(ownership=["fs-0"]), "bad-ownership"),
        (stored(mm_keys="image"), "bad-mm-keys"),
        (stored(mm_keys=[{"type": "mm_key"}]), "bad-mm-keys"),
        (stored(mm_keys=[{"hash": "a", "start_offset": "x"}]), "bad-mm-keys"),
        (stored(extra_keys=[["x" * (1 << 20)]]), "bad-extra-keys"),
        (stored(extra_keys=7), "bad-extra-keys"),
        (stored(extra_keys=[7]), "bad-extra-keys"),
        (stored(group_idx=-1), "bad-group"),
        (stored(group_idx=True), "bad-group"),
        (stored(kv_cache_spec_kind=123), "bad-kind"),
        (stored(kv_cache_spec_kind="x" * 1000), "bad-kind"),
        (stored(kv_cache_spec_sliding_window="wide"), "bad-window"),
    ],
)
def test_an_event_that_cannot_be_read_is_skipped_and_counted_and_its_batch_kept(event: Any, reason: str) -> None:
    assert decode_events(stored(), event, ["AllBlocksCleared"]) == ([STORED, AllBlocksCleared()], {reason: 1})


BROKEN_TEXT = b"\xa2\xff\xfe"


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xa6medium" + BROKEN_TEXT, "bad-medium"),
        (b"\x82\xa4type" + BROKEN_TEXT + b"\xa6medium\xc0", "event-without-type"),
        (b"\x81" + BROKEN_TEXT + b"\x00", "undecodable-event"),  # not even the names of its fields
    ],
)
def test_an_event_with_broken_text_does_not_take_its_batch_along(event: bytes, reason: str) -> None:
    payload = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x92" + event + pack(["AllBlocksCleared"]) + b"\x00"

    batch = decode_batch(payload)

    assert (batch.events, batch.skipped) == ((AllBlocksCleared(),), {reason: 1})


def test_a_field_that_nobody_reads_may_hold_anything() -> None:
    removed = b"\x83\xa4type\xacBlockRemoved\xacblock_hashes\x91\x01\xa6future" + BROKEN_TEXT
    payload = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x91" + removed + b"\x00"

    assert decode_batch(payload).events == (BlockRemoved(block_hashes=(1,)),)


@pytest.mark.parametrize("rank", [-1, "one", 1.5, [0], True])
def test_a_rank_that_is_none_is_left_out(rank: Any) -> None:
    assert decode_batch(pack([1.5, [["AllBlocksCleared"]], rank])) == EventBatch(ts=1.5, events=(AllBlocksCleared(),))


@pytest.mark.thorough
def test_a_batch_of_a_hundred_thousand_events_is_read_in_order() -> None:
    batch = decode_batch(pack([1.5, [["BlockRemoved", [number]] for number in range(100_000)], 0]))

    assert [event.block_hashes for event in batch.events if isinstance(event, BlockRemoved)] == [
        (number,) for number in range(100_000)
    ]


def test_a_payload_up_to_the_limit_is_read_and_a_longer_one_refused() -> None:
    room = MAX_PAYLOAD_BYTES - len(pack([1.5, [], None, bytes(1 << 16)])) + (1 << 16)

    assert decode_batch(pack([1.5, [], None, bytes(room)])) == EventBatch(ts=1.5, events=())
    with pytest.raises(DecodeError, match="are not read"):
        decode_batch(pack([1.5, [], None, bytes(room + 1)]))


def test_a_batch_of_more_events_than_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(DecodeError, match=str(MAX_EVENTS)):
        decode_batch(b"\x92\xcb\x3f\xf8\0\0\0\0\0\0\xdd" + (MAX_EVENTS + 1).to_bytes(4, "big") + bytes(MAX_EVENTS + 1))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"garbage",
        pack(7),
        pack([]),
        pack([1.5]),
        pack(["now", []]),
        pack([1.5, 7, 0]),
        pack({"ts": 1.0}),
        pack([float("nan"), []]),
        pack([float("inf"), []]),
        b"\x91" * 100_000,
    ],
    ids=lambda payload: repr(payload[:12]),
)
def test_garbage_raises_decode_error(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_batch(payload)
