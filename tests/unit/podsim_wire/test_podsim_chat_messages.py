from typing import Any

import pytest

from podsim.errors import MalformedRequestError, RequestRefusedError
from podsim.wire.chat_messages import Message, normalise_messages, normalise_tools


def normalised(message: Any, *, parts: bool = False) -> Message:
    return normalise_messages([message], parts=parts, model="m")[0]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("no json", {}), ("[1]", {}), ("3", {})],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: dict[str, int]) -> None:
    message = normalised({"role": "assistant", "content": None, "tool_calls": [call(arguments)]})
    assert message == {"role": "assistant", "content": "", "tool_calls": [call(expected)]}


def test_the_request_itself_is_left_as_it_was() -> None:
    original = {"role": "assistant", "tool_calls": [call('{"a": 1}')]}
    normalised(original)
    assert original == {"role": "assistant", "tool_calls": [call('{"a": 1}')]}


def test_only_what_templates_may_see_is_kept() -> None:
    assert normalised({"role": "user", "content": "a", "name": "bob", "extra": 1}) == {
        "role": "user",
        "content": "a",
        "name": "bob",
    }
    assert normalised({"role": "assistant", "content": "a", "reasoning": "r", "tool_calls": []}) == {
        "role": "assistant",
        "content": "a",
        "reasoning": "r",
        "reasoning_content": "r",
    }
    assert normalised({"role": "tool", "content": [{"type": "text", "text": "42"}], "tool_call_id": "1"}) == {
        "role": "tool",
        "content": "42",
        "tool_call_id": "1",
    }


def test_a_billing_header_that_changes_with_every_request_is_dropped_from_system_messages() -> None:
    text = "x-anthropic-billing-header: cch=1\nBe kind."
    assert normalised({"role": "system", "content": text})["content"] == "Be kind."
    assert normalised({"role": "user", "content": text})["content"] == text


@pytest.mark.parametrize("message", [None, "text", {}, {"role": 3}, {"content": "x"}])
def test_a_message_without_a_role_is_malformed(message: Any) -> None:
    with pytest.raises(MalformedRequestError) as refused:
        normalised(message)
    assert refused.value.param == "body.messages.0.role"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (3, "valid string"),
        (["text"], "valid string"),
        ([{"text": "a"}], "Missing 'type'"),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "m is not a multimodal model"),
        ([{"type": "novel"}], "Unsupported chat content part type: 'novel'"),
    ],
)
def test_contents_that_are_no_text_are_refused(content: Any, complaint: str) -> None:
    with pytest.raises(RequestRefusedError, match=complaint):
        normalised({"role": "user", "content": content})


def test_tools_are_written_out_as_vllms_request_model_does() -> None:
    tool = {"type": "function", "function": {"parameters": {"z": 1, "a": 2}, "name": "f", "novel": 1}, "novel": 2}
    deferred = {"type": "function", "defer_loading": True, "function": {"name": "g", "strict": False}}
    assert normalise_tools([tool, deferred]) == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"z": 1, "a": 2}}},
        {
            "type": "function",
            "function": {
                "name": "g",
                "description": None,
                "parameters": None,
                "strict": False,
                "defer_loading": True,
            },
            "defer_loading": True,
        },
    ]
    assert normalise_tools(None) is None
    with pytest.raises(MalformedRequestError):
        normalise_tools([{"type": "function"}])
