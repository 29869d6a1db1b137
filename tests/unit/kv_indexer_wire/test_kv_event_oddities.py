"""What the golden payloads do not show: odd forms, broken events, garbage."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_indexer.core.events import AllBlocksCleared, BlockRemoved, BlockStored
from kv_indexer.errors import DecodeError
from kv_indexer.wire.vllm_events import decode_batch

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
        (stored(token_ids=[[0, 1]]), "bad-token-ids"),  # SGLang EAGLE pairs
        (stored(token_ids=[-1]), "bad-token-ids"),
        (stored(token_ids=[1 << 32]), "bad-token-ids"),
        (stored(token_ids=["x"]), "bad-token-ids"),
        (stored(token_ids=None), "bad-token-ids"),
        (stored(block_size=-1), "bad-block-size"),
        (stored(block_size="4"), "bad-block-size"),
        (stored(medium=5), "bad-medium"),
        (stored(lora_name=5), "bad-lora"),
        (stored(extra_keys=7), "bad-extra-keys"),
        (stored(extra_keys=[7]), "bad-extra-keys"),
        (stored(group_idx=-1), "bad-group"),
        (stored(kv_cache_spec_kind=123), "bad-kind"),
        (stored(kv_cache_spec_sliding_window="wide"), "bad-window"),
    ],
)
def test_an_event_that_cannot_be_read_is_skipped_and_counted_and_its_batch_kept(event: Any, reason: str) -> None:
    assert decode_events(stored(), event, ["AllBlocksCleared"]) == ([STORED, AllBlocksCleared()], {reason: 1})


def test_an_event_with_broken_text_does_not_take_its_batch_along() -> None:
    broken = b"\x82\xa4type\xacBlockRemoved\xa6medium\xa2\xff\xfe"
    payload = b"\x93\xcb\x3f\xf8\0\0\0\0\0\0\x92" + broken + pack(["AllBlocksCleared"]) + b"\x00"

    batch = decode_batch(payload)

    assert (batch.events, batch.skipped) == ((AllBlocksCleared(),), {"undecodable-event": 1})


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


@settings(max_examples=150, deadline=None)
@given(
    st.binary(max_size=200)
    | st.builds(
        lambda events: pack([1.0, events, 0]),
        st.lists(
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers(-(2**63), 2**64 - 1)
                | st.text(max_size=5)
                | st.binary(max_size=9)
                | st.sampled_from(["BlockStored", "BlockRemoved"]),
                lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
                max_leaves=12,
            ),
            max_size=4,
        ),
    )
)
def test_no_payload_raises_anything_but_decode_error(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except DecodeError:
        return
    assert len(batch.events) + sum(batch.skipped.values()) <= len(payload)
