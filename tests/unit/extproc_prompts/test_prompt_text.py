"""The text of a body whose tokens cannot be known here is found in every API."""

import json
from typing import Any

import pytest

from extproc.prompts.text_chunks import prompt_in_body
from extproc.requests.request import ChatPrompt, Prompt, TextPrompt

USER = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        pytest.param({"messages": [USER], "model": 5}, ChatPrompt(messages=(USER,)), id="chat"),
        pytest.param(
            {"messages": [USER], "tools": [{"name": "t"}]},
            ChatPrompt(messages=(USER,), tools=({"name": "t"},)),
            id="chat with tools",
        ),
        pytest.param(
            {"system": "Be brief.", "messages": [USER]},
            ChatPrompt(messages=({"role": "system", "content": "Be brief."}, USER)),
            id="messages",
        ),
        pytest.param(
            {"instructions": "Be brief.", "input": [USER]},
            ChatPrompt(messages=({"role": "system", "content": "Be brief."}, USER)),
            id="responses",
        ),
        pytest.param(
            {"instructions": "Be brief.", "input": "Hi"},
            ChatPrompt(messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})),
            id="responses with a text",
        ),
        pytest.param({"prompt": "Hi", "suffix": "there"}, TextPrompt(text="Hi"), id="completion"),
        pytest.param({"prompt": ["a", "b"]}, TextPrompt(text="a"), id="completions"),
        pytest.param({"input": "Hi"}, TextPrompt(text="Hi"), id="embeddings"),
        pytest.param({"prompt": [1, 2]}, None, id="token ids"),
        pytest.param({"messages": []}, None, id="no messages"),
        pytest.param({"messages": "Hi"}, None, id="messages of another type"),
        pytest.param({}, None, id="nothing"),
        pytest.param([], None, id="no object"),
    ],
)
def test_the_prompt_is_found(body: Any, expected: Prompt | None) -> None:
    assert prompt_in_body(json.dumps(body).encode()) == expected


@pytest.mark.parametrize("body", [b"", b"\xff\x00", b"[" * 100_000, b'{"prompt": NaN}'])
def test_what_is_no_json_has_no_prompt(body: bytes) -> None:
    assert prompt_in_body(body) is None


def test_a_body_with_too_many_parts_is_not_read_here_either() -> None:
    body = b'{"messages":[' + b"{}," * 100_000 + b"{}]}"
    assert prompt_in_body(body) is None
