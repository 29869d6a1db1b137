"""Why a chat cannot be rendered is logged and shown, so it never repeats what the client wrote."""

import json
from typing import Any

import pytest

from extproc.errors import ChatTemplateError
from extproc.prompts.chat_template import ChatTemplate
from extproc.requests.chat_messages import conversation
from extproc.requests.openai import parse_request

SECRET = "zebra7f3a"


def refusal(template: str, content: Any = SECRET, role: str = "user") -> str:
    body = json.dumps({"model": "m", "messages": [{"role": role, "content": content}]}).encode()
    [prompt] = parse_request(path="/v1/chat/completions", body=body).prompts
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(template, special_tokens={}).render(prompt)  # type: ignore[arg-type]
    return str(caught.value)


def test_a_templates_own_words_are_told() -> None:
    template = "{% for m in messages %}{{ raise_exception('roles must alternate') }}{% endfor %}"
    assert refusal(template) == "the chat template refused the conversation: roles must alternate"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ raise_exception('bad: ' + m.content) }}{% endfor %}",
        "{% for m in messages %}{{ raise_exception(m.content) }}{% endfor %}",
        "{% for m in messages %}{{ {}[m.content].x }}{% endfor %}",
        "{% for m in messages %}{{ m.content | int(base=99) }}{{ m.content.nothing() }}{% endfor %}",
    ],
)
def test_words_that_come_from_the_conversation_are_not(template: str) -> None:
    said = refusal(template)
    assert said.startswith("the chat template refused the conversation: ")
    assert SECRET not in said


@pytest.mark.parametrize("kind", [SECRET, {"x": SECRET}, 7])
def test_unknown_types_of_content_parts_are_not_repeated(kind: Any) -> None:
    messages = [{"role": "user", "content": [{"type": kind, "text": SECRET}]}]
    with pytest.raises(ChatTemplateError, match="content parts of an unknown type are not text"):
        conversation(messages, content_format="openai")


def test_known_types_of_content_parts_are_told() -> None:
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SECRET}}]}]
    with pytest.raises(ChatTemplateError, match="content parts of type image_url are not text"):
        conversation(messages, content_format="openai")
