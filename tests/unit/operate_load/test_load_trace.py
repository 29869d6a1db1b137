"""Files of recorded requests: two forms, and the line that cannot be used."""

import pytest

from extproc.errors import ConfigError
from operate.load.trace import RecordedBody, TraceRow, read_requests, recorded_sessions

MOONCAKE = b'{"timestamp": %d, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}'
CHAT = b'{"at": 2.5, "messages": [{"role": "user", "content": "hi"}], "max_completion_tokens": 9}'


def test_a_mooncake_trace_is_read_in_the_order_of_its_times() -> None:
    rows = read_requests([MOONCAKE % 900, b"\n", MOONCAKE % 100], where="t")
    assert rows == [TraceRow(100, 600, 5, [1, 2]), TraceRow(900, 600, 5, [1, 2])]


def test_bodies_are_kept_as_they_are_without_their_time() -> None:
    (body,) = read_requests([CHAT], where="t")
    assert isinstance(body, RecordedBody)
    assert (body.at, "at" in body.body, body.body["max_completion_tokens"]) == (2.5, False, 9)
    (session,) = recorded_sessions([body], [0.0])
    assert (session.body, session.turns[0].answer_tokens) == (body.body, 9)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "^t: has no request$"),
        ([b"\n", b"{"], "^t:2: "),
        ([b"[1]"], "^t:1: an object is needed, with timestamp and hash_ids, or with messages or prompt"),
        ([b'{"timestamp": 1, "input_length": 5, "output_length": 5}'], "^t:1: .*hash_ids"),
        ([b'{"timestamp": 1, "input_length": 0, "output_length": 5, "hash_ids": [1]}'], "^t:1: input_length must be"),
        ([b'{"timestamp": -1, "input_length": 5, "output_length": 5, "hash_ids": [1]}'], "^t:1: timestamp must be"),
        ([b'{"prompt": [1, 2]}'], "^t:1: needs messages .* or a prompt that is a text"),
        ([b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}'], "^t:1: needs messages"),
        ([b'{"prompt": "a", "at": "now"}'], "^t:1: at must be seconds from 0 on"),
        ([b'{"prompt": "a", "at": 1' + b"0" * 400 + b"}"], "^t:1: at must be seconds from 0 on"),
        ([b'{"prompt": "a", "at": NaN}'], "^t:1: "),
        ([b'{"prompt": "a", "messages": []}'], "^t:1: needs messages"),
        ([b'{"prompt": "a", "user": ' + b"[" * 100_000], "^t:1: it is nested too deep"),
        ([b'{"prompt": "\xff"}'], "^t:1: "),
        ([CHAT, MOONCAKE % 1], "^t:2: lines of two forms"),
        ([CHAT, b'{"prompt": "a"}'], "^t: some lines have `at` and some have not"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_line(lines: list[bytes], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_requests(lines, where="t")
