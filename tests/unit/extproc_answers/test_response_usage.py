"""The usage object of every API's response, plain and streamed, cut anywhere."""

import pytest

from extproc.answers.realised import Usage
from extproc.answers.response_usage import usage_reader_for

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
        (b'{"usage":{"prompt_tokens":%d,"completion_tokens":3}}' % 10**30, Usage(output_tokens=3)),
        (b'{"usage":{"prompt_tokens":-1,"completion_tokens":3}}', Usage(output_tokens=3)),
        (b'{"usage":{"prompt_tokens":' + b"9" * 100_000 + b"}}", None),
        (b'{"usage":{"input_tokens":9e15,"cache_read_input_tokens":9e15}}', Usage(cached_tokens=9 * 10**15)),
        (b'{"error":{"message":"no"},"message":"no"}', None),
        (b"[1]", None),
        (b"", None),
        (b"\xff", None),
    ],
)
def test_a_documents_usage_is_read(content: bytes, expected: Usage | None) -> None:
    for at in range(0, len(content) + 1, 1 + len(content) // 1000):
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


def events(*documents: bytes) -> bytes:
    return b"".join(b"data: " + document + b"\n\n" for document in documents)


def long_read(content_type: str, content: bytes, *, chunk_bytes: int) -> Usage | None:
    """What is read of something that is too long to be kept."""
    reader = usage_reader_for(content_type, most_bytes=10)
    assert reader is not None
    for at in range(0, len(content), chunk_bytes):
        reader.feed(content[at : at + chunk_bytes])
    usage = reader.usage()
    assert reader.gave_up
    return usage


FILLER = b"x" * 9000


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 4096, 1 << 20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"choices":["' + FILLER + b'"],' + CHAT[1:], 3),
        (b'{"choices":["' + FILLER + b'"],' + CHAT[1:-1] + b',"prompt_token_ids":["' + FILLER + b'"]}', 3),
        (b'{"text":"' + FILLER + b'","usage" :\n{"input_tokens":4,"output_tokens":3}}', 3),
        (b'{"usage":{"output_tokens":2},"text":"' + FILLER + b'","usage":{"output_tokens":3},"usage":{"type":7}}', 3),
        (b'{"text":"' + FILLER + b'\\"usage\\":{\\"output_tokens\\":3}"}', None),
        (b'{"text":"' + FILLER + b'","usage":null}', None),
        (b'{"text":"' + FILLER + b'","usage":{"output_tokens":"many"}}', None),
        (b'{"text":"' + FILLER + b'","usage":{"output_tok', None),
        (b'{"usage":' * 3000, None),
    ],
    ids=["end", "middle", "spaces", "several", "within text", "null", "no number", "cut off", "nested"],
)
def test_of_a_document_that_is_too_long_the_output_tokens_are_found(
    content: bytes, expected: int | None, chunk_bytes: int
) -> None:
    usage = None if expected is None else Usage(output_tokens=expected)
    assert long_read(JSON, content, chunk_bytes=chunk_bytes) == usage


@pytest.mark.parametrize("content_type", [JSON, EVENTS])
@pytest.mark.parametrize("nested", [b"[" * 50_000 + b"]" * 50_000, b'{"a":' * 50_000 + b"1" + b"}" * 50_000])
def test_of_a_document_that_is_nested_too_deeply_the_output_tokens_are_found(content_type: str, nested: bytes) -> None:
    document = b'{"choices":' + nested + b',"usage":{"prompt_tokens":20,"completion_tokens":3}}'
    reader = usage_reader_for(content_type, count_events=True, find_tokens=True)
    assert reader is not None
    reader.feed(document if content_type == JSON else b"data: " + document + b"\n\ndata: [DONE]\n\n")
    assert reader.usage() == Usage(output_tokens=3)
    assert not reader.has_failed
    assert reader.has_one_answer is (content_type == EVENTS)


def test_a_line_that_is_too_long_is_skipped_and_the_stream_read_on() -> None:
    content = b'data: {"choices":[{"text":"' + FILLER + b'"}]}\n\n' + events(b'{"choices":[{"text":"a"}]}') * 4
    for at in (1, 5, 9000, len(content) - 1):
        reader = usage_reader_for(EVENTS, most_bytes=1000, count_events=True)
        assert reader is not None
        for i in range(0, len(content), at):
            reader.feed(content[i : i + at])
        if at < 9000:
            assert (reader.usage(), reader.generated_tokens, reader.gave_up) == (None, 4, True)
        reader.feed(b"\ndata: " + CHAT)
        assert reader.usage() == EXPECTED


def test_a_usage_object_in_a_line_that_is_too_long_is_found() -> None:
    content = (
        b'data: {"type":"response.completed","response":{"output":"' + FILLER + b'","usage":' + RESPONSES + b"}}\n"
    )
    for chunk_bytes in (3, 1000, 4096):
        assert long_read(EVENTS, content, chunk_bytes=chunk_bytes) == Usage(output_tokens=3)


def test_the_beginning_of_an_answer_tells_nothing_of_its_length() -> None:
    start = b'data: {"type":"message_start","message":{"usage":{"input_tokens":4,"output_tokens":1}}}\n\n'
    assert read(EVENTS, start) == Usage(prompt_tokens=4)


def test_a_long_stream_of_short_events_is_read() -> None:
    events = [b'data: {"choices":[]}\n\n'] * 1000
    assert read(EVENTS, *events, b"data: " + CHAT + b"\n\n", most_bytes=500) == EXPECTED


@pytest.mark.parametrize("content_type", ["", "text/plain", "audio/wav"])
def test_other_types_have_no_usage(content_type: str) -> None:
    assert usage_reader_for(content_type) is None


def generated(*chunks: bytes, count_events: bool = True) -> int:
    reader = usage_reader_for(EVENTS, count_events=count_events)
    assert reader is not None
    for chunk in chunks:
        reader.feed(chunk)
    reader.usage()
    reader.usage()
    return reader.generated_tokens


CHAT_EVENTS = events(
    b'{"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}',
    b'{"choices":[{"index":0,"delta":{"reasoning":"Hm"}}]}',
    b'{"choices":[{"index":0,"delta":{"content":"data: {\\n\\ndata: "}}]}',
    b'{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}',
    b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
    b"[DONE]",
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (CHAT_EVENTS, 3),
        (CHAT_EVENTS.replace(b"\n\n", b"\r\n\r\n"), 3),
        (events(b'{"choices":[{"text":"a"}]}', b'{"choices":[{"text":""}]}', b"[DONE]"), 1),
        (
            b"event: response.output_text.delta\n"
            + events(
                b'{"type":"response.output_text.delta","delta":"a"}',
                b'{"type":"response.output_text.done","text":"a"}',
                b'{"type":"response.completed","response":{}}',
            ),
            1,
        ),
        (
            events(
                b'{"type":"message_start","message":{}}',
                b'{"type":"content_block_delta","delta":{"type":"text_delta","text":"a"}}',
                b'{"type":"message_delta","delta":{"stop_reason":"end_turn"}}',
            ),
            1,
        ),
        (events(b'{"choices":[{"index":0,"token_ids":[1,2,3]},{"index":1,"token_ids":[4]}]}'), 4),
        (events(b'{"choices":[{"delta":{"content":"ab"},"token_ids":[1,2]},{"delta":{"content":"c"}}]}'), 3),
        (events(b"{", b"\xff", b"[1]", b'{"choices":[{"delta":7}]}'), 0),
        (b'data: {"choices":[{"text":"no line end"}]}', 1),
    ],
    ids=["chat", "CRLF", "completions", "responses", "anthropic", "token ids", "both", "junk", "cut off"],
)
def test_a_streams_events_that_bring_tokens_are_counted(content: bytes, expected: int) -> None:
    for at in range(len(content) + 1):
        assert generated(content[:at], content[at:]) == expected


def test_events_are_counted_on_demand_only() -> None:
    assert generated(CHAT_EVENTS, count_events=False) == 0


# --- streams that are judged -----------------------------------------------------------------------------------------

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a\\ndata: b [DONE]"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
SECOND = b'data: {"choices":[{"index":1,"delta":{"content":"b"}}]}\n\n'
ANTHROPIC = b'event: message_start\ndata: {"type":"message_start"}\n\nevent: ping\ndata: {"type": "ping"}\n\n'
ANTHROPIC_TOKEN = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'


def events_after(*chunks: bytes) -> list[int]:
    """How many events have brought tokens, as far as is known after each chunk."""
    reader = usage_reader_for(EVENTS, find_tokens=True)
    assert reader is not None
    found = []
    for chunk in chunks:
        reader.feed(chunk)
        found.append(reader.token_events)
    return found


@pytest.mark.parametrize(
    ("chunks", "expected"),
    [
        ((ROLE, TOKEN, TOKEN, DONE), [0, 1, 2, 2]),
        ((ROLE + TOKEN + TOKEN + DONE,), [2]),
        ((ROLE + TOKEN + DONE,), [1]),
        ((ROLE[:30], ROLE[30:] + TOKEN[:40], TOKEN[40:], TOKEN + DONE), [0, 0, 1, 2]),
        ((TOKEN.replace(b"\n\n", b"\r\n\r\n"), TOKEN.replace(b"\n\n", b"\r\n\r\n")), [1, 2]),
        ((b'data: {"choices":[{"index":0,"text":"a"}]}\n\n', DONE), [1, 1]),
        ((b'data: {"choices":[{"index":0,"token_ids":[1,2]}]}\n\n',), [1]),
        ((b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n',), [1]),
        ((ANTHROPIC, ANTHROPIC_TOKEN, ANTHROPIC_TOKEN), [0, 1, 2]),
        ((b'data: {"type":"response.created"}\n\n', b'data: {"type":"response.output_text.delta"}\n\n'), [0, 1]),
        ((b": comment\n\n", b"data: nonsense that is long enough\n\n", DONE), [0, 0, 0]),
    ],
)
def test_the_first_event_with_a_token_is_found_and_those_after_it_are_counted(
    chunks: tuple[bytes, ...], expected: list[int]
) -> None:
    assert events_after(*chunks) == expected


def test_several_answers_side_by_side_are_seen() -> None:
    reader = usage_reader_for(EVENTS, find_tokens=True)
    assert reader is not None
    reader.feed(ROLE + TOKEN)
    assert reader.has_one_answer
    reader.feed(SECOND)
    assert not reader.has_one_answer


@pytest.mark.parametrize(
    ("content", "has_one"),
    [(b'{"choices":[{}]}', True), (b'{"choices":[{},{}]}', False), (b'{"content":[]}', True), (b"[", False)],
)
def test_several_answers_of_a_document_are_seen(content: bytes, has_one: bool) -> None:
    reader = usage_reader_for(JSON)
    assert reader is not None
    reader.feed(content)
    assert reader.has_one_answer is has_one


USAGE = b'{"prompt_tokens": 9,\n"completion_tokens": 2}'
TOKEN = b'{"choices": [\n{"index": 0, "delta": {"content": "x"}}]}'
FORMS = {
    "several data lines": (b"", b"\n", b"data: "),
    "no space": (b"", b"\n", b"data:"),
    "CRLF": (b"", b"\r\n", b"data: "),
    "byte order mark": (b"\xef\xbb\xbf", b"\n", b"data: "),
}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000])
@pytest.mark.parametrize("form", FORMS)
def test_rewritten_events_are_read_like_the_engines(form: str, chunk_bytes: int) -> None:
    beginning, newline, prefix = FORMS[form]
    documents = (TOKEN, TOKEN, b'{"choices": [],\n"usage": ' + USAGE + b"}", b"[DONE]")
    events_of = [b"".join(prefix + line + newline for line in each.split(b"\n")) + newline for each in documents]
    content = beginning + (b"event: x" + newline).join(events_of)
    for counts in (True, False):
        reader = usage_reader_for("text/event-stream", count_events=counts, find_tokens=True)
        assert reader is not None
        for at in range(0, len(content), chunk_bytes):
            reader.feed(content[at : at + chunk_bytes])
        assert (reader.is_empty, reader.has_failed) == (False, False)
        assert reader.usage() == Usage(prompt_tokens=9, output_tokens=2)
        assert reader.generated_tokens == 2 * counts
        assert reader.token_events == (2 if counts else 3)


def test_an_error_in_several_lines_is_seen() -> None:
    reader = usage_reader_for("text/event-stream")
    assert reader is not None
    reader.feed(b'data: {"error":\ndata: {"message": "dead",\ndata: "code": 500}}\n\n')
    assert reader.has_failed
