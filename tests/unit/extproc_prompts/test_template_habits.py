"""What a chat template does with later system messages and with thinking switched off, found out by trying."""

import pytest

from extproc.errors import ChatTemplateError
from extproc.prompts.chat_template import cannot_disable_thinking, refuses_later_system
from extproc.requests.request import ChatPrompt

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "refuses"),
    [
        (PLAIN, False),
        (FIRST_ONLY, True),
        ("{% for m in messages %}{% break %}{% endfor %}", False),
        ("{% generation %}", True),
        ("{{ messages[9].content.x }}", True),
        ("{{ 1 // 0 }}", True),
        ("", True),
    ],
)
def test_a_template_refuses_later_system_messages_where_vllms_probe_fails(source: str, refuses: bool) -> None:
    assert refuses_later_system(source) is refuses


def by_thinking(prompt: ChatPrompt) -> str:
    return "think" if prompt.chat_template_kwargs["enable_thinking"] else "answer"


def by_effort(prompt: ChatPrompt) -> str:
    return f"effort {prompt.chat_template_kwargs['reasoning_effort']}"


def unknown_is_max(prompt: ChatPrompt) -> str:
    effort = prompt.chat_template_kwargs["reasoning_effort"]
    return effort if effort in ("low", "medium", "high") else "max"


def strict(prompt: ChatPrompt) -> str:
    if prompt.chat_template_kwargs["reasoning_effort"] == "none":
        raise ChatTemplateError("no such effort")
    return "think"


def indifferent(prompt: ChatPrompt) -> str:
    return str(len(prompt.messages))


@pytest.mark.parametrize(
    ("render", "cannot"),
    [(by_thinking, False), (by_effort, False), (unknown_is_max, True), (strict, True), (indifferent, True)],
)
def test_thinking_cannot_be_switched_off_where_none_is_refused_or_like_an_effort(render, cannot: bool) -> None:  # type: ignore[no-untyped-def]
    assert cannot_disable_thinking(render) is cannot
