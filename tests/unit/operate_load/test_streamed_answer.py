"""Streams of the OpenAI API, however they are cut, and what an answer that is none means."""

from typing import Any

import pytest

from operate.load.streamed_answer import BadAnswerError, StreamedAnswer, problem_of, refusal_of

CHAT = (
    b": still there\r\n\r\n"
    b'event: message\ndata: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
    b'data: {"choices": [{"delta": {"reasoning": " hm"}}]}\r\n\r\n'
    b'data: {"choices": [{"delta": {"content": " one"}}]}\n\n'
    b'data: {"choices": [{"text": " two"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 32}}}\n\n'
    b"data: [DONE]\n\n"
)


@pytest.mark.parametrize("step", [1, 3, 50, len(CHAT)])
def test_a_stream_may_be_cut_anywhere(step: int) -> None:
    answer = StreamedAnswer(status=200)
    for start in range(0, len(CHAT), step):
        answer.feed(CHAT[start : start + step], at=float(start))

    assert (answer.pieces, answer.prompt_tokens, answer.cached_tokens) == ([" hm", " one", " two"], 40, 32)
    assert answer.done
    assert problem_of(answer) is None
    assert len(answer.gaps) == 2
    assert answer.first_at == answer.piece_times[0]


def test_usage_without_details_has_no_cached_tokens() -> None:
    answer = StreamedAnswer()
    answer.feed(b'data: {"choices": [], "usage": {"prompt_tokens": 4, "prompt_tokens_details": null}}\n\n', at=0.0)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.first_at, answer.gaps) == (4, 0, None, ())


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (b"nonsense\n\n", "not an event: nonsense"),
        (b'data: {"more": ' + b"[" * 100_000 + b"\n\n", 'not an event: data: {"more"'),
        (b'data: {"error": {"message": "out of memory", "code": 500}}\n\n', "out of memory"),
        (b'data: {"error": "out of memory"}\n\n', "out of memory"),
    ],
)
def test_what_is_no_event_or_an_error_fails(event: bytes, says: str) -> None:
    with pytest.raises(BadAnswerError, match=says):
        StreamedAnswer().feed(event, at=0.0)


@pytest.mark.parametrize(
    ("answered", "refused"),
    [
        ({"status": 429}, "status 429"),
        ({"status": 429, "headers": {"x-kvmesh-reason": "quota"}}, "quota"),
        ({"status": 503, "headers": {"x-kvmesh-reason": "overload"}}, "overload"),
        ({"status": 503, "headers": {"retry-after": "3"}, "refusal": "busy"}, "status 503: busy"),
        ({"status": 503, "refusal": "upstream connect error"}, None),  # as Envoy has it for a pod that is gone
        ({"status": 200}, None),
        ({"status": None}, None),
    ],
)
def test_only_a_server_that_says_so_has_refused(answered: dict[str, Any], refused: str | None) -> None:
    assert refusal_of(StreamedAnswer(**answered)) == refused


def test_a_problem_has_the_servers_words_in_one_line() -> None:
    assert (
        problem_of(StreamedAnswer(status=503, refusal="upstream connect\nerror"))
        == "status 503: upstream connect error"
    )
    assert problem_of(StreamedAnswer(status=502)) == "status 502"
    assert problem_of(StreamedAnswer(status=502, refusal="[" * 5000)) == f"status 502: {'[' * 160}"
    assert problem_of(StreamedAnswer(status=200)) == "the answer broke off"
