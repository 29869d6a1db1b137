"""What `parse_request` answers to bodies that no pod could serve, and that no body ends the process."""

import json
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extproc.errors import MalformedRequestError
from extproc.requests.openai import parse_request
from extproc.requests.request import InferenceRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def refusal(path: str, body: bytes) -> tuple[int, str, str]:
    with pytest.raises(MalformedRequestError) as caught:
        parse_request(path=path, body=body)
    error = caught.value
    return error.http_status, error.reason, error.message


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings"])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"hello",
        b'{"model": "m",}',
        b'{"messages": []} trailing',
        b'{"model": "\xff"}',
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
        (CHAT, b'{"messages": [], "model": "half a pair \\ud800"}', "Unicode"),
        (CHAT, b'{"messages": 5, "x": NaN}', "$.messages"),
        (CHAT, b'{"messages": "half a pair \\ud800"}', "wrong type"),
        (CHAT, b"NaN", "object"),
        ("/v1/messages", b'{"messages": "hi"}', "$.messages"),
        ("/v1/messages", b"{}", "messages"),
        ("/v1/responses", b'{"input": "x", "model": 5}', "$.model"),
        ("/v1/embeddings", b'{"input": "x", "model": 5}', "$.model"),
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
    *("role", "content", "type", "text", "input", "instructions", "system", "thinking", "name", "arguments", "id"),
    *("tool", "status", "call_id", "summary", "source", "input_schema", "definition", "reasoning", "metadata"),
    *("truncation_side", "token_ids", "tool_use_id", "output", "namespace"),
)
# what items, blocks and messages are made of, so that the random ones get far
WORDS = (
    *("user", "assistant", "system", "text", "input_text", "tool_use", "tool_result", "function_call", "reasoning"),
    *("message", "image", "thinking", "tool_addition", "tool_definition", "function", "namespace", "in_progress"),
)
PATHS = (
    *(CHAT, COMPLETIONS, "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling", "/score", "/other"),
    *("/v1/chat/completions/batch", "/inference/v1/generate"),
)
ANY_JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS) | st.text(string.printable),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.thorough
@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(path=st.sampled_from(PATHS), body=st.dictionaries(st.sampled_from(NAMES), ANY_JSON))
def test_any_json_object_gives_a_request_or_a_400(path: str, body: dict[str, Any]) -> None:
    try:
        request = parse_request(path=path, body=json.dumps(body).encode())
    except MalformedRequestError:
        return
    assert isinstance(request, InferenceRequest)
    assert (request.unsupported_reason is None) or not request.prompts


@settings(max_examples=150)
@given(path=st.sampled_from(PATHS), body=st.binary(max_size=60))
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


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [], "model": "m", "x": NaN}',
        b'{"messages": [], "model": "m", "x": [-Infinity, Infinity]}',
        b'{"messages": [], "model": "m", "max_tokens": 1e400}',
        b'{"messages": [], "model": "m", "x": "half a pair \\ud83d"}',
        b'\xef\xbb\xbf{"messages": [], "model": "m"}',
        '{"messages": [], "model": "m"}'.encode("utf-16"),
        '{"messages": [], "model": "m"}'.encode("utf-32-le"),
    ],
    ids=["NaN", "Infinity", "beyond a float", "lone surrogate", "BOM", "UTF-16", "UTF-32"],
)
def test_what_only_pythons_parser_takes_is_read_because_vllm_reads_it(body: bytes) -> None:
    request = parse_request(path=CHAT, body=body)
    assert (request.model, len(request.prompts), request.max_tokens) == ("m", 1, None)


def test_names_that_cannot_be_written_down_are_not_handed_on() -> None:
    body = b'{"messages": [], "user": "half \\ud83d", "cache_salt": "half \\ud83d"}'
    request = parse_request(path=CHAT, body=body)
    assert (request.user, request.cache_salt, len(request.prompts)) == (None, None, 1)


def test_integers_and_floats_keep_their_value_whatever_their_size() -> None:
    body = b'{"messages": [123456789012345678901234567890, -0, 1.0, 1E2, 18446744073709551616]}'
    (prompt,) = parse_request(path=CHAT, body=body).prompts
    assert (
        repr(getattr(prompt, "messages", None))
        == "(123456789012345678901234567890, 0, 1.0, 100.0, 18446744073709551616)"
    )


def test_a_large_body_that_only_pythons_parser_would_take_is_routed_on_load() -> None:
    request = parse_request(path=COMPLETIONS, body=b'{"x": NaN, "prompt": "' + b"a" * 2_000_000 + b'"}')
    assert request.prompts == ()
    assert request.unsupported_reason is not None
    assert request.unsupported_reason.startswith("the body is large")


@pytest.mark.parametrize("path", ["/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v2/rerank", "/v2/embed"])
@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 5}'])
def test_short_paths_never_answer_for_the_pod_because_another_application_may_have_them(path: str, body: bytes) -> None:
    request = parse_request(path=path, body=body)
    assert (request.model, request.prompts, request.unsupported_reason) == (
        None,
        (),
        "the body is not what this API takes",
    )


@pytest.mark.parametrize(
    ("path", "field", "prompt"),
    [
        (COMPLETIONS, "prompt", "a"),
        (COMPLETIONS, "prompt", [1]),
        ("/v1/embeddings", "input", "a"),
        ("/v1/embeddings", "input", [{"role": "user", "content": "a"}]),
        ("/v1/chat/completions/batch", "messages", [{"role": "user", "content": "a"}]),
    ],
)
def test_a_batch_of_very_many_prompts_is_routed_on_load(path: str, field: str, prompt: Any) -> None:
    def parse(count: int) -> InferenceRequest:
        return parse_request(path=path, body=json.dumps({"model": "m", field: [prompt] * count}).encode())

    assert len(parse(4_096).prompts) == 4_096
    assert parse(4_097).prompts == ()
    assert (parse(4_097).model, parse(4_097).unsupported_reason) == ("m", "there are more than 4,096 prompts")
