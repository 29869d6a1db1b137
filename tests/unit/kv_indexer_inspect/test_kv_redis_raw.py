"""Reading raw keys and values without believing them."""

import pytest

from kv_indexer.inspect.index_audit import HeldBlock, block_key_of, read_held, read_holders, slot_number, slot_of

KEY = b"12345678"


@pytest.mark.parametrize(
    ("name", "block", "slot"),
    [
        (b"{kv2}b12345678", KEY, None),
        (b"{kv2}b1234567", None, None),
        (b"{kv2}h0", None, 0),
        (b"{kv2}h4095", None, 4095),
        (b"{kv2}h4096", None, None),
        (b"{kv2}h07", None, None),
        (b"{kv2}hx", None, None),
        (b"{kv2}heartbeat", None, None),
        (b"{kv2}stream:a", None, None),
    ],
)
def test_a_key_is_a_block_a_source_or_neither(name: bytes, block: bytes | None, slot: int | None) -> None:
    assert (block_key_of(name), slot_of(name)) == (block, slot)


@pytest.mark.parametrize(
    ("value", "slots", "fault"),
    [
        (b"0", {0}, ""),
        (b"4095", {4095}, ""),
        (b"B\xc0", {0, 1}, ""),
        (b"B\x80\x01", {0, 15}, ""),
        (b"B\x80", {0}, "a bitmap for fewer than two slots"),
        (b"B", set(), "a bitmap for fewer than two slots"),
        (b"", set(), "neither a slot nor a bitmap"),
        (b"07", set(), "neither a slot nor a bitmap"),
        (b"4096", set(), "neither a slot nor a bitmap"),
        (b"-1", set(), "neither a slot nor a bitmap"),
        (b"B\xc0" + b"\0" * 512 + b"\x80", {0, 1}, "a bit beyond the last slot"),
    ],
)
def test_holders_are_one_slot_or_a_bitmap_of_several(value: bytes, slots: set[int], fault: str) -> None:
    assert read_holders(value) == (frozenset(slots), fault)


@pytest.mark.parametrize(
    ("field", "value", "first_group", "fault"),
    [
        (b"engineH1", KEY, True, ""),
        (b"engineH1\x01", KEY, False, ""),
        (b"engineH1", KEY + b"2", True, ""),
        (b"engineH1", KEY + b"417", True, ""),
        (b"engineH1", KEY + b"1", True, "a reference count of b'1'"),
        (b"engineH1", KEY + b"02", True, "a reference count of b'02'"),
        (b"engineH1", KEY + b"-2", True, "a reference count of b'-2'"),
        (b"engineH1", b"1234", True, "its value has only 4 bytes"),
        (b"engineH1\x00", KEY, False, "group 0"),
        (b"eng", KEY, False, "its name has 3 bytes and no group that we know"),
    ],
)
def test_an_entry_is_read_and_what_is_wrong_with_it_said(
    field: bytes, value: bytes, first_group: bool, fault: str
) -> None:
    assert read_held(field, value) == HeldBlock(block_key=value[:8], in_first_group=first_group, fault=fault)


def test_a_slot_is_read_in_its_one_form() -> None:
    assert [slot_number(text) for text in (b"0", b"12", b"", b"012", b"99999999999", b"1.0", b"\xb2")] == [
        *(0, 12, None, None, None, None),
        None,
    ]
