"""Chat completion bodies that libraries with rules of their own accept: turns alternate, calls have ids and results.

Used for folders whose chats are rendered in code. What is odd in them is the texts.
"""

import random
from typing import Any

from tests.vllm.random_chats import FRAGMENTS

MARKS = ("[INST]", "[/INST]", "<s>", "[TOOL_CALLS]", "<|start|>", "<|channel|>final", "<|end|>", "▁", "\u0301", "ﷺ")
ARGUMENTS = ('{"city": "Zürich", "days": 2}', "{}", "", '{"a":[1.50,{"é":null}]}', '{"x":1e400}', "[]", "not json")
EFFORTS = ("none", "low", "medium", "high")
TOOL_NAMES = ("weather", "get_time", "f")


def orderly_chats(count: int, *, seed: int) -> list[dict[str, Any]]:
    """Return request bodies; the same seed gives the same ones."""
    source = random.Random(seed)
    return [_body(source) for _ in range(count)]


def _body(source: random.Random) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    if source.random() < 0.5:
        messages.append({"role": source.choice(["system", "system", "developer"]), "content": _content(source)})
    for _ in range(source.choice([0, 0, 1, 2, 4])):
        messages.append({"role": "user", "content": _content(source)})
        if source.random() < 0.4:
            messages += _called(source)
        messages.append(_answer(source))
        if source.random() < 0.1:
            messages.append({"role": "system", "content": _text(source)})
    messages.append({"role": "user", "content": _content(source)})
    body: dict[str, Any] = {"messages": messages}
    end = source.random()
    if end < 0.15:
        messages += _called(source)
    elif end < 0.3:
        messages.append({"role": "assistant", "content": _text(source) or "x"})
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if source.random() < 0.5:
        body["tools"] = [_tool(name, source) for name in TOOL_NAMES[: source.choice([1, 2, 3])]]
    if source.random() < 0.2:
        body["reasoning_effort"] = source.choice(EFFORTS)
    if source.random() < 0.1:
        body["tool_choice"] = source.choice(["none", "auto"])
    return body


def _called(source: random.Random) -> list[dict[str, Any]]:
    ids = [source.choice(["abcdefgh", "call_0123456789"]) + str(number) for number in range(source.choice([1, 1, 2]))]
    calls = [
        {
            "id": each,
            "type": "function",
            "function": {"name": source.choice(TOOL_NAMES), "arguments": source.choice(ARGUMENTS)},
        }
        for each in ids
    ]
    said: dict[str, Any] = {"role": "assistant", "tool_calls": calls, "content": source.choice([None, "", "I look."])}
    if source.random() < 0.2:
        said["reasoning"] = _text(source)
    source.shuffle(ids)
    return [said, *({"role": "tool", "tool_call_id": each, "content": _content(source)} for each in ids)]


def _answer(source: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": source.choice([_text(source) or "x", _content(source)])}
    if source.random() < 0.2:
        message[source.choice(["reasoning", "reasoning_content"])] = _text(source)
    return message


def _content(source: random.Random) -> Any:
    if source.random() < 0.1:
        return " ".join(_text(source) for _ in range(300))
    if source.random() < 0.7:
        return _text(source) + "x"
    return [{"type": "text", "text": _text(source) + "y"} for _ in range(source.choice([1, 1, 2, 3]))]


def _tool(name: str, source: random.Random) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": source.choice([None, "Tells “it” & <b>.", ""])}
    if source.random() < 0.8:
        at = {"type": "array", "items": {"type": "string", "enum": ["é", "b"]}, "description": "d"}
        function["parameters"] = {
            "type": "object",
            "properties": {"city": {"type": "string", "default": "Ulm"}, "at": at},
            "required": ["city"],
        }
    if source.random() < 0.2:
        function["strict"] = True
    return {"type": "function", "function": function}


def _text(source: random.Random) -> str:
    return "".join(
        source.choice((*FRAGMENTS, *MARKS, "What is it? ", "日本語 ")) for _ in range(source.choice([1, 2, 5]))
    )
