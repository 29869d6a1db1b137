"""What is read in one pass is what is read field by field; and what is unusual is left to that."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_indexer.events.plain_batches import PLAIN_BYTES, read_plain_batch
from kv_indexer.events.vllm_events import decode_any_batch
from kvmesh.blocks.events import BlockStored, EventBatch
from kvmesh.errors import DecodeError
from tests.unit.kv_indexer_events.kv_event_generations import GENERATIONS, batches, pack

quick = settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
generations = st.sampled_from(sorted(GENERATIONS))
ROW: list[Any] = ["BlockStored", [9, 2**64 - 1], 8, [7, 300, 70_000, 2**32 - 1], 2, None, "gpu", None]
MAP = {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": None, "token_ids": [7], "block_size": 1}
NO_UTF8 = ({"undecodable-event": 1}, {"bad-lora": 1})  # in the event's map; in SGLang's
values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers(-9, 2**64 - 1) | st.text(max_size=3) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


def is_read_alike(payload: bytes) -> bool:
    """Whether it is read in one pass, to the same as field by field."""
    plain = read_plain_batch(payload)
    if plain is None:
        return False
    ts, events, rank = plain
    expected = decode_any_batch(payload)
    if expected.skipped in NO_UTF8:  # the name of an unknown field, which costs nothing here
        return True
    batch = EventBatch(ts=ts, events=tuple(events), data_parallel_rank=rank)
    assert repr(batch) == repr(expected)  # what is not a number is unequal to itself
    return True


@quick
@given(batch=batches, generation=generations)
def test_what_a_generation_writes_is_read_alike(batch: EventBatch, generation: str) -> None:
    is_read_alike(pack(GENERATIONS[generation][0](batch)))


@quick
@given(batch=batches, generation=generations, data=st.data())
def test_a_batch_with_a_broken_byte_is_read_alike_or_not_at_all(
    batch: EventBatch, generation: str, data: st.DataObject
) -> None:
    payload = bytearray(pack(GENERATIONS[generation][0](batch)))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode_any_batch(bytes(payload))
    except DecodeError:
        assert read_plain_batch(bytes(payload)) is None
    else:
        is_read_alike(bytes(payload))


@quick
@given(position=st.integers(1, 12), value=values)
def test_a_field_of_an_array_may_hold_anything(position: int, value: Any) -> None:
    row = [*ROW, None, None, None, None, None]
    row[position] = value
    is_read_alike(pack([1.5, [ROW, row], 0]))


@quick
@given(
    name=st.sampled_from([*MAP, "medium", "lora_id", "lora_name", "extra_keys", "mm_keys", "locality"]), value=values
)
def test_a_field_of_a_map_may_hold_anything(name: str, value: Any) -> None:
    is_read_alike(pack([1.5, [MAP, {**MAP, name: value}], 0]))


@pytest.mark.parametrize(
    "events",
    [
        [],
        [ROW, ["BlockRemoved", [9], "GPU"], ["AllBlocksCleared"], [*ROW, None, 0, "full_attention", None, "of later"]],
        [MAP, {"type": "BlockRemoved", "block_hashes": [9], "of later": [{}]}, {"type": "AllBlocksCleared"}],
        [ROW] * 20,
        [MAP] * 20,
        [[*ROW[:7], {"cache_salt": "a", "session_id": "b", "of later": 1}]],  # SGLang
        [{**MAP, "lora_id": 3, "lora_name": "adapter", "extra_keys": [["adapter", ["image", 3], b"digest"]]}],
        [{**MAP, "extra_keys": [[]]}, {**MAP, "lora_id": 3}, {**MAP, "parent_block_hash": 0}],
    ],
)
def test_the_usual_forms_are_read_in_one_pass(events: list[Any]) -> None:
    assert is_read_alike(pack([1.5, events, 0]))


@pytest.mark.parametrize(
    "batch",
    [
        {"ts": 1.5, "events": [MAP]},
        [1, [MAP]],  # the time as an integer
        [float("nan"), [MAP]],
        [1.5, [MAP, ROW]],  # two forms
        [1.5, [MAP, ["BlockStored"]]],
        [1.5, [MAP], "no rank"],
        [1.5, [{**MAP, "token_ids": [2**32]}]],
        [1.5, [{**MAP, "token_ids": ["7"]}]],
        [1.5, [{**MAP, "block_hashes": [b"\x09"]}]],
        [1.5, [{**MAP, "block_hashes": [-9]}]],
        [1.5, [{**MAP, "mm_keys": [{"hash": "a"}]}]],
        [1.5, [{**MAP, "lora_name": {"cache_salt": "a"}, "cache_salt": "b"}]],
        [1.5, [{**MAP, "medium": "X" * 257}]],
        [1.5, [{**MAP, "extra_keys": [7]}]],
        [1.5, [{"type": "BlockMoved"}]],
        [1.5, [], 0, bytes(PLAIN_BYTES)],
    ],
)
def test_what_is_unusual_is_left_to_the_reader_of_anything(batch: Any) -> None:
    assert read_plain_batch(pack(batch)) is None


@pytest.mark.parametrize("payload", [b"", b"\x93", pack([1.5]), pack([1.5, []])[:-1], pack([1.5, [ROW]])[:12]])
def test_what_is_cut_off_is_left_to_the_reader_of_anything(payload: bytes) -> None:
    assert read_plain_batch(payload) is None


def test_an_unknown_field_costs_nothing_whatever_its_name() -> None:
    fields = pack({**MAP, "X": 1}).replace(b"\xa1X", b"\xa1\xff")

    plain = read_plain_batch(b"\x92\xcb\x3f\xf8\0\0\0\0\0\0\x91" + fields)

    assert plain == (
        1.5,
        [BlockStored(block_hashes=(9,), parent_block_hash=None, tokens=b"\x07\0\0\0", block_size=1)],
        None,
    )
