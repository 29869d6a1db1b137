import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from podsim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent
from podsim.wire.kv_events import EventGeneration, encode_batch

VECTORS = {
    vector["name"]: vector
    for vector in json.loads((Path(__file__).parents[2] / "data" / "kv_event_wire_vectors.json").read_text())["vectors"]
}
HASH = (10429158316690216413).to_bytes(32, "big")  # the hash of the vectors
CHILD = (7142137847444424233).to_bytes(32, "big")
ROOT = BlockStored(block_hashes=[HASH], parent_hash=None, token_ids=[0, 1, 2, 3], block_size=4)
REMOVED = BlockRemoved(block_hash=HASH)


def encoded(events: list[CacheEvent], generation: EventGeneration) -> Any:
    return msgspec.msgpack.decode(encode_batch(events, generation=generation, timestamp=1.5))


def test_g5_is_byte_for_byte_the_recorded_map_form() -> None:
    payload = encode_batch([ROOT], generation=EventGeneration.G5, timestamp=1.5)
    assert payload.hex() == VECTORS["g5_map_stored"]["payload_hex"]
    cleared = encode_batch([REMOVED, AllBlocksCleared()], generation=EventGeneration.G5, timestamp=1.5, rank=1)
    assert cleared.hex() == VECTORS["g5_map_removed_then_cleared_dp1"]["payload_hex"]


def test_g1_is_byte_for_byte_the_recorded_arrays_with_signed_hashes() -> None:
    minus_five, seven = (2**64 - 5).to_bytes(32, "big"), (7).to_bytes(32, "big")
    recorded = VECTORS["g1_array_negative_hash"]["msgpack_value"]
    stored = BlockStored(block_hashes=[minus_five, seven], parent_hash=None, token_ids=recorded[1][0][3], block_size=4)
    events: list[CacheEvent] = [stored, BlockRemoved(block_hash=seven), AllBlocksCleared()]
    payload = encode_batch(events, generation=EventGeneration.G1, timestamp=1.5)
    assert payload.hex() == VECTORS["g1_array_negative_hash"]["payload_hex"]


def test_g2_is_byte_for_byte_the_recorded_arrays_with_a_medium() -> None:
    payload = encode_batch([ROOT, REMOVED], generation=EventGeneration.G2, timestamp=1.5)
    assert payload.hex() == VECTORS["g2_array_medium"]["payload_hex"]


@pytest.mark.parametrize(
    ("generation", "name", "kinds"),
    [
        (EventGeneration.G3, "g3_array_lora_name", ["BlockStored", "BlockRemoved"]),
        (EventGeneration.G3B, "g3b_array_extra_keys", ["BlockStored"]),
        (EventGeneration.G4, "g4_array_group_idx", ["BlockStored", "BlockRemoved"]),
        (EventGeneration.G4B, "g4b_array_groups", ["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    ],
)
def test_array_generations_have_the_recorded_lengths_and_field_types(
    generation: EventGeneration, name: str, kinds: list[str]
) -> None:
    recorded = {event[0]: event for event in VECTORS[name]["msgpack_value"][1]}
    ours = encoded([ROOT, REMOVED, AllBlocksCleared()], generation)
    assert (ours[0], ours[2]) == (1.5, 0)
    for event in ours[1]:
        if event[0] not in kinds:
            continue
        theirs = recorded[event[0]]
        assert len(event) == len(theirs)
        for position, (our, their) in enumerate(zip(event, theirs, strict=True)):
            assert our is None or their is None or type(our) is type(their), f"{event[0]} position {position}"


def test_a_child_names_its_parent_by_the_same_number_in_every_generation() -> None:
    child = BlockStored(block_hashes=[CHILD], parent_hash=HASH, token_ids=[4, 5, 6, 7], block_size=4)
    number = 10429158316690216413
    assert encoded([child], EventGeneration.G5)[1][0]["parent_block_hash"] == number
    for generation in set(EventGeneration) - {EventGeneration.G5}:
        parent = encoded([child], generation)[1][0][2]
        assert parent % 2**64 == number
        assert (parent < 0) == (generation is EventGeneration.G1)


def test_a_salt_is_published_untagged_with_the_first_block_only() -> None:
    salted = BlockStored(
        block_hashes=[HASH, CHILD], parent_hash=None, token_ids=list(range(8)), block_size=4, cache_salt="tenant-a"
    )
    assert encoded([salted], EventGeneration.G5)[1][0]["extra_keys"] == [["tenant-a"], None]
    assert encoded([salted], EventGeneration.G3B)[1][0][8] == [["tenant-a"], None]


def test_only_the_newest_generation_replays_with_a_topic_frame() -> None:
    assert [generation for generation in EventGeneration if generation.replay_has_topic] == [EventGeneration.G5]
