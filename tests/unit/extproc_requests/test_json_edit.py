"""Replacing top-level fields in raw JSON leaves every other byte as it was."""

import contextlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.errors import BodyTooLargeError, MalformedRequestError
from extproc.requests.json_edit import MAX_FIELDS, JsonObject, replace_top_level

NEW = {"model": b'"new"'}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"old"}', b'{"model":"new"}'),
        (b' {\n "model" :\t"old" ,"b": 1}\n', b' {\n "model" :\t"new" ,"b": 1}\n'),
        (b'{"a":{"model":"in"},"model":null,"l":["model"]}', b'{"a":{"model":"in"},"model":"new","l":["model"]}'),
        (b'{"model":"a","x":1,"model":"b"}', b'{"model":"new","x":1,"model":"new"}'),
        (b'{"x":1,"x":12,"model":"a","x":{"model":1},"x":1}', b'{"x":1,"x":12,"model":"new","x":{"model":1},"x":1}'),
        (b'{"m\\u006fdel":"a"}', b'{"m\\u006fdel":"new"}'),
        (b'{"model":{"a":["}"]},"b":2}', b'{"model":"new","b":2}'),
        (
            b'{"n":123456789012345678901234567890.10,"model":1}',
            b'{"n":123456789012345678901234567890.10,"model":"new"}',
        ),
        (b'{"t":NaN,"u":-Infinity,"v":[NaN,"]"],"model":1}', b'{"t":NaN,"u":-Infinity,"v":[NaN,"]"],"model":"new"}'),
        (b'\xef\xbb\xbf{"model":"old"}', b'\xef\xbb\xbf{"model":"new"}'),
        (b'{"s":"\\ud83d \\\\\\"","model":"a"}', b'{"s":"\\ud83d \\\\\\"","model":"new"}'),
        (b"{}", b'{"model":"new"}'),
        (b" { } ", b' { "model":"new"} '),
        (b'{"a": 1 }', b'{"a": 1,"model":"new" }'),
        (b'{"a":"model","b":"\\"model\\":1"}', b'{"a":"model","b":"\\"model\\":1","model":"new"}'),
    ],
)
def test_only_the_field_changes(body: bytes, expected: bytes) -> None:
    assert replace_top_level(body, NEW) == expected


def test_several_fields_change_at_once_and_missing_ones_are_added_in_order() -> None:
    body = b'{"b":1,"a":2,"c":3}'
    assert replace_top_level(body, {"a": b"[0]", "z": b"{}", "y": b"null"}) == b'{"b":1,"a":[0],"c":3,"z":{},"y":null}'


def test_no_change_gives_the_same_bytes() -> None:
    assert replace_top_level(b' {"a" : NaN} ', {}) == b' {"a" : NaN} '


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b'"x"',
        b"{",
        b'{"a"}',
        b'{"a":}',
        b'{"a":1',
        b'{"a":1,}',
        b'{"a":1 "b":2}',
        b'{"a":[1}',
        b'{"a":"x}',
        b"{a:1}",
        b'{"a":1} {}',
        b"{} x",
        b'{"\xff":1}',
        '{"a": 1}'.encode("utf-16"),
    ],
)
def test_what_is_no_object_in_utf_8_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        replace_top_level(body, NEW)


KEYS = st.sampled_from(("model", "models", "a", "", 'q"uote', "back\\slash", "é", "x")) | st.text(max_size=4)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(("}", '"', "\\")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.thorough
@settings(max_examples=120)
@given(
    fields=st.lists(st.tuples(KEYS, VALUES), max_size=6),
    changes=st.dictionaries(KEYS, VALUES, max_size=3),
    ascii_only=st.booleans(),
    space=st.sampled_from(("", " ", "\n\t ", "\r\n")),
)
def test_any_object_with_any_duplicates_reads_as_if_it_had_been_written_so(
    fields: list[tuple[str, Any]], changes: dict[str, Any], ascii_only: bool, space: str
) -> None:
    def written(pairs: list[tuple[str, Any]]) -> bytes:
        encode = json.JSONEncoder(ensure_ascii=ascii_only).encode
        dumped = [f"{space}{encode(name)}{space}:{space}{encode(value)}" for name, value in pairs]
        return f"{space}{{{f'{space},'.join(dumped)}{space}}}{space}".encode()

    raw = {name: json.dumps(value).encode() for name, value in changes.items()}
    edited = replace_top_level(written(fields), raw)
    names = {name for name, _ in fields}
    expected = [(name, changes.get(name, value)) for name, value in fields]
    expected += [(name, value) for name, value in changes.items() if name not in names]
    pairs = json.loads(edited, object_pairs_hook=lambda found: found)
    assert repr(pairs) == repr(json.loads(written(expected), object_pairs_hook=lambda found: found))


@pytest.mark.thorough
@settings(max_examples=100)
@given(fields=st.lists(st.tuples(KEYS, VALUES), min_size=1, max_size=5), at=st.integers(0, 4))
def test_putting_the_old_value_back_gives_the_old_bytes(fields: list[tuple[str, Any]], at: int) -> None:
    unique = dict(fields)
    body = json.dumps(unique, indent=1).encode()
    name = list(unique)[at % len(unique)]
    old = json.dumps(unique[name], indent=1).encode().replace(b"\n", b"\n ")
    assert replace_top_level(replace_top_level(body, {name: b"0"}), {name: old}) == body


@settings(max_examples=100)
@given(body=st.binary(max_size=40) | st.text('{}[]":,\\ 1aeNu', max_size=30).map(str.encode))
def test_any_bytes_give_bytes_or_a_refusal(body: bytes) -> None:
    try:
        edited = replace_top_level(body, NEW)
    except MalformedRequestError:
        return
    assert b'"new"' in edited


def test_a_long_text_of_escapes_costs_neither_recursion_nor_backtracking() -> None:
    body = b'{"t":NaN,"s":"' + b'\\"' * 500_000 + b'","model":1}'
    assert replace_top_level(body, NEW) == body[:-2] + b'"new"}'


def test_deeper_nesting_than_any_parser_takes_is_refused_and_ordinary_one_is_not() -> None:
    for depth, is_taken in ((400, True), (50_000, False)):
        body = b'{"d":' + b"[" * depth + b"]" * depth + b',"e":NaN,"model":1}'
        if is_taken:
            assert replace_top_level(body, NEW) == body[:-2] + b'"new"}'
        else:
            with pytest.raises(MalformedRequestError):
                replace_top_level(body, NEW)


NESTED = b"[" + b'{"a":[]},' * 45_000 + b'"' + b"x" * 1_600_000 + b'"]'  # 2 MB, just few enough parts to be read
MANY = b"[" + b"{}," * 700_000 + b"1]"


def steps_in_python(work: Callable[[bytes], object], body: bytes) -> int:
    """Count the calls that the interpreter makes: what stays inside one C function is one."""
    steps = 0

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1

    sys.setprofile(count)
    try:
        with contextlib.suppress(BodyTooLargeError):
            work(body)
    finally:
        sys.setprofile(None)
    return steps


@pytest.mark.parametrize("value", [NESTED, MANY], ids=["readable", "too many parts"])
@pytest.mark.parametrize("odd", [b'{"n":NaN,"z":%b}', b'{"z":%b,"z":1}'], ids=["NaN", "key twice"])
def test_no_step_in_python_is_made_for_each_bracket_of_an_odd_body(odd: bytes, value: bytes) -> None:
    assert steps_in_python(lambda body: replace_top_level(body, NEW), odd % value) < 5_000  # 90,000 brackets and more


@pytest.mark.parametrize("odd", [b'{"n":NaN,"z":%b}', b'{"z":%b,"z":1}'], ids=["NaN", "key twice"])
def test_an_odd_body_of_too_many_parts_is_refused_before_they_are_made(odd: bytes) -> None:
    assert replace_top_level(odd % NESTED, {"z": b"0"}) == (b'{"n":NaN,"z":0}' if b"NaN" in odd else b'{"z":0,"z":0}')
    with pytest.raises(BodyTooLargeError, match="too many parts"):
        replace_top_level(odd % MANY, NEW)


RAW_VALUES = st.sampled_from(
    (b"NaN", b"-Infinity", b"1e999", b"0.10", b'"\\ud83d"', b'"a\\"}"', b'"\xff\x01"', b"[ {} ,NaN]", b'{ "model":1 }')
) | VALUES.map(lambda value: json.dumps(value).encode())
SPACES = st.sampled_from((b"", b" ", b"\n\t", b"\r\n "))


@pytest.mark.thorough
@settings(max_examples=150)
@given(
    mark=st.sampled_from((b"", b"\xef\xbb\xbf")),
    fields=st.lists(st.tuples(st.sampled_from(("model", "mod\\u0065l", "x", "y")), RAW_VALUES, SPACES), max_size=6),
    around=SPACES,
)
def test_every_byte_but_the_changed_values_stays(
    mark: bytes, fields: list[tuple[str, bytes, bytes]], around: bytes
) -> None:
    def written(new: bytes | None) -> bytes:
        parts = [
            b'%b"%b"%b:%b%b%b'
            % (space, name.encode(), space, space, value if new is None or name in "xy" else new, space)
            for name, value, space in fields
        ]
        if new is not None and all(name in "xy" for name, _, _ in fields):
            if not parts:
                return mark + around + b"{" + around + b'"model":' + new + b"}" + around
            last = fields[-1][2]
            parts[-1] = parts[-1][: len(parts[-1]) - len(last)] + b',"model":' + new + last
        return mark + around + b"{" + (b",".join(parts) if parts else around) + b"}" + around

    assert replace_top_level(written(None), NEW) == written(b'"new"')


def test_what_is_read_once_is_changed_without_reading_it_again() -> None:
    found = JsonObject(b'{"a":NaN,"a":1}')
    assert found.values(frozenset(("a",))) == {"a": b"1"}
    object.__setattr__(found, "raw", b'{"a":xxx,"a":x}')  # of the same lengths, and no JSON
    assert found.replaced({"a": b"0"}) == b'{"a":0,"a":0}'


def test_a_name_that_occurs_often_costs_no_copy_of_its_value_each_time() -> None:
    often = b'"a":1,' * (MAX_FIELDS - 2)
    body = b"{" + often + b'"a":"' + b"x" * 4_000_000 + b'","model":1}'
    started = time.process_time()
    assert replace_top_level(body, NEW) == body[:-2] + b'"new"}'
    assert time.process_time() - started < 2  # seconds; about 0.05, and 10 with the copies


def test_more_fields_than_any_api_has_are_refused() -> None:
    with pytest.raises(MalformedRequestError, match="more than 10000 fields"):
        replace_top_level(b"{" + b'"a":1,' * MAX_FIELDS + b'"model":1}', NEW)


def test_raw_values_are_read_as_they_stand_and_of_equal_names_the_last() -> None:
    body = b'{"a": [1, {"b":2}] ,"n":1e400,"b":NaN,"\\u0061": "x\\"y" ,"c":3}'
    assert JsonObject(body).values(frozenset(("a", "b", "missing"))) == {"a": b'"x\\"y"', "b": b"NaN"}


@pytest.mark.parametrize("body", [b"", b"[]", b"a=b", b'{"a"}', b'{"a":1}x'])
def test_raw_values_of_what_is_no_object_are_refused(body: bytes) -> None:
    with pytest.raises(MalformedRequestError):
        JsonObject(body).values(frozenset(("a",)))


def test_raw_values_of_a_body_with_too_many_fields_are_refused() -> None:
    body = json.dumps({str(i): 0 for i in range(MAX_FIELDS + 1)}).encode()
    with pytest.raises(MalformedRequestError, match="more than"):
        JsonObject(body).values(frozenset(("0",)))
