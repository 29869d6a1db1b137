"""What must hold between the records of slots and streams."""

import json
from typing import Any

import pytest

from kv_indexer.inspect.index_audit import (
    KINDS,
    Difference,
    Differences,
    SlotOwner,
    holds_several_groups,
    judge_records,
    read_owner,
)

A = SlotOwner(stream="10.0.0.1:8000#0", tier="GPU", epoch=3, live=True)
RECORD = {"endpoint": "10.0.0.1:8000", "rank": 0, "tier": "GPU", "epoch": 3, "block_size": 16, "state": "live"}
STREAM = {"epoch": "3", "fence": "7", "slot:GPU": "0", "size:GPU": "16", "since:GPU": "1.0"}


def judge(**changes: Any) -> list[Difference]:
    facts: dict[str, Any] = {
        "slots": {0: A},
        "streams": {A.stream: STREAM},
        "held": {0: 12},
        "counters": {"epochs": "3", "fences": "7"},
    }
    return list(judge_records(**{**facts, **changes}))


def test_records_that_agree_have_no_differences() -> None:
    assert judge() == []
    assert judge(held={}) == []  # a source may hold nothing


def test_the_slot_of_the_last_generation_belongs_to_its_stream_too() -> None:
    cpu = SlotOwner(stream=A.stream, tier="CPU", epoch=3, live=True)

    assert judge(slots={0: A, 1: cpu, 2: cpu}, streams={A.stream: {**STREAM, "slot:CPU": "1", "old:CPU": "2"}}) == []


def test_a_slot_that_waits_for_its_sweep_needs_no_stream() -> None:
    assert (
        judge(slots={0: A, 1: SlotOwner(stream="gone:1#0", tier="GPU", epoch=1, live=False)}, held={0: 1, 1: 9}) == []
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"streams": {}, "counters": {}}, [Difference(kind="unnamed-slot", where=f"{A.label}, slot 0")]),
        (
            {"streams": {A.stream: {}}, "slots": {}, "held": {}},
            [Difference(kind="stream", where=A.stream, detail="registered, but has no record")],
        ),
        (
            {"slots": {}},
            [
                Difference(kind="wrong-slot", where=f"{A.stream} GPU, slot 0", detail="has no readable record"),
                Difference(kind="orphan-slot", where="slot 0", detail="12 blocks"),
            ],
        ),
        (
            {"slots": {0: SlotOwner(stream=A.stream, tier="GPU", epoch=2, live=True)}},
            [Difference(kind="wrong-slot", where=f"{A.stream} GPU, slot 0", detail="is of epoch 2, the stream of 3")],
        ),
        (
            {"slots": {0: SlotOwner(stream=A.stream, tier="GPU", epoch=3, live=False)}},
            [Difference(kind="wrong-slot", where=f"{A.stream} GPU, slot 0", detail="waits for its sweep")],
        ),
        (
            {"streams": {A.stream: {**STREAM, "slot:CPU": "x"}}},
            [Difference(kind="wrong-slot", where=f"{A.stream} CPU, slot -1", detail="has no readable record")],
        ),
        ({"held": {0: -1}}, [Difference(kind="type", where="slot 0", detail="its blocks are not a hash")]),
        (
            {"counters": {"epochs": "2", "fences": "7"}},
            [Difference(kind="counter", where="epochs", detail="2, but a stream has 3")],
        ),
        (
            {"counters": {"epochs": "3"}},
            [Difference(kind="counter", where="fences", detail="missing, but a stream has 7")],
        ),
    ],
)
def test_what_contradicts_is_named(changes: dict[str, Any], expected: list[Difference]) -> None:
    assert judge(**changes) == expected
    assert {difference.kind for difference in expected} <= KINDS.keys()


def test_a_slots_record_is_read_and_a_strange_one_is_none() -> None:
    assert read_owner(json.dumps(RECORD).encode()) == A
    assert read_owner(json.dumps({**RECORD, "state": "sweeping"}).encode()) == SlotOwner(
        stream=A.stream, tier="GPU", epoch=3, live=False
    )
    for strange in (b"", b"[]", b"{}", b"\xff", json.dumps({**RECORD, "state": "asleep"}).encode(), b"[" * 100_000):
        assert read_owner(strange) is None


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", False),
        ('{"0": {"kind": "full_attention"}}', False),
        ('{"0": {"kind": "full_attention"}, "1": {"kind": "sliding_window"}}', False),
        ('{"0": {"kind": "full_attention"}, "1": {"kind": "mla_attention"}}', True),
        ("[1, 2]", False),
        ("no JSON", False),
    ],
)
def test_groups_that_are_indexed_are_counted(groups: str, expected: bool) -> None:
    assert holds_several_groups({"groups": groups}) is expected


def test_all_differences_are_counted_and_the_first_are_listed() -> None:
    found = Differences(limit=2)
    for number in range(5):
        found.add("extra", str(number))

    assert (dict(found.counts), [one.where for one in found.listed]) == ({"extra": 5}, ["0", "1"])
