"""What `parse_request` makes of the APIs of pooling models."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.requests.openai import parse_request
from extproc.requests.request import (
    ApiKind,
    ChatPrompt,
    InferenceRequest,
    PairPrompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
    TruncationSide,
)

EMBEDDINGS = "/v1/embeddings"
HELLO = {"role": "user", "content": "Hello"}
CHAT = ChatPrompt(messages=(HELLO,), add_generation_prompt=False)


def parse(path: str, **body: Any) -> InferenceRequest:
    """Read a body; how long it is does not count."""
    return replace(parse_request(path=path, body=json.dumps(body).encode()), body_bytes=0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("text", (TextPrompt(text="text"),)),
        (["a", "b"], (TextPrompt(text="a"), TextPrompt(text="b"))),
        ([1, 2], (TokenPrompt.of([1, 2]),)),
        ([[1], [2, 3]], (TokenPrompt.of([1]), TokenPrompt.of([2, 3]))),
    ],
)
@pytest.mark.parametrize(
    ("path", "api"),
    [
        (EMBEDDINGS, ApiKind.EMBEDDINGS),
        ("/pooling", ApiKind.POOLING),
        ("/classify", ApiKind.POOLING),
    ],
)
def test_all_four_forms_of_an_input_are_understood(
    path: str, api: ApiKind, given: Any, expected: tuple[Any, ...]
) -> None:
    assert parse(path, model="m", input=given) == InferenceRequest(
        api=api, path=path, model="m", prompts=expected, max_tokens=0
    )


@pytest.mark.parametrize(
    ("body", "prompts"),
    [
        ({"messages": [HELLO]}, (CHAT,)),
        ({"input": [HELLO]}, (CHAT,)),
        ({"messages": [[HELLO], [HELLO]]}, (CHAT, CHAT)),
        ({"input": [[HELLO], [HELLO]]}, (CHAT, CHAT)),
    ],
)
def test_embeddings_take_conversations_in_both_fields(body: dict[str, Any], prompts: tuple[Any, ...]) -> None:
    assert parse(EMBEDDINGS, **body).prompts == prompts


def test_a_conversation_to_be_classified_has_vllms_defaults_and_its_own_flags() -> None:
    body = {
        "messages": [HELLO],
        "add_generation_prompt": True,
        "add_special_tokens": True,
        "chat_template_kwargs": {"a": 1},
    }
    assert parse("/classify", **body).prompts == (
        ChatPrompt(
            messages=(HELLO,), add_generation_prompt=True, add_special_tokens=True, chat_template_kwargs={"a": 1}
        ),
    )


def test_an_input_is_cut_on_the_right_unless_the_request_names_the_side() -> None:
    assert parse(EMBEDDINGS, input="x", truncate_prompt_tokens=-1).truncation == Truncation(
        tokens=-1, side=TruncationSide.RIGHT
    )
    assert parse(EMBEDDINGS, input="x", truncate_prompt_tokens=5, truncation_side="left").truncation == Truncation(
        tokens=5, side=TruncationSide.LEFT, keeps_special_tokens=False
    )


def test_an_image_in_a_conversation_is_media() -> None:
    request = parse(
        EMBEDDINGS, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}]
    )
    assert (request.has_media, len(request.prompts)) == (True, 1)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": None},
        {"input": 5},
        {"input": []},
        {"input": [1.5]},
        {"input": "x", "messages": [HELLO]},
        {"messages": "x"},
        {"messages": []},
        {"messages": [HELLO], "chat_template": "x"},
        {"input": "x", "padding": "max_length"},
        {"input": "x", "truncate_prompt_tokens": -5},
    ],
)
@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling"])
def test_what_vllm_refuses_or_pads_is_left_to_the_pod(path: str, body: dict[str, Any]) -> None:
    request = parse(path, model="m", **body)
    assert (request.model, request.prompts, request.max_tokens) == ("m", (), 0)
    assert request.unsupported_reason


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
        ("/v1/score", {"queries": ["a"], "documents": ["b", "c"]}),
        ("/v1/score", {"queries": ["a", "a"], "items": ["b", "c"]}),
        ("/score", {"data_1": "a", "data_2": ["b", "c"]}),
        ("/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/v2/rerank", {"query": "a", "documents": ["b", "c"], "top_n": 1}),
    ],
)
def test_each_document_is_a_pair_with_its_query(path: str, body: dict[str, Any]) -> None:
    request = parse(path, model="m", **body)
    assert (request.prompts, request.max_tokens) == (
        (PairPrompt(query="a", document="b"), PairPrompt(query="a", document="c")),
        0,
    )


def test_an_instruction_is_a_variable_of_the_template() -> None:
    request = parse("/rerank", query="a", documents=["b"], instruction="i", chat_template_kwargs={"x": 1})
    assert request.prompts == (PairPrompt(query="a", document="b", chat_template_kwargs={"instruction": "i", "x": 1}),)


@pytest.mark.parametrize(
    ("path", "api", "body"),
    [
        ("/score", ApiKind.SCORE, {"text_1": "a", "documents": ["b"]}),
        ("/score", ApiKind.SCORE, {"text_1": ["a", "b"], "text_2": ["b"]}),
        ("/score", ApiKind.SCORE, {"text_1": "a", "text_2": []}),
        ("/score", ApiKind.SCORE, {"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}),
        ("/rerank", ApiKind.RERANK, {"query": "a", "documents": [{"content": [{"type": "text", "text": "b"}]}]}),
        ("/rerank", ApiKind.RERANK, {"query": "a", "documents": ["b"], "chat_template_kwargs": 5}),
        ("/v2/embed", ApiKind.EMBEDDINGS, {"texts": ["a"], "input_type": "query"}),
        ("/pooling", ApiKind.POOLING, {"data": {"image": "x"}, "task": "plugin"}),
    ],
)
def test_where_only_the_model_tells_the_tokens_the_request_says_so(
    path: str, api: ApiKind, body: dict[str, Any]
) -> None:
    request = parse(path, model="m", user="ann", **body)
    assert (request.api, request.model, request.user, request.prompts, request.max_tokens) == (api, "m", "ann", (), 0)
    assert request.unsupported_reason
