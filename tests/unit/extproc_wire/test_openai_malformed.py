"""What `parse_request` answers to bodies that no pod could serve, and that no body ends the process."""

import json
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.core.request import InferenceRequest
from extproc.errors import MalformedRequestError
from extproc.wire.openai import parse_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def refusal(path: str, body: bytes) -> tuple[int, str, str]:
    with pytest.raises(MalformedRequestError) as caught:
        parse_request(path=path, body=body)
    error = caught.value
    return error.http_status, error.reason, error.message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": "m",}',
        b'{"messages": []} trailing',
        b'{"temperature": NaN, "messages": []}',
        b'{"model": "half a pair \\ud800"}',
        b'{"model": "\xff"}',
        b'\xef\xbb\xbf{"messages": []}',
        b'{"messages": ' + b"[" * 100_000,
        b'{"unknown": ' + b'{"a":' * 50_000,
        b'{"unknown": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
)
def test_what_is_not_json_is_a_400(path: str, body: bytes) -> None:
    status, reason, message = refusal(path, body)
    assert (status, reason) == (400, "malformed-json")
    assert message.startswith("The request body is ")


@pytest.mark.parametrize(
    ("path", "body", "mentions"),
    [
        (CHAT, b"[]", "object"),
        (CHAT, b"null", "object"),
        (CHAT, b"5", "object"),
        (CHAT, b"{}", "messages"),
        (CHAT, b'{"messages": null}', "$.messages"),
        (CHAT, b'{"messages": "hi"}', "$.messages"),
        (CHAT, b'{"messages": {"role": "user"}}', "$.messages"),
        (CHAT, b'{"messages": [], "model": 5}', "$.model"),
        (CHAT, b'{"messages": [], "model": ["m"]}', "$.model"),
        (CHAT, b'{"messages": [], "max_tokens": 1e400}', "out of range"),
        (COMPLETIONS, b'"text"', "object"),
        (COMPLETIONS, b'{"prompt": "x", "model": {}}', "$.model"),
    ],
)
def test_a_field_of_the_wrong_type_is_a_400_that_names_it(path: str, body: bytes, mentions: str) -> None:
    status, reason, message = refusal(path, body)
    assert (status, reason) == (400, "malformed-request")
    assert mentions in message


def test_the_last_of_two_equal_keys_counts_as_in_vllm() -> None:
    body = b'{"model": "first", "prompt": "x", "model": "last"}'
    assert parse_request(path=COMPLETIONS, body=body).model == "last"


def test_messages_of_any_shape_pass_because_the_pod_judges_them() -> None:
    body = b'{"messages": [5, null, [], {"role": 7}]}'
    (prompt,) = parse_request(path=CHAT, body=body).prompts
    assert getattr(prompt, "messages", None) == (5, None, [], {"role": 7})


NAMES = (
    *("model", "messages", "prompt", "stream", "max_tokens", "tools", "documents", "cache_salt", "suffix"),
    *("chat_template_kwargs", "add_generation_prompt", "reasoning_effort", "truncate_prompt_tokens"),
)
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(string.printable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS, "/other"]), body=st.dictionaries(st.sampled_from(NAMES), ANY_JSON))
def test_any_json_object_gives_a_request_or_a_400(path: str, body: dict[str, Any]) -> None:
    try:
        request = parse_request(path=path, body=json.dumps(body).encode())
    except MalformedRequestError:
        return
    assert isinstance(request, InferenceRequest)
    assert (request.unsupported_reason is None) or not request.prompts


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS, "/other"]), body=st.binary(max_size=60))
def test_any_bytes_give_a_request_or_a_400(path: str, body: bytes) -> None:
    try:
        parse_request(path=path, body=body)
    except MalformedRequestError as error:
        assert error.http_status == 400


@pytest.mark.parametrize(
    "body",
    [
        b'{"model": "m", "messages": [' + b'{"role":"user"},' * 200_000 + b"{}]}",
        b'{"model": "m", "prompt": [' + b"[]," * 200_000 + b"[]]}",
        b'{"model": "m", "prompt": [' + b"1," * 2_000_000 + b"1]}",
    ],
    ids=["messages", "lists", "tokens"],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_body_of_too_many_parts_is_not_decoded_at_all(path: str, body: bytes) -> None:
    request = parse_request(path=path, body=body)
    assert (request.prompts, request.unsupported_reason) == ((), "the body has too many parts to be read")


def test_a_large_text_is_no_body_of_many_parts() -> None:
    request = parse_request(path=COMPLETIONS, body=b'{"prompt": "' + b"words, words; " * 40_000 + b'"}')
    assert len(request.prompts) == 1
