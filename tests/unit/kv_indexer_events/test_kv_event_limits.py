"""Where the limits of an event's fields are, and the forms that no golden payload has: each side of each limit."""

from typing import Any

import msgspec
import pytest

from kv_indexer.events.event_fields import FEATURES_LIMIT, NAME_LIMIT
from kv_indexer.events.vllm_events import decode_batch
from kvmesh.blocks.block_keys import held_digest, held_name
from kvmesh.blocks.events import AllBlocksCleared, BlockStored

pack = msgspec.msgpack.encode
STORED = BlockStored(block_hashes=(9,), parent_block_hash=None, tokens=b"\x07\0\0\0", block_size=1)
LONGEST_NAME = "X" * NAME_LIMIT
LONGEST_KEY = "x" * (FEATURES_LIMIT - 7)  # two bytes around it for the lists, five for its own length


def stored(**changes: Any) -> dict[str, Any]:
    plain = {"type": "BlockStored", "block_hashes": [9], "parent_block_hash": None, "token_ids": [7], "block_size": 1}
    return {**plain, **changes}


def decode_one(event: Any) -> Any:
    """The event, or the reason why there is none."""
    batch = decode_batch(pack([1.5, [event], 0]))
    return batch.events[0] if batch.events else next(iter(batch.skipped))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (stored(block_size=2**32 - 1), {"block_size": 2**32 - 1}),
        (stored(block_size=0), {"block_size": 0}),
        (stored(token_ids=[2**32 - 1]), {"tokens": b"\xff" * 4}),
        (stored(medium=LONGEST_NAME), {"medium": LONGEST_NAME}),
        (stored(extra_keys=[[LONGEST_KEY]]), {"extra_keys": ((held_name(LONGEST_KEY),),)}),
        (stored(mm_keys=[{"hash": "a"}]), {"extra_keys": ((("a", 0),),)}),
        (stored(mm_keys=[{"hash": "a", "start_offset": 2**63 - 1}]), {"extra_keys": ((("a", 2**63 - 1),),)}),
    ],
)
def test_what_reaches_a_limit_is_read(event: Any, expected: dict[str, Any]) -> None:
    assert decode_one(event) == msgspec.structs.replace(STORED, **expected)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored(block_size=2**32), "bad-block-size"),
        (stored(medium=LONGEST_NAME + "X"), "bad-medium"),
        (stored(extra_keys=[[LONGEST_KEY + "x"]]), "bad-extra-keys"),
        (stored(mm_keys=[{"hash": "a", "start_offset": 2**63}]), "bad-mm-keys"),
        (stored(block_hashes=[], token_ids=[], mm_keys=[{"hash": "a"}]), "bad-mm-keys"),  # no block to fold it into
    ],
)
def test_what_exceeds_a_limit_costs_its_event(event: Any, reason: str) -> None:
    assert decode_one(event) == reason


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([None, ["a"]], (None, ("a",))),
        (["a", b"b"], (("a",), (b"b",))),
        ([["a", ["image", 3]], None], (("a", ("image", 3)), None)),
    ],
)
def test_the_extra_keys_of_a_block_are_a_list_or_one_text_or_nothing(entries: Any, expected: Any) -> None:
    event = stored(block_hashes=[9, 10], token_ids=[7, 7], extra_keys=entries)

    assert decode_one(event) == msgspec.structs.replace(
        STORED, block_hashes=(9, 10), tokens=STORED.tokens * 2, extra_keys=expected
    )


def test_a_map_is_known_by_each_of_its_three_spellings() -> None:
    further = {f"future_{number}": number for number in range(16)}
    fields = pack(stored())[1:]  # without the byte that says how many
    long = msgspec.Raw(b"\xdf\0\0\0\x05" + fields)  # as a writer may that does not know the number in advance

    assert [decode_one(event) for event in (stored(), stored(**further), long)] == [STORED] * 3


@pytest.mark.parametrize("size", [0, 1, 15, 16])
def test_sglangs_metadata_may_say_nothing_that_concerns_us(size: int) -> None:
    metadata = {f"future_{number}": number for number in range(size)}

    assert decode_one(["BlockStored", [9], None, [7], 1, None, None, metadata]) == STORED


def test_a_map_that_says_that_all_is_cleared_needs_no_further_field() -> None:
    assert decode_one({"type": "AllBlocksCleared"}) == AllBlocksCleared()


def test_nothing_long_that_a_pod_chose_is_held() -> None:
    name, digest = "n" * 300_000, b"d" * 300_000
    plain = stored(lora_name=name, cache_salt=name, session_id=name, extra_keys=[[name, [name, 1], digest]])
    event = decode_one(plain)

    short = held_name(name)
    assert (event.lora_name, event.cache_salt, event.session_id) == (short, short, short)
    assert event.extra_keys == ((short, (short, 1), held_digest(digest)),)
    assert decode_one(stored(mm_keys=[{"hash": name}])).extra_keys == (((short, 0),),)
