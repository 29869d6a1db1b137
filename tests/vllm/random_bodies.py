"""Random bodies of /v1/responses and /v1/messages, most of them acceptable, all of them awkward.

Used by `test_api_parity.py`. The same seed gives the same bodies.
"""

import random
from collections.abc import Callable
from typing import Any

TEXTS = (
    *(
        "Hi",
        "",
        " leading",
        "trailing \n",
        "<|im_end|>",
        "naïve 字 👍🏽",
        '{"a": "b"}',
        "x-anthropic-billing-header: 1",
    ),
    *("two\nlines", "tab\t", "\u200b", "None", "a" * 60),
)
EFFORTS = ("none", "low", "medium", "high")


def random_bodies(count: int, *, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return (path, body) pairs without a model."""
    draw = random.Random(seed)
    makers: tuple[tuple[str, Callable[[random.Random], dict[str, Any]]], ...] = (
        ("/v1/responses", _response),
        ("/v1/messages", _message_request),
    )
    return [(path, make(draw)) for _ in range(count) for path, make in makers]


def _text(draw: random.Random) -> str:
    return draw.choice(TEXTS)


def _some(draw: random.Random, make: Callable[[random.Random], Any], most: int) -> list[Any]:
    return [make(draw) for _ in range(draw.randint(0, most))]


def _maybe(draw: random.Random, body: dict[str, Any], **makers: Callable[[random.Random], Any]) -> dict[str, Any]:
    return body | {name: make(draw) for name, make in makers.items() if draw.random() < 0.35}


def _arguments(draw: random.Random) -> dict[str, Any]:
    values: tuple[Any, ...] = (1, 1.5, -0.0, None, True, "é", {"z": 1, "a": [1, {}]}, [], 10**25)
    return {draw.choice("abc"): draw.choice(values) for _ in range(draw.randint(0, 3))}


def _schema(draw: random.Random) -> dict[str, Any]:
    schema: dict[str, Any] = {"properties": {draw.choice("abc"): {"type": "string", "description": _text(draw)}}}
    return schema | ({"type": "object"} if draw.random() < 0.6 else {})


def _response(draw: random.Random) -> dict[str, Any]:
    items = _text(draw) if draw.random() < 0.15 else _some(draw, _item, 6) or [{"role": "user", "content": "Hi"}]
    return _maybe(
        draw,
        {"input": items},
        instructions=_text,
        tools=lambda draw: _some(draw, _response_tool, 3),
        reasoning=lambda draw: {"effort": draw.choice(EFFORTS)},
        chat_template_kwargs=lambda draw: {"enable_thinking": draw.choice((True, False, None, "auto"))},
    )


def _item(draw: random.Random) -> dict[str, Any]:
    call_id = draw.choice(("c1", "c2"))
    kind = draw.randrange(9)
    if kind <= 1:
        return {"role": draw.choice(("user", "user", "developer", "system")), "content": _text(draw)}
    if kind == 2:
        parts = [{"type": "input_text", "text": _text(draw)} for _ in range(draw.randint(1, 3))]
        return {"role": "user", "content": parts}
    if kind == 3:
        plain = {"role": "assistant", "content": _text(draw)}
        return _maybe(draw, plain, status=lambda draw: draw.choice(("completed", "in_progress", "incomplete")))
    if kind == 4:
        parts = [{"type": "output_text", "text": _text(draw)} for _ in range(draw.randint(1, 2))]
        message: dict[str, Any] = {"type": "message", "role": "assistant", "content": parts}
        return _maybe(draw, message, status=lambda draw: draw.choice(("completed", "in_progress")))
    if kind == 5:
        arguments = draw.choice(('{"a": 1}', "{}", "", "nonsense", '{"z": [1.0, null], "a": "é"}', "[1]"))
        call = {"type": "function_call", "call_id": call_id, "name": draw.choice("fg"), "arguments": arguments}
        return _maybe(draw, call, namespace=lambda draw: "ns", id=lambda draw: "fc_1")
    if kind == 6:
        output = draw.choice((_text(draw), [{"type": "input_text", "text": _text(draw)}]))
        return {
            "type": draw.choice(("function_call_output", "custom_tool_call_output")),
            "call_id": call_id,
            "output": output,
        }
    if kind == 7:
        return {"type": "custom_tool_call", "call_id": call_id, "name": "sh", "input": _text(draw)}
    said = [{"type": "reasoning_text", "text": _text(draw)}]
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": _text(draw)}]}
    return _maybe(draw, thought, content=lambda draw: draw.choice((said, [])))


def _response_tool(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(5)
    if kind == 0:
        return {"type": "custom", "name": "sh", "description": _text(draw)}
    if kind == 1:
        return {"type": "web_search_preview"}
    function = {"type": "function", "name": draw.choice("fg"), "parameters": draw.choice((None, _schema(draw)))}
    function = _maybe(draw, function, description=_text, strict=lambda draw: draw.choice((True, False, None)))
    return {"type": "namespace", "name": "ns", "description": "d", "tools": [function]} if kind == 2 else function


def _message_request(draw: random.Random) -> dict[str, Any]:
    return _maybe(
        draw,
        {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}, *_some(draw, _message, 5)]},
        system=lambda draw: draw.choice((_text(draw), _some(draw, _text_block, 3))),
        tools=lambda draw: _some(draw, _anthropic_tool, 3),
        tool_choice=lambda draw: {"type": "none"},
        output_config=lambda draw: {"effort": draw.choice(EFFORTS[1:])},
        thinking=lambda draw: draw.choice(({"type": "disabled"}, {"type": "adaptive"})),
    )


def _text_block(draw: random.Random) -> dict[str, Any]:
    return _maybe(draw, {"type": "text", "text": _text(draw)}, cache_control=lambda draw: {"type": "ephemeral"})


def _anthropic_tool(draw: random.Random) -> dict[str, Any]:
    tool = {"name": draw.choice("fgh"), "input_schema": _schema(draw)}
    return _maybe(
        draw, tool, description=_text, strict=lambda draw: True, defer_loading=lambda draw: draw.random() < 0.5
    )


def _message(draw: random.Random) -> dict[str, Any]:
    role = draw.choice(("user", "assistant", "assistant", "system"))
    if draw.random() < 0.3:
        return {"role": role, "content": _text(draw)}
    makers = {"user": _user_block, "assistant": _assistant_block, "system": _system_block}
    return {"role": role, "content": _some(draw, makers[role], 4)}


def _user_block(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.5:
        return _text_block(draw)
    content = draw.choice((None, _text(draw), _some(draw, _text_block, 3)))
    return {"type": "tool_result", "tool_use_id": draw.choice(("t1", "t2")), "content": content}


def _assistant_block(draw: random.Random) -> dict[str, Any]:
    kind = draw.randrange(5)
    if kind == 0:
        return {"type": "thinking", "thinking": _text(draw), "signature": "s"}
    if kind == 1:
        return {"type": "redacted_thinking", "data": "x"}
    if kind == 2:
        return {
            "type": "tool_use",
            "id": draw.choice(("t1", "t2")),
            "name": draw.choice("fg"),
            "input": _arguments(draw),
        }
    if kind == 3:
        return {
            "type": "tool_result",
            "content": draw.choice((_text(draw), [{"type": "text", "text": "a", "n": None}])),
        }
    return _text_block(draw)


def _system_block(draw: random.Random) -> dict[str, Any]:
    if draw.random() < 0.7:
        return _text_block(draw)
    definition = {"type": "tool_definition", "definition": _anthropic_tool(draw)}
    reference = {"type": "tool_reference", "name": draw.choice("fgh")}
    addition = {"type": "tool_addition", "tool": draw.choice((definition, reference))}
    return draw.choice((addition, {"type": "tool_removal", "tool": reference}))
