"""Random batches of every generation, whole and broken: what is written is read, and nothing that is read does harm."""

import tracemalloc
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_indexer.events.event_fields import Fault
from kv_indexer.events.sequence import is_replay_end, parse_live, parse_replay
from kv_indexer.events.vllm_events import decode_batch
from kvmesh.blocks.events import AllBlocksCleared, EventBatch
from kvmesh.errors import DecodeError
from tests.unit.kv_indexer_events.kv_event_generations import GENERATIONS, batches, pack

quick = settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])

anything = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers(-(2**63), 2**64 - 1)
    | st.text(max_size=5)
    | st.binary(max_size=9)
    | st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
generations = st.sampled_from(sorted(GENERATIONS))


@pytest.mark.parametrize("generation", sorted(GENERATIONS))
@quick
@given(batch=batches)
def test_what_a_generation_writes_is_read(generation: str, batch: EventBatch) -> None:
    write, survives = GENERATIONS[generation]

    assert decode_batch(pack(write(batch))) == survives(batch)


@quick
@given(batch=batches, generation=generations, position=st.integers(0, 5), broken=anything)
def test_one_broken_event_leaves_the_rest_of_its_batch(
    batch: EventBatch, generation: str, position: int, broken: Any
) -> None:
    write, survives = GENERATIONS[generation]
    written = write(batch)
    rows = written["events"] if isinstance(written, dict) else written[1]
    rows.insert(position, broken)
    expected = list(survives(batch).events)

    decoded = decode_batch(pack(written))

    read = list(decoded.events)
    if len(read) > len(expected):
        del read[min(position, len(expected))]  # it was an event after all
    assert (read, len(decoded.events) + sum(decoded.skipped.values())) == (expected, len(rows))


@quick
@given(
    batch=batches,
    generation=generations,
    flips=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=8),
)
def test_no_mutation_raises_anything_but_decode_error(
    batch: EventBatch, generation: str, flips: list[tuple[int, int]]
) -> None:
    payload = bytearray(pack(GENERATIONS[generation][0](batch)))
    for at, value in flips:
        payload[at % len(payload)] = value

    assert_harmless(bytes(payload))


@quick
@given(st.binary(max_size=200) | st.lists(anything, max_size=4).map(lambda rows: pack([1.0, rows, 0])))
def test_no_payload_raises_anything_but_decode_error(payload: bytes) -> None:
    assert_harmless(payload)


def assert_harmless(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except DecodeError:
        return
    assert len(batch.events) + sum(batch.skipped.values()) <= len(payload)
    assert set(batch.skipped) <= set(get_args(Fault))


@quick
@given(st.lists(st.binary(max_size=12) | st.just(b"\xff" * 8), max_size=6))
def test_no_message_raises(parts: list[bytes]) -> None:
    frames = (parse_live(parts), parse_replay(parts))

    assert all(frame is None or frame.payload == parts[-1] for frame in frames)
    assert isinstance(is_replay_end(parts), bool)


@pytest.mark.parametrize(
    "event",
    [
        pack({"type": "BlockStored", "future": [[]] * 100_000}),
        pack(["BlockStored", [1], None, [[[]]] * 100_000, 4]),
        pack(["BlockStored", [[]] * 100_000, None, [], 4]),
        pack(["BlockStored", [1], None, [0], 1, None, None, None, [[[]]] * 1_000_000]),
        b"\x92\xabBlockStored\xdd\xff\xff\xff\xff",  # four thousand million hashes are promised
        b"\x92\xabBlockStored\xdf\xff\xff\xff\xff",
        b"\x92\xabBlockStored\xc6\xff\xff\xff\xff",
    ],
    ids=lambda event: f"{event[:16]!r}",
)
def test_a_payload_does_not_grow_into_a_large_object(event: bytes) -> None:
    payload = b"\x92\xcb\x3f\xf8\0\0\0\0\0\0\x92" + pack(["AllBlocksCleared"]) + event
    tracemalloc.start()
    try:
        decode_batch(payload)
    except DecodeError:
        pass  # what is cut off is no batch
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()

    assert peak < 8 * len(payload) + 100_000


def test_nesting_beyond_reason_is_an_error_and_no_crash() -> None:
    for nested in (b"\x91" * 100_000, b"\x81\xa1a" * 100_000):
        with pytest.raises(DecodeError):
            decode_batch(nested)
        with pytest.raises(DecodeError):
            decode_batch(b"\x92\xcb\x3f\xf8\0\0\0\0\0\0\x92" + pack(["AllBlocksCleared"]) + nested + b"\xc0")


def test_nesting_that_msgpack_can_follow_costs_its_event_alone() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]

    batch = decode_batch(
        pack([1.5, [["AllBlocksCleared"], ["BlockStored", deep, deep, deep, deep], ["AllBlocksCleared"]]])
    )

    assert (batch.events, batch.skipped) == ((AllBlocksCleared(), AllBlocksCleared()), {"bad-block-hash": 1})
