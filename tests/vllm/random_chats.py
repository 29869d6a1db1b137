"""Chat completion bodies put together at random: every odd field, shape and order that clients have been seen to send.

Used by `test_chat_template_parity.py`, which compares what vLLM and we make of them.
"""

import random
from typing import Any

FRAGMENTS = (
    *("", "x", " a ", "\n", "héé", "👍🏽", "<|im_end|>", "{{ 1 }}", "<result>1</result>"),
    *("</think>\n\nrest", "<think>\nq\n</think>\nz", "x-anthropic-billing-header: 1\nk", "x-anthropic-billing-header"),
)
ARGUMENTS = ('{"b":1,"a":[1.50,"é"]}', "{}", "", "[]", "{x", "null", '"s"', '{"a":{"$":null}}')
TEMPLATE_VARIABLES: tuple[dict[str, Any], ...] = (
    {},
    {"enable_thinking": False},
    {"tools": None},
    {"tools": [{"function": {"name": "other"}}]},
    {"documents": [{"title": "q"}]},
    {"bos_token": "B", "custom_tools": [{"a": 1}]},
    {"date_string": "D", "padding": True},
    {"leaked": "L", "content": "C", "message": "M", "system_message": "S"},
    {"reasoning_effort": "odd"},
    {"messages": []},
    {"strftime_now": 1},
    {"range": 1, "ns": 2},
)


def random_chats(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return request bodies; the same seed gives the same ones."""
    source = random.Random(seed)
    return [_body(source) for _ in range(count)]


def _body(source: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [_message(source) for _ in range(source.choice([1, 1, 2, 3, 4, 5]))]}
    if source.random() < 0.3:
        body["tools"] = [_tool(source)]
    if source.random() < 0.3:
        body["add_generation_prompt"] = False
    if source.random() < 0.3:
        body["continue_final_message"] = True
    if source.random() < 0.3:
        body["chat_template_kwargs"] = source.choice(TEMPLATE_VARIABLES)
    if source.random() < 0.1:
        body["documents"] = [{"title": "T", "text": "X"}]
    if source.random() < 0.1:
        body["reasoning_effort"] = source.choice(["none", "low", "high"])
    return body


def _message(source: random.Random) -> dict[str, Any]:
    roles = ("system", "user", "user", "assistant", "assistant", "tool", "developer", "critic", "function")
    role = source.choice(roles)
    message: dict[str, Any] = {"role": role}
    if source.random() < 0.95:
        message["content"] = _content(source)
    optional = {
        "name": ("n", 0.2),
        "reasoning": (_text(source), 0.15),
        "reasoning_content": (_text(source), 0.15),
        "tool_call_id": ("1", 0.5 if role == "tool" else 0.05),
        "task": ("t", 0.05),
        "refusal": (None, 0.1),
        "audio": (None, 0.05),
        "unknown": ({"b": 1}, 0.1),
    }
    message |= {name: value for name, (value, share) in optional.items() if source.random() < share}
    if source.random() < (0.4 if role == "assistant" else 0.05):
        message["tool_calls"] = source.choice([None, [], [_call(source)], [_call(source), _call(source)]])
    if role == "developer" and source.random() < 0.3:
        message["tools"] = [{"type": "function", "function": {"parameters": {}, "name": "q", "zz": 1}}]
    return _shuffled(message, source)


def _content(source: random.Random) -> Any:
    kind = source.random()
    if kind < 0.6:
        return _text(source)
    if kind < 0.9:
        return [_part(source) for _ in range(source.randrange(4))]
    return None if kind < 0.95 else [_text(source)]


def _part(source: random.Random) -> dict[str, Any]:
    parts: tuple[dict[str, Any], ...] = (
        *[{"type": "text", "text": _text(source)}] * 4,
        {"type": "refusal", "refusal": _text(source)},
        {"type": "thinking", "thinking": _text(source), "closed": True},
        {"type": "tool_reference", "name": "t"},
        {"type": "input_text", "text": _text(source)},
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": None},
    )
    part = dict(source.choice(parts))
    if source.random() < 0.2:
        part |= {"cache_control": {"z": 1, "a": 2}, "unknown": None}
    return _shuffled(part, source)


def _call(source: random.Random) -> dict[str, Any]:
    function = {"name": source.choice(["f", "g"]), "arguments": source.choice(ARGUMENTS)}
    if source.random() < 0.2:
        function["extra"] = "e"
    call: dict[str, Any] = {"id": source.choice(["1", "abc", ""]), "type": "function"}
    if source.random() < 0.3:
        call["index"] = 0
    return _shuffled(call | {"function": _shuffled(function, source)}, source)


def _tool(source: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {"parameters": {"b": 1}, "name": "f", "description": source.choice([None, "d<é>"])}
    if source.random() < 0.3:
        function["strict"] = False
    tool: dict[str, Any] = {"type": "function", "function": function, "unknown": 1}
    if source.random() < 0.3:
        tool["defer_loading"] = source.random() < 0.5
    return tool


def _text(source: random.Random) -> str:
    return source.choice(FRAGMENTS) + source.choice(FRAGMENTS)


def _shuffled(value: dict[str, Any], source: random.Random) -> dict[str, Any]:
    items = list(value.items())
    source.shuffle(items)
    return dict(items)
