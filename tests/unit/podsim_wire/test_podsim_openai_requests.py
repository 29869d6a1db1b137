import json
from typing import Any

import pytest

from podsim.errors import RequestRefusedError, UnknownModelError
from podsim.wire.openai_requests import (
    ChatRequest,
    CompletionRequest,
    check_chat,
    check_completion,
    check_model,
    decode_body,
)


def chat(**fields: Any) -> ChatRequest:
    return decode_body(json.dumps({"messages": [], **fields}).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return decode_body(json.dumps(fields).encode(), CompletionRequest)


def test_unknown_fields_and_nulls_are_accepted() -> None:
    body = chat(novel=1, max_tokens=None, n=None, stop=None, stream=None, temperature=0)
    assert (body.max_tokens, body.stop_strings, body.reports_cache_hits) == (None, [], False)


def test_one_stop_string_and_a_list_of_them_are_the_same() -> None:
    assert (chat(stop="a").stop_strings, chat(stop=["a", "b"]).stop_strings) == (["a"], ["a", "b"])


@pytest.mark.parametrize("prompt", ["text", ["a", "b"], [1, 2], [[1], [2, 3]], [""], ["1", "2"]])
def test_every_form_of_prompt_is_kept_as_it_was_sent(prompt: Any) -> None:
    assert check_completion(completion(prompt=prompt)) == prompt


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"[]", "body"),
        (b"{}", "body.messages"),
        (b'{"messages": "hi"}', "body.messages"),
        (b'{"messages": [], "max_tokens": "abc"}', "body.max_tokens"),
        (b'{"messages": [], "stream_options": {"include_usage": 7}}', "body.stream_options.include_usage"),
        (b'{"messages": [], "stop": [1]}', "body.stop.0"),
        (b'{"messages": [], ', "body.17"),
    ],
)
def test_a_malformed_body_is_refused_with_the_place_of_the_fault(body: bytes, param: str) -> None:
    with pytest.raises(RequestRefusedError) as refused:
        decode_body(body, ChatRequest)
    assert (refused.value.http_status, refused.value.error_type) == (400, "Bad Request")
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b'{"model": "\xff", "messages": []}', b"\xff\xfe\x00", b"null", b"NaN", b'"x"'])
def test_bytes_that_are_no_request_are_refused_and_raise_nothing_else(body: bytes) -> None:
    with pytest.raises(RequestRefusedError):
        decode_body(body, ChatRequest)


def test_another_model_is_unknown_and_no_model_is_the_served_one() -> None:
    check_model(chat(model="tiny"), served="tiny")
    check_model(chat(), served="tiny")
    with pytest.raises(UnknownModelError) as refused:
        check_model(chat(model="nope"), served="tiny")
    assert refused.value.http_status == 404


def test_a_chat_cannot_be_continued_and_get_a_new_turn() -> None:
    check_chat(chat(continue_final_message=True, add_generation_prompt=False))
    with pytest.raises(RequestRefusedError, match="Cannot set both"):
        check_chat(chat(continue_final_message=True, add_generation_prompt=True))
