"""What `parse_request` makes of /v1/messages; test_api_parity compares the tokens with a real vLLM's."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, ChatPrompt, InferenceRequest

PATH = "/v1/messages"
HELLO = {"role": "user", "content": "Hello"}
BILLING = "x-anthropic-billing-header: cch=1;"


def parse(**body: Any) -> InferenceRequest:
    """Read a body; how long it is does not count."""
    return replace(parse_request(path=PATH, body=json.dumps(body).encode()), body_bytes=0)


def chat_prompt(**body: Any) -> ChatPrompt:
    (prompt,) = parse(**{"messages": [HELLO], **body}).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def said(role: str, *blocks: Any) -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_a_plain_conversation_is_a_chat_with_its_system_prompt_first() -> None:
    body = {
        "model": "m",
        "system": "Be brief.",
        "messages": [HELLO],
        "max_tokens": 5,
        "stream": True,
        "cache_salt": "s",
    }
    assert parse(**body) == InferenceRequest(
        api=ApiKind.MESSAGES,
        path=PATH,
        model="m",
        prompts=(ChatPrompt(messages=({"role": "system", "content": "Be brief."}, HELLO)),),
        stream=True,
        max_tokens=5,
        cache_salt="s",
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (said("user", text("a")), [{"role": "user", "content": "a"}]),
        (said("user", text("a"), text("b")), [said("user", text("a"), text("b"))]),
        (said("user", {**text("a"), "cache_control": {"type": "ephemeral"}}), [{"role": "user", "content": "a"}]),
        (said("user", text("")), []),
        (said("user"), []),
        (said("assistant"), [{"role": "assistant"}]),
        (
            said("assistant", {"type": "thinking", "thinking": "Hm."}, {"type": "redacted_thinking"}, text("Yes")),
            [{"role": "assistant", "reasoning": "Hm.", "content": "Yes"}],
        ),
        (
            said("assistant", {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}}),
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
                }
            ],
        ),
        (
            said("user", text("before"), {"type": "tool_result", "tool_use_id": "t1", "content": "rain"}),
            [{"role": "tool", "tool_call_id": "t1", "content": "rain"}, {"role": "user", "content": "before"}],
        ),
        (
            said("user", {"type": "tool_result", "tool_use_id": "t1", "content": [text("a"), text("b")]}),
            [{"role": "tool", "tool_call_id": "t1", "content": "a\nb"}],
        ),
        (
            said("user", {"type": "tool_result", "content": [{"type": "tool_reference", "tool_name": "f"}]}),
            [
                {"role": "tool", "tool_call_id": "", "content": ""},
                {"role": "tool", "tool_call_id": "", "content": [{"type": "tool_reference", "name": "f"}]},
            ],
        ),
        (
            said("assistant", {"type": "tool_result", "content": "odd"}),
            [{"role": "assistant", "content": "Tool result: odd"}],
        ),
    ],
)
def test_blocks_become_the_messages_that_vllm_makes_of_them(message: dict[str, Any], expected: list[Any]) -> None:
    assert chat_prompt(messages=[message]).messages == tuple(expected)


def test_the_line_that_is_new_in_every_request_is_dropped_from_system_prompts() -> None:
    later = [{"role": "system", "content": BILLING}, said("system", text(BILLING), text("c"), text("d"))]
    prompt = chat_prompt(system=[text(BILLING), text("a"), text("b")], messages=[HELLO, *later])
    assert prompt.messages == (
        {"role": "system", "content": "ab"},
        HELLO,
        {"role": "system", "content": "cd"},
    )


def test_later_system_messages_come_with_an_alternative_for_templates_that_refuse_them() -> None:
    prompt = chat_prompt(system="a ", messages=[HELLO, {"role": "system", "content": "b"}, HELLO])
    assert prompt.messages == ({"role": "system", "content": "a "}, HELLO, {"role": "system", "content": "b"}, HELLO)
    assert prompt.messages_system_first == ({"role": "system", "content": "a b"}, HELLO, HELLO)


def test_without_later_system_messages_there_is_no_alternative() -> None:
    assert chat_prompt(system="a").messages_system_first is None


def test_tools_become_functions_with_an_object_as_their_schema() -> None:
    tools = [{"name": "f", "description": "d", "input_schema": {"b": 1, "a": 2}, "cache_control": {}}]
    function = {
        "name": "f",
        "description": "d",
        "parameters": {"b": 1, "a": 2, "type": "object"},
        "strict": None,
        "defer_loading": None,
    }
    assert chat_prompt(tools=tools).tools == ({"type": "function", "function": function},)
    assert chat_prompt(tools=[]).tools == ()


def test_tools_that_are_added_and_removed_on_the_way_count_as_they_are_in_the_end() -> None:
    tools = [
        {"name": "old", "input_schema": {"type": "object"}},
        {"name": "late", "input_schema": {"type": "object"}, "defer_loading": True},
    ]
    changes = said(
        "system",
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "old"}},
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "late"}},
        {
            "type": "tool_addition",
            "tool": {"type": "tool_definition", "definition": {"name": "new", "input_schema": {"type": "object"}}},
        },
    )
    shown = chat_prompt(tools=tools, messages=[HELLO, changes]).tools or ()
    assert [(tool["function"]["name"], tool["function"]["defer_loading"]) for tool in shown] == [
        ("late", None),
        ("new", None),
    ]


@pytest.mark.parametrize(
    ("fields", "kwargs", "low"),
    [
        ({}, {}, None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, {}, None),
        ({"output_config": {"effort": "max"}}, {"reasoning_effort": "max", "enable_thinking": True}, None),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "max"}},
            {"reasoning_effort": "none", "enable_thinking": False},
            {"reasoning_effort": "low", "enable_thinking": True},
        ),
    ],
)
def test_thinking_and_effort_become_template_variables(
    fields: dict[str, Any], kwargs: dict[str, Any], low: dict[str, Any] | None
) -> None:
    prompt = chat_prompt(**fields)
    assert (prompt.chat_template_kwargs, prompt.kwargs_low_effort) == (kwargs, low)


@pytest.mark.parametrize(
    ("source", "url"),
    [
        ({"type": "url", "url": "http://x/y.png"}, "http://x/y.png"),
        ({"type": "base64", "media_type": "image/png", "data": "AAAA"}, "data:image/png;base64,AAAA"),
        ({"data": "AAAA"}, "data:image/jpeg;base64,AAAA"),
    ],
)
def test_an_image_is_media_in_a_message_and_in_a_tools_result(source: dict[str, Any], url: str) -> None:
    image, part = {"type": "image", "source": source}, {"type": "image_url", "image_url": {"url": url}}
    shown = parse(messages=[said("user", image, text("What?"))])
    assert shown.prompts == (ChatPrompt(messages=(said("user", part, text("What?")),)),)
    returned = parse(messages=[said("user", {"type": "tool_result", "tool_use_id": "t", "content": [image]})])
    assert returned.prompts == (
        ChatPrompt(messages=({"role": "tool", "tool_call_id": "t", "content": ""}, said("user", part))),
    )
    assert (shown.has_media, returned.has_media) == (True, True)


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [5]},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [said("user", "text")]},
        {"messages": [said("user", {"type": "odd"})]},
        {"messages": [said("user", {"type": "text", "text": 5})]},
        {"messages": [said("user", {"type": "tool_addition", "tool": {}})]},
        {"messages": [said("assistant", {"type": "tool_use", "name": "f", "input": {}})]},
        {"messages": [said("assistant", {"type": "tool_use", "id": "t", "input": "x"})]},
        {"messages": [HELLO], "system": 5},
        {"messages": [HELLO], "system": [{"type": "text", "text": 5}]},
        {"messages": [HELLO], "tools": "all"},
        {"messages": [HELLO], "tools": [{"name": "f"}]},
        {"messages": [HELLO], "thinking": "off"},
        {"messages": [said("system", {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "f"}})]},
    ],
)
def test_what_vllm_refuses_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(model="m", **body)
    assert (request.api, request.model, request.prompts) == (ApiKind.MESSAGES, "m", ())
    assert request.unsupported_reason
