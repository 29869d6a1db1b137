"""Text from outside in a terminal."""

import json

import msgspec
import pytest

from kvmesh.plain_text import cut_end, cut_start, plain_json, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/v1/é漢🙂", "/v1/é漢🙂"),
        ("two\nlines\tand\r", "two lines and "),
        ("\x1b[2J\x07\x9b1m\x7f", "[2J1m"),
        ("a\u202eb\u200bc\u2028d", "abc d"),
        ("\ud800", ""),
    ],
)
def test_control_characters_are_left_out_and_line_breaks_become_spaces(text: str, shown: str) -> None:
    assert printable(text) == shown


@pytest.mark.parametrize("hidden", ["\x9b", "\x80", "\u061c", "\u200b", "\u202e", "\u2028", "\u2066", "\ufeff"])
def test_json_has_no_character_that_a_terminal_obeys_and_says_the_same(hidden: str) -> None:
    value = {f"é{hidden}": [f"漢{hidden}🙂", hidden * 2]}
    document = plain_json(msgspec.json.encode(value))
    assert hidden not in document.decode()
    assert "漢" in document.decode()
    assert json.loads(document) == value


def test_what_is_too_long_is_cut_with_a_mark_and_what_fits_is_not() -> None:
    assert [cut_end("abcdef", limit=limit) for limit in (5, 6)] == ["abcd…", "abcdef"]
    assert [cut_start("abcdef", limit=limit) for limit in (5, 6)] == ["…cdef", "abcdef"]
