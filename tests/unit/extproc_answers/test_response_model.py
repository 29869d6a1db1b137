"""The name in a response is changed back and nothing else, however the bytes are cut."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.answers.response_usage import ModelRewriter, rewriter_for

EVENTS, JSON = "text/event-stream; charset=utf-8", "application/json"


def rewriter(content_type: str, *, model: str = "gpt-x", most_bytes: int = 1 << 20) -> ModelRewriter:
    found = rewriter_for(content_type, model=model, most_bytes=most_bytes)
    assert found is not None
    return found


def fed(content_type: str, *chunks: bytes, model: str = "gpt-x", most_bytes: int = 1 << 20) -> list[bytes]:
    """What comes out for each chunk, the last of which ends the body."""
    feeding = rewriter(content_type, model=model, most_bytes=most_bytes)
    return [feeding.feed(chunk, end_of_stream=i == len(chunks) - 1) for i, chunk in enumerate(chunks)]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"id":"1","model":"m","choices":[]}', b'{"id":"1","model":"gpt-x","choices":[]}'),
        (b' {\n "model" :\t"m" , "x" : 1e400 }\n', b' {\n "model" :\t"gpt-x" , "x" : 1e400 }\n'),
        (b'{"model":"a\\"b\\\\","x":2}', b'{"model":"gpt-x","x":2}'),
        (
            b'{"content":[{"input":{"model":"m"}}],"model":"m"}',
            b'{"content":[{"input":{"model":"m"}}],"model":"gpt-x"}',
        ),
        (b'{"a":"\\"model\\":\\"m\\"","model":"m"}', b'{"a":"\\"model\\":\\"m\\"","model":"gpt-x"}'),
        (b'{"object":"model","model":"m"}', b'{"object":"model","model":"gpt-x"}'),
        (b'{"x":["model"],"model":"m"}', b'{"x":["model"],"model":"gpt-x"}'),
        (b'{"response":{"id":"1","model":"m"}}', b'{"response":{"id":"1","model":"gpt-x"}}'),
        (b'{"message":{"content":[],"model":"m"}}', b'{"message":{"content":[],"model":"gpt-x"}}'),
    ],
)
def test_a_document_gets_the_clients_name_at_its_top_or_in_its_envelope(content: bytes, expected: bytes) -> None:
    assert b"".join(fed(JSON, content)) == expected


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'"model"',
        b"{}",
        b'{"model":null,"x":1}',
        b'{"model":{"model":"m"}}',
        b'{"data":[{"model":"m"}]}',
        b'{"choices":{"model":"m"}}',
        b'{"response":[{"model":"m"}]}',
        b'{"x":"model"}',
        b'{"model":"m',
        b'{"model"',
        b"not JSON at all",
        b'}{"model":"m"}',
        b"\xff\xfe{",
    ],
)
def test_a_document_that_names_no_model_there_passes_as_it_is(content: bytes) -> None:
    assert b"".join(fed(JSON, content)) == content


def test_a_document_is_given_back_as_soon_as_its_model_has_come() -> None:
    assert fed(JSON, b'{"id":1,"mo', b'del":', b'"m","choices":[', b'"model"', b"]}") == [
        b"",
        b"",
        b'{"id":1,"model":"gpt-x","choices":[',
        b'"model"',
        b"]}",
    ]


def test_every_event_gets_the_clients_name_and_all_else_stays() -> None:
    content = (
        b': a comment with "model":"m"\r\n\r\n'
        b'event: message_start\ndata: {"type":"message_start","message":{"model":"m"}}\n\n'
        b'data:{"model":"m","choices":[]}\r\n\r\n'
        b'event: response.created\ndata: {"type":"response.created","response":{"model":"m"}}\n\n'
        b'data: {"choices":[{"model":"m"}]}\n\n'
        b"data: [DONE]\n\n"
    )
    expected = (
        content.replace(b'data:{"model":"m"', b'data:{"model":"gpt-x"')
        .replace(b'"message":{"model":"m"', b'"message":{"model":"gpt-x"')
        .replace(b'"response":{"model":"m"', b'"response":{"model":"gpt-x"')
    )
    assert b"".join(fed(EVENTS, content)) == expected


def test_an_event_is_held_back_only_until_its_line_has_ended() -> None:
    feeding = rewriter(EVENTS)
    steps = [
        (feeding.feed(chunk, end_of_stream=False), feeding.holds_back)
        for chunk in (b'data: {"mod', b'el":"m"}\n', b"\ndata: {", b'"model":"m"}\n\n')
    ]
    assert steps == [
        (b"", True),
        (b'data: {"model":"gpt-x"}\n', False),
        (b"\n", True),
        (b'data: {"model":"gpt-x"}\n\n', False),
    ]


def test_a_last_event_without_a_line_end_is_rewritten_at_the_end() -> None:
    assert b"".join(fed(EVENTS, b'data: {"model"', b':"m"}', b"")) == b'data: {"model":"gpt-x"}'


@pytest.mark.parametrize("content_type", [EVENTS, JSON])
def test_what_is_too_long_to_be_held_back_passes_unchanged(content_type: str) -> None:
    head, tail = b'data: {"x":"' + b"y" * 200, b'","model":"m"}\n'
    feeding = rewriter(content_type, most_bytes=100)
    passed = [feeding.feed(head, end_of_stream=False), feeding.feed(tail, end_of_stream=True)]
    assert (passed, feeding.gave_up, feeding.holds_back) == ([head, tail], True, False)


def test_an_event_behind_one_that_was_too_long_is_rewritten_again() -> None:
    assert fed(EVENTS, b"data: " + b"y" * 200, b'z"model"\ndata: {"model":"m"}\n', b"", most_bytes=100)[1:] == [
        b'z"model"\ndata: {"model":"gpt-x"}\n',
        b"",
    ]


@pytest.mark.parametrize("rest", [b"z" * 200, b'data: {"model":"m"}'])
def test_the_rest_of_a_line_that_was_too_long_passes_at_once_and_unchanged(rest: bytes) -> None:
    chunks = [b"data: " + b"y" * 200, rest, b"z", b"\n" + b'data: {"model":"m"}\n']
    assert fed(EVENTS, *chunks, b"", most_bytes=100) == [*chunks[:3], b"\n" + b'data: {"model":"gpt-x"}\n', b""]


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/octet-stream", "audio/wav"])
def test_other_types_name_no_model(content_type: str) -> None:
    assert rewriter_for(content_type, model="gpt-x") is None


def test_a_name_that_json_must_escape_is_escaped() -> None:
    content = b"".join(fed(JSON, b'{"model":"m"}', model='a"\\\u00e9\n'))
    assert json.loads(content) == {"model": 'a"\\\u00e9\n'}


# --- however it is cut ------------------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["model", '"model":"m"', "\\", '"', "}{", "é", "\n", "data: ", "m", ""]) | st.text(max_size=8)
VALUES = st.recursive(
    TEXTS | st.none() | st.integers(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
DOCUMENTS = st.dictionaries(TEXTS | st.just("model"), VALUES, max_size=4)


def with_the_clients_name(document: dict[str, Any]) -> dict[str, Any]:
    """What is expected: the first name at the top or in an envelope, in the order of the document."""
    changed = dict(document)
    for key, value in document.items():
        if key == "model" and isinstance(value, str):
            return {**changed, key: "gpt-x"}
        if key in ("response", "message") and isinstance(value, dict) and isinstance(value.get("model"), str):
            return {**changed, key: {**value, "model": "gpt-x"}}
    return changed


def cut(content: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted(place % (len(content) + 1) for place in places), len(content)]
    return [content[start:end] for start, end in pairwise(at)]


@given(DOCUMENTS, st.booleans(), st.lists(st.integers(min_value=0, max_value=400), max_size=6))
def test_a_document_cut_anywhere_has_one_name_changed(
    document: dict[str, Any], is_ascii: bool, places: list[int]
) -> None:
    content = json.dumps(document, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    assert json.loads(b"".join(fed(JSON, *cut(content, places)))) == with_the_clients_name(document)


@given(
    st.lists(DOCUMENTS, max_size=4),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
    st.lists(st.integers(min_value=0, max_value=1000), max_size=8),
)
def test_events_cut_anywhere_are_the_events_rewritten_one_by_one(
    documents: list[dict[str, Any]], end: bytes, places: list[int]
) -> None:
    content = b"".join(b"data: " + json.dumps(document).encode() + end for document in documents)
    expected = b"".join(b"data: " + b"".join(fed(JSON, json.dumps(document).encode())) + end for document in documents)
    assert b"".join(fed(EVENTS, *cut(content, places))) == expected


@given(st.binary(max_size=60), st.lists(st.integers(min_value=0, max_value=60), max_size=4))
def test_rubbish_loses_no_byte(content: bytes, places: list[int]) -> None:
    for content_type in (EVENTS, JSON):
        if b'"model"' not in content:
            assert b"".join(fed(content_type, *cut(content, places))) == content


def test_a_line_that_comes_byte_by_byte_costs_linear_time() -> None:
    feeding = rewriter(EVENTS)
    started = time.process_time()
    for _ in range(100_000):
        assert feeding.feed(b"a", end_of_stream=False) == b""
    assert time.process_time() - started < 2  # seconds; about 0.1, and 60 in quadratic time


@pytest.mark.parametrize("chunk_bytes", [1, 9, 1000])
@pytest.mark.parametrize("beginning", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_an_event_in_several_lines_gets_the_name_once(beginning: bytes, newline: bytes, chunk_bytes: int) -> None:
    lines = (b"data: {", b'data: "id": 1, "choices": [{"model": "m"}],', b'data:   "model":', b'data: "m",', b"data: }")
    event = newline.join((*lines, b"", b""))
    content = beginning + event + b'data: {"choices": [{"model": "m"}]}' + 2 * newline + event
    chunks = [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]
    name, changed = b'data: "m",', b'data: "gpt-x",'
    assert b"".join(fed(EVENTS, *chunks)) == content.replace(name, changed)
