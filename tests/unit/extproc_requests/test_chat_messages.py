"""The shape of messages and tools that templates get. Expected values were recorded from vLLM 0.32's own code."""

import copy
import json
from typing import Any

import pytest

from extproc.errors import ChatTemplateError
from extproc.requests.chat_messages import ContentFormat, conversation, developer_as_system, function_tools


def one(message: Any, content_format: ContentFormat = "string") -> str:
    """Return one message as JSON text: templates may dump it, so the order of keys counts."""
    (result,) = conversation([message], content_format=content_format)
    return json.dumps(result)


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("message", "as_string", "as_parts"),
    [
        (
            {"role": "user", "content": "x"},
            '{"role": "user", "content": "x"}',
            '{"role": "user", "content": [{"type": "text", "text": "x"}]}',
        ),
        ({"role": "user"}, '{"role": "user", "content": ""}', '{"role": "user", "content": []}'),
        (
            {"role": "user", "content": [{"text": "a", "type": "text"}, {"type": "text", "text": ""}, "b"]},
            '{"role": "user", "content": "a\\nb"}',
            '{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""},'
            ' {"type": "text", "text": "b"}]}',
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 1, "name": "gone"}]},
            '{"role": "user", "content": "a"}',
            '{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": 1}]}',
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}]},
            '{"role": "assistant", "content": "no"}',
            '{"role": "assistant", "content": [{"type": "text", "text": "no"}]}',
        ),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "closed": True}]},
            '{"role": "assistant", "content": "hm"}',
            '{"role": "assistant", "content": [{"type": "text", "text": "hm"}]}',
        ),
        (
            {"name": "n", "extra": 1, "tool_call_id": "t", "role": "tool", "content": [{"type": "text", "text": "a"}]},
            '{"role": "tool", "content": "a", "tool_call_id": "t", "name": "n"}',
            '{"role": "tool", "content": "a", "tool_call_id": "t", "name": "n"}',
        ),
        (
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "tool_reference", "name": "t"}]},
            '{"role": "tool", "content": "t", "tool_call_id": "1"}',
            '{"role": "tool", "content": [{"type": "tool_reference", "name": "t"}], "tool_call_id": "1"}',
        ),
        (
            {"role": "system", "content": "x-anthropic-billing-header: cch=1\nrest"},
            '{"role": "system", "content": "rest"}',
            '{"role": "system", "content": [{"type": "text", "text": "rest"}]}',
        ),
        (
            {"role": "system", "content": "x-anthropic-billing-header: cch=1"},
            '{"role": "system", "content": ""}',
            '{"role": "system", "content": []}',
        ),
    ],
)
def test_content_is_a_string_or_parts_as_the_template_wants(message: Any, as_string: str, as_parts: str) -> None:
    assert (one(message, "string"), one(message, "openai")) == (as_string, as_parts)


def test_tool_calls_get_mappings_for_arguments_and_vllms_key_order() -> None:
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "index": 0,
                "type": "function",
                "function": {"name": "f", "arguments": '{"b": 1, "a": 2}', "zzz": 1},
                "id": "x",
            }
        ],
    }
    assert one(message) == (
        '{"role": "assistant", "content": "", "tool_calls": [{"id": "x", "function": '
        '{"arguments": {"b": 1, "a": 2}, "name": "f", "zzz": 1}, "type": "function", "index": 0}]}'
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{bad", {}),
        ("[1]", {}),
        ("42", {}),
        ("null", {}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ('{"a": 1, "a": 12345678901234567890123, "c": 1e400}', {"a": 12345678901234567890123, "c": float("inf")}),
    ],
)
def test_arguments_that_are_not_an_object_become_an_empty_one(arguments: Any, expected: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [call(arguments)]}
    (result,) = conversation([message], content_format="string")
    assert result["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_dropped(calls: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": calls}
    assert one(message) == '{"role": "assistant", "content": "x"}'


@pytest.mark.parametrize(
    "fields",
    [{"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "reasoning_content": "old"}],
)
def test_reasoning_has_both_names(fields: dict[str, str]) -> None:
    assert one({"role": "assistant", "content": "a", **fields}) == (
        '{"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}'
    )


@pytest.mark.parametrize(
    "message",
    [
        5,
        None,
        {},
        {"role": 5},
        {"role": "user", "content": 5},
        {"role": "user", "content": {"type": "text"}},
        {"role": "user", "content": [5]},
        {"role": "user", "content": [{"text": "no type"}]},
        {"role": "user", "content": [{"type": "text", "text": 5}]},
        {"role": "user", "content": [{"type": "text", "text": "x", "uuid": "u"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"role": "assistant", "tool_calls": {}},
        {"role": "assistant", "tool_calls": [5]},
        {"role": "assistant", "tool_calls": [{"type": "custom", "function": {}}]},
        {"role": "assistant", "tool_calls": [call("[" * 100_000)]},
    ],
)
def test_messages_without_a_text_are_refused(message: Any) -> None:
    with pytest.raises(ChatTemplateError):
        conversation([message], content_format="string")


def test_tools_have_vllms_fields_in_vllms_order() -> None:
    tools = [
        {
            "function": {"strict": True, "parameters": {"z": 1, "a": {"$ref": 1}}, "name": "f", "x": 1},
            "type": "function",
            "y": 1,
        },
        {"type": "function", "function": {"name": "g", "description": "d"}, "defer_loading": True},
    ]
    assert json.dumps(function_tools(tools)) == (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": '
        '{"z": 1, "a": {"$ref": 1}}, "strict": true}}, {"type": "function", "function": {"name": "g", '
        '"description": "d", "parameters": null, "defer_loading": true}, "defer_loading": true}]'
    )
    assert function_tools(None) is None


@pytest.mark.parametrize("tool", [5, {}, {"function": {}}, {"function": {"name": 5}}])
def test_tools_without_a_name_are_refused(tool: Any) -> None:
    with pytest.raises(ChatTemplateError):
        function_tools([tool])


def test_developer_messages_join_the_system_message_in_front() -> None:
    messages = conversation(
        [
            {"role": "user", "content": "x"},
            {"role": "developer", "content": "A", "tools": [{"type": "function", "function": {"name": "q"}}]},
            {"role": "system", "content": ""},
            {"role": "system", "content": "B"},
        ],
        content_format="string",
    )
    assert developer_as_system(messages) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "x"},
    ]


def test_the_clients_objects_are_not_changed() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "x-anthropic-billing-header\nx"}]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"a": 1}')], "reasoning_content": "r"},
    ]
    before = copy.deepcopy(messages)
    conversation(messages, content_format="openai")
    assert messages == before


def test_arguments_with_a_number_too_long_to_be_read_are_no_crash() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [call('{"a": ' + "1" * 5_000 + "}")]}
    with pytest.raises(ChatTemplateError, match="arguments cannot be read"):
        conversation([message], content_format="string")
