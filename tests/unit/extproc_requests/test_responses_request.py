"""What `parse_request` makes of /v1/responses; test_api_parity compares the tokens with a real vLLM's."""

import json
import time
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.requests.chat_messages import conversation
from extproc.requests.openai import parse_request
from extproc.requests.request import ApiKind, ChatPrompt, InferenceRequest, Truncation

PATH = "/v1/responses"
HELLO = {"role": "user", "content": "Hello"}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'}


def parse(**body: Any) -> InferenceRequest:
    """Read a body; how long it is does not count."""
    return replace(parse_request(path=PATH, body=json.dumps(body).encode()), body_bytes=0)


def chat_prompt(**body: Any) -> ChatPrompt:
    (prompt,) = parse(**body).prompts
    assert isinstance(prompt, ChatPrompt)
    return prompt


def call(name: str = "f", arguments: Any = None, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "function": {"name": name, "arguments": arguments or {"a": 1}}, "type": "function"}


def test_a_text_is_what_the_user_says_and_instructions_are_a_system_message() -> None:
    assert parse(model="m", input="Hi", instructions="Be brief.", max_output_tokens=7, stream=True) == InferenceRequest(
        api=ApiKind.RESPONSES,
        path=PATH,
        model="m",
        prompts=(
            ChatPrompt(
                messages=({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}),
                add_special_tokens=True,
            ),
        ),
        stream=True,
        max_tokens=7,
        wants_response_id=True,
    )


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([], []),
        ([HELLO], [HELLO]),
        ([{**HELLO, "type": "message", "extra": 1}], [{**HELLO, "type": "message", "extra": 1}]),
        ([{"role": "assistant", "content": "Hi", "extra": 1}], [{"role": "assistant", "content": "Hi"}]),
        (
            [{"type": "message", "role": "assistant", "content": [{"text": "one"}, {"text": "two"}]}],
            [{"role": "assistant", "content": "one"}],
        ),
        ([CALL], [{"role": "assistant", "tool_calls": [call()]}]),
        (
            [CALL, {**CALL, "call_id": "c2", "namespace": "ns"}],
            [{"role": "assistant", "tool_calls": [call(), call(name="ns__f", call_id="c2")]}],
        ),
        (
            [{"role": "assistant", "content": "Hi"}, CALL, {"role": "assistant", "content": "more"}],
            [{"role": "assistant", "content": "Hi", "tool_calls": [call()]}, {"role": "assistant", "content": "more"}],
        ),
        (
            [CALL, {"role": "assistant", "content": "Hi"}],
            [{"role": "assistant", "tool_calls": [call()], "content": "Hi"}],
        ),
        (
            [{"type": "function_call_output", "call_id": "c1", "output": "42"}],
            [{"role": "tool", "content": "42", "tool_call_id": "c1"}],
        ),
        (
            [{"type": "reasoning", "summary": [{"text": "sum"}], "content": [{"text": "Hm."}]}, CALL],
            [{"role": "assistant", "reasoning": "Hm.", "tool_calls": [call()]}],
        ),
        ([{"type": "reasoning", "summary": [{"text": "sum"}]}], [{"role": "assistant", "reasoning": "sum"}]),
        ([{"type": "reasoning", "summary": []}], [{"role": "assistant", "reasoning": ""}]),
        (
            [{"type": "custom_tool_call", "call_id": "c1", "name": "sh", "input": "é\n"}],
            [{"role": "assistant", "tool_calls": [call(name="sh", arguments={"input": "é\n"})]}],
        ),
        (
            [{"type": "custom_tool_call_output", "call_id": "c1", "output": "x"}],
            [{"role": "tool", "content": "x", "tool_call_id": "c1"}],
        ),
    ],
)
def test_items_become_the_messages_that_vllm_makes_of_them(items: list[Any], messages: list[Any]) -> None:
    assert chat_prompt(input=items).messages == tuple(messages)


def test_the_clients_items_are_not_changed_by_merging_them() -> None:
    request = parse(input=[{"role": "user", "content": "Hi"}, CALL, CALL])
    assert request == parse(input=[{"role": "user", "content": "Hi"}, CALL, CALL])
    assert len(chat_prompt(input=[CALL, HELLO, CALL]).messages) == 3


@pytest.mark.parametrize(
    ("last", "continued"),
    [
        ({"role": "assistant", "content": "We", "status": "in_progress"}, True),
        ({"role": "assistant", "content": "We", "status": "incomplete"}, True),
        ({"role": "assistant", "content": "We", "status": "completed"}, False),
        ({"type": "reasoning", "summary": [], "status": "in_progress"}, True),
        ({**CALL, "status": "in_progress"}, False),
        (HELLO, False),
    ],
)
def test_an_unfinished_last_message_is_continued(last: dict[str, Any], continued: bool) -> None:
    prompt = chat_prompt(input=[HELLO, last])
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (continued, not continued)


@pytest.mark.parametrize(
    ("tools", "functions"),
    [
        (None, None),
        ([], None),
        ([{"type": "web_search_preview"}], ()),
        (
            [{"type": "function", "name": "f", "parameters": {"b": 1, "a": 2}, "strict": True, "extra": 1}],
            (
                {
                    "name": "f",
                    "description": None,
                    "parameters": {"b": 1, "a": 2},
                    "strict": True,
                    "defer_loading": None,
                },
            ),
        ),
        (
            [{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "g"}, {"type": "custom"}]}],
            ({"name": "ns__g", "description": None, "parameters": None, "strict": None, "defer_loading": None},),
        ),
    ],
)
def test_tools_are_shown_as_functions(tools: Any, functions: tuple[dict[str, Any], ...] | None) -> None:
    expected = None if functions is None else tuple({"type": "function", "function": one} for one in functions)
    assert chat_prompt(input="x", tools=tools).tools == expected


def test_a_tool_for_free_text_is_shown_as_a_function_of_one_text() -> None:
    (tool,) = chat_prompt(input="x", tools=[{"type": "custom", "name": "sh", "description": "Runs"}]).tools or ()
    assert tool["function"]["parameters"]["required"] == ["input"]
    assert (tool["function"]["name"], tool["function"]["description"]) == ("sh", "Runs")


def test_the_effort_of_reasoning_switches_thinking() -> None:
    prompt = chat_prompt(input="x", reasoning={"effort": "low"}, chat_template_kwargs={"a": 1})
    assert prompt.chat_template_kwargs == {"a": 1, "reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"truncation": "disabled"}, None),
        ({"truncation": "auto"}, Truncation(tokens=-1)),
        ({"truncation": None, "max_output_tokens": 5}, Truncation(tokens=-1, held_back=1)),
    ],
)
def test_truncation_cuts_to_the_context(fields: dict[str, Any], expected: Truncation | None) -> None:
    assert parse(input="x", **fields).truncation == expected


def test_an_image_among_the_items_is_media() -> None:
    message = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}
    request = parse(input=[message])
    assert (request.has_media, len(request.prompts)) == (True, 1)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": 5},
        {"input": ["text"]},
        {"input": [{"content": "x"}]},
        {"input": [{"type": "item_reference", "id": "x"}]},
        {"input": [{"type": "web_search_call"}]},
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
        {"input": [{"role": "assistant", "content": []}]},
        {"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]},
        {"input": [{**CALL, "arguments": {"a": 1}}]},
        {"input": [{**CALL, "call_id": None}]},
        {"input": "x", "previous_response_id": "resp_1"},
        {"input": "x", "prompt": {"id": "p"}},
        {"input": "x", "instructions": ["Be brief."]},
        {"input": "x", "tools": "all"},
        {"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"input": "x", "reasoning": "low"},
        {"input": "x", "chat_template_kwargs": {"chat_template": "x"}},
    ],
)
def test_what_vllm_refuses_or_keeps_to_itself_is_left_to_the_pod(body: dict[str, Any]) -> None:
    request = parse(model="m", **body)
    assert (request.api, request.model, request.prompts) == (ApiKind.RESPONSES, "m", ())
    assert request.unsupported_reason


def test_calls_keep_the_name_before_the_arguments_unlike_in_chats() -> None:
    (message,) = chat_prompt(input=[CALL]).messages
    (shown,) = conversation([message], content_format="string")
    assert json.dumps(shown["tool_calls"]) == json.dumps([call()])


def test_very_many_calls_in_a_row_are_read_in_linear_time() -> None:
    started = time.process_time()
    prompt = chat_prompt(input=[CALL] * 30_000)
    assert time.process_time() - started < 3  # seconds; about 0.2, and 8 in quadratic time
    assert [len(message["tool_calls"]) for message in prompt.messages] == [30_000]
