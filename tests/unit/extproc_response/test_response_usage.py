"""The usage object of every API's response, plain and streamed, cut anywhere."""

import pytest

from extproc.core.realised import Usage
from extproc.wire.response_usage import usage_reader_for

JSON, EVENTS = "application/json", "text/event-stream"


def read(content_type: str, *chunks: bytes, most_bytes: int = 1 << 20) -> Usage | None:
    reader = usage_reader_for(content_type, most_bytes=most_bytes)
    assert reader is not None
    for chunk in chunks:
        reader.feed(chunk)
    return reader.usage()


CHAT = b'{"choices":[],"usage":{"prompt_tokens":20,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":16}}}'
RESPONSES = b'{"input_tokens":20,"output_tokens":3,"input_tokens_details":{"cached_tokens":16}}'
EXPECTED = Usage(prompt_tokens=20, cached_tokens=16, output_tokens=3)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CHAT, EXPECTED),
        (b'{"usage":' + RESPONSES + b"}", EXPECTED),
        (b'{"usage":{"input_tokens":4,"cache_read_input_tokens":16,"output_tokens":3}}', EXPECTED),
        (
            b'{"usage":{"input_tokens":3,"cache_read_input_tokens":16,"cache_creation_input_tokens":1}}',
            Usage(prompt_tokens=20, cached_tokens=16),
        ),
        (b'{"usage":{"prompt_tokens":20,"prompt_tokens_details":null}}', Usage(prompt_tokens=20)),
        (b'{"usage":null}', None),
        (b'{"usage":{}}', None),
        (b'{"usage":{"prompt_tokens":"many"}}', None),
        (b'{"error":{"message":"no"},"message":"no"}', None),
        (b"[1]", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_a_documents_usage_is_read(content: bytes, expected: Usage | None) -> None:
    for at in range(len(content) + 1):
        assert read(JSON, content[:at], content[at:]) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'data: {"choices":[{}],"usage":null}\n\ndata: ' + CHAT + b"\n\ndata: [DONE]\n\n", EXPECTED),
        (b'data: {"choices":[{}],"usage":null}\r\n\r\ndata:' + CHAT + b"\r\n\r\ndata: [DONE]\r\n\r\n", EXPECTED),
        (
            b'data: {"usage":{"prompt_tokens":20,"completion_tokens":0}}\n\ndata: ' + CHAT + b"\n\n",
            EXPECTED,
        ),
        (
            b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":'
            + RESPONSES
            + b"}}\n\n",
            EXPECTED,
        ),
        (
            b'event: message_start\ndata: {"message":{"usage":{"input_tokens":4,"cache_read_input_tokens":16,'
            b'"output_tokens":0}}}\n\nevent: message_delta\ndata: {"delta":{},"usage":{"output_tokens":3}}\n\n',
            EXPECTED,
        ),
        (b'data: {"choices":[{"delta":{"content":"\\"usage\\":{"}}]}\n\ndata: [DONE]\n\n', None),
        (b"data: " + CHAT, EXPECTED),
        (b"", None),
    ],
    ids=["chat", "CRLF", "continuous", "responses", "anthropic", "without", "no line end", "empty"],
)
def test_a_streams_usage_is_read(content: bytes, expected: Usage | None) -> None:
    for at in range(len(content) + 1):
        assert read(EVENTS, content[:at], content[at:]) == expected


@pytest.mark.parametrize("content_type", [JSON, EVENTS])
def test_what_is_too_long_is_not_kept(content_type: str) -> None:
    reader = usage_reader_for(content_type, most_bytes=10)
    assert reader is not None
    for chunk in (b"data: 123456", CHAT, b"\n"):
        reader.feed(chunk)
    assert (reader.usage(), reader.gave_up) == (None, True)


def test_a_long_stream_of_short_events_is_read() -> None:
    events = [b'data: {"choices":[]}\n\n'] * 1000
    assert read(EVENTS, *events, b"data: " + CHAT + b"\n\n", most_bytes=500) == EXPECTED


@pytest.mark.parametrize("content_type", ["", "text/plain", "audio/wav"])
def test_other_types_have_no_usage(content_type: str) -> None:
    assert usage_reader_for(content_type) is None
