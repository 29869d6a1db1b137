"""What `parse_request` makes of bodies that vLLM would serve."""

import json
from typing import Any

import pytest

from extproc.core.request import ApiKind, ChatPrompt, InferenceRequest, TextPrompt, TokenPrompt
from extproc.wire.openai import parse_request

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"role": "user", "content": "Hello"}


def parse(path: str, **body: Any) -> InferenceRequest:
    return parse_request(path=path, body=json.dumps(body).encode())


def chat_prompt(**body: Any) -> ChatPrompt:
    (prompt,) = parse(CHAT, **{"messages": [HELLO], **body}).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def test_a_plain_chat_has_vllms_defaults() -> None:
    assert parse(CHAT, model="m", messages=[HELLO]) == InferenceRequest(
        api=ApiKind.CHAT_COMPLETIONS, path=CHAT, model="m", prompts=(ChatPrompt(messages=(HELLO,)),)
    )


def test_every_field_of_a_chat_that_changes_its_tokens_is_kept() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    request = parse(
        CHAT,
        model=None,
        messages=[HELLO],
        tools=[tool],
        documents=[{"title": "t", "text": "d"}],
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        chat_template_kwargs={"custom": {"b": 1, "a": 2}},
        stream=True,
        max_tokens=5,
        cache_salt="salt",
    )
    assert request == InferenceRequest(
        api=ApiKind.CHAT_COMPLETIONS,
        path=CHAT,
        prompts=(
            ChatPrompt(
                messages=(HELLO,),
                tools=(tool,),
                documents=({"title": "t", "text": "d"},),
                add_generation_prompt=False,
                continue_final_message=True,
                add_special_tokens=True,
                chat_template_kwargs={"custom": {"b": 1, "a": 2}},
            ),
        ),
        stream=True,
        max_tokens=5,
        cache_salt="salt",
    )


def test_max_completion_tokens_wins_over_max_tokens() -> None:
    assert parse(CHAT, messages=[HELLO], max_tokens=5, max_completion_tokens=7).max_tokens == 7


def test_null_and_auto_template_variables_count_as_not_given() -> None:
    kwargs = {"a": None, "b": "auto", "c": False, "d": ""}
    assert chat_prompt(chat_template_kwargs=kwargs).chat_template_kwargs == {"c": False, "d": ""}


@pytest.mark.parametrize(
    ("effort", "kwargs", "expected"),
    [
        ("low", {}, {"reasoning_effort": "low", "enable_thinking": True}),
        ("none", {}, {"reasoning_effort": "none", "enable_thinking": False}),
        ("high", {"enable_thinking": False}, {"reasoning_effort": "high", "enable_thinking": False}),
    ],
)
def test_a_reasoning_effort_switches_thinking_unless_the_request_says_otherwise(
    effort: str, kwargs: dict[str, Any], expected: dict[str, Any]
) -> None:
    prompt = chat_prompt(reasoning_effort=effort, chat_template_kwargs=kwargs)
    assert prompt.chat_template_kwargs == expected


@pytest.mark.parametrize("word", ["true", "Yes", "on", "1", 1])
def test_booleans_may_be_spelled_as_pydantic_takes_them(word: Any) -> None:
    assert parse(CHAT, messages=[HELLO], stream=word).stream is True


@pytest.mark.parametrize("word", ["false", "No", "off", "0", 0])
def test_a_generation_prompt_can_be_switched_off_in_words(word: Any) -> None:
    assert chat_prompt(add_generation_prompt=word).add_generation_prompt is False


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", (TextPrompt(text="text"),)),
        ("", (TextPrompt(text=""),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2, 4095], (TokenPrompt.of([1, 2, 4095]),)),
        ([[1], [2, 3]], (TokenPrompt.of([1]), TokenPrompt.of([2, 3]))),
        ([True, 0], (TokenPrompt.of([1, 0]),)),
        ([4294967295], (TokenPrompt.of([4294967295]),)),
    ],
)
def test_all_four_forms_of_a_completion_prompt_are_understood(prompt: Any, expected: tuple[Any, ...]) -> None:
    assert parse(COMPLETIONS, model="m", prompt=prompt) == InferenceRequest(
        api=ApiKind.COMPLETIONS, path=COMPLETIONS, model="m", prompts=expected, max_tokens=16
    )


def test_token_ids_are_packed_as_little_endian_uint32() -> None:
    assert TokenPrompt.of([1, 258]).token_bytes == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_a_completion_may_do_without_special_tokens() -> None:
    request = parse(COMPLETIONS, prompt="x", add_special_tokens=False)
    assert request.prompts == (TextPrompt(text="x", add_special_tokens=False),)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": []},
        {"prompt": 5},
        {"prompt": {"text": "x"}},
        {"prompt": [1, "a"]},
        {"prompt": ["a", 1]},
        {"prompt": ["a", ["b"]]},
        {"prompt": [[1], "a"]},
        {"prompt": [1.0]},
        {"prompt": [[1.5]]},
        {"prompt": [-1]},
        {"prompt": [4294967296]},
        {"prompt": [10**30]},
        {"prompt": "x", "prompt_embeds": "AAAA"},
        {"prompt": "x", "suffix": "y"},
        {"prompt": "x", "truncate_prompt_tokens": 5},
    ],
)
def test_a_completion_whose_tokens_cannot_be_known_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(COMPLETIONS, model="m", **body)
    assert (request.model, request.prompts) == ("m", ())
    assert request.unsupported_reason


@pytest.mark.parametrize(
    "body",
    [
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": [1]},
        {"truncate_prompt_tokens": -1},
        {"tools": "weather"},
        {"documents": {"title": "x"}},
    ],
)
def test_a_chat_whose_tokens_cannot_be_known_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(CHAT, model="m", messages=[HELLO], **body)
    assert (request.model, request.prompts) == ("m", ())
    assert request.unsupported_reason


def test_prefix_and_query_string_do_not_hide_the_api() -> None:
    request = parse_request(path="/team/v1/chat/completions?x=/v1/completions", body=b'{"messages": []}')
    assert (request.api, request.path) == (ApiKind.CHAT_COMPLETIONS, "/team/v1/chat/completions")


@pytest.mark.parametrize(
    ("path", "method", "body", "model"),
    [
        ("/v1/models", "GET", b"", None),
        ("/v1/chat/completions", "GET", b"", None),
        ("/v1/embeddings", "POST", b'{"model": "e", "input": "x"}', "e"),
        ("/v1/responses", "POST", b'{"model": 5}', None),
        ("/v1/chat/completions/render", "POST", b'{"model": "m", "messages": []}', "m"),
        ("/upload", "POST", b"\xff\xfe not json", None),
        ("/deep", "POST", b"[" * 100_000, None),
        ("", "POST", b"", None),
    ],
)
def test_other_paths_have_no_prompt_and_never_fail(path: str, method: str, body: bytes, model: str | None) -> None:
    request = parse_request(path=path, method=method, body=body)
    assert request == InferenceRequest(api=ApiKind.OTHER, path=path, model=model)


@pytest.mark.parametrize("body_type", [bytes, bytearray, memoryview])
def test_the_body_is_only_read(body_type: Any) -> None:
    raw = b'{"messages": [{"role": "user", "content": "caf\\u00e9"}], "unknown": [1, 2]}'
    body = body_type(raw)
    assert parse_request(path=CHAT, body=body).prompts == (ChatPrompt(messages=({"role": "user", "content": "café"},)),)
    assert bytes(body) == raw
