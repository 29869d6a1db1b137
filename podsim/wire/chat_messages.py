"""Puts OpenAI chat messages into the form that vLLM 0.32 gives to templates (`vllm/renderers/chat_utils.py`).

The chat template and the request parser call this. Only text is supported; as with a text-only model, other content is
refused.
"""

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

from podsim.errors import MalformedRequestError, RequestRefusedError

Message: TypeAlias = dict[str, Any]

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url"}
)
_BILLING_HEADER = "x-anthropic-billing-header"  # it changes with every request, so vLLM drops the line


def normalise_messages(messages: Sequence[Any], *, parts: bool, model: str) -> list[Message]:
    """Return messages as a template gets them: contents as text (or text parts), tool call arguments as objects.

    `parts` tells that the template iterates over contents; `model` is named in the error if a content is not text.
    """
    return [_normalise(message, index=index, parts=parts, model=model) for index, message in enumerate(messages)]


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """Turn developer messages, if there are any, into system ones and join all system messages at the front."""
    if all(message["role"] != "developer" for message in messages):
        return list(messages)
    converted = [
        {**{key: value for key, value in message.items() if key != "tools"}, "role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [index for index, message in enumerate(converted) if message["role"] == "system"]
    if system == [0]:
        return converted
    texts = [_joined(converted[index].get("content")) for index in system]
    rest = [message for message in converted if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *rest]


def _normalise(message: Any, *, index: int, parts: bool, model: str) -> Message:
    location = f"body.messages.{index}"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise MalformedRequestError("Field required", location=f"{location}.role", kind="missing")
    role: str = message["role"]
    texts = _content_texts(message.get("content"), location=location, model=model)
    if role == "system":
        texts = [kept for text in texts if (kept := _without_billing_header(text))]
    if parts and role != "tool":
        normalised: Message = {"role": role, "content": [{"type": "text", "text": text} for text in texts]}
    else:
        normalised = {"role": role, "content": "\n".join(text for text in texts if text)}
    if role == "assistant":
        if message.get("tool_calls"):
            normalised["tool_calls"] = [_normalise_call(call) for call in message["tool_calls"]]
        if message.get("reasoning") is not None:
            normalised["reasoning"] = normalised["reasoning_content"] = message["reasoning"]
    elif role == "tool" and "tool_call_id" in message:
        normalised["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        normalised["tools"] = message.get("tools")
    if isinstance(message.get("name"), str):
        normalised["name"] = message["name"]
    return normalised


def _content_texts(content: Any, *, location: str, model: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise MalformedRequestError("Input should be a valid string", location=f"{location}.content")
    texts: list[str] = []
    for part in content:
        kind = part.get("type")
        if kind is None:
            raise RequestRefusedError("Missing 'type' field in multimodal part.", param="type")
        if kind in _MEDIA_PARTS:
            raise RequestRefusedError(f"{model} is not a multimodal model")
        if kind not in _TEXT_PARTS:
            raise RequestRefusedError(f"Unsupported chat content part type: {kind!r}.", param="type")
        text = part.get(_TEXT_PARTS[kind])
        if isinstance(text, str):
            texts.append(text)
    return texts


def _normalise_call(call: Any) -> Message:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RequestRefusedError(
            "chat completions only support assistant tool_calls of type 'function'.", param="tool_calls"
        )
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None  # it sits in the history: refusing it would refuse every later turn too
    return {**call, "function": {**function, "arguments": arguments if isinstance(arguments, dict) else {}}}


def _without_billing_header(text: str) -> str:
    return text.partition("\n")[2] if text.startswith(_BILLING_HEADER) else text


def _joined(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content)
    return content or ""


def normalise_tools(tools: Sequence[Any] | None) -> list[Message] | None:
    """Return tool definitions as vLLM's request model writes them: all its fields in order, absent ones as null."""
    if tools is None:
        return None
    return [_normalise_tool(tool, index=index) for index, tool in enumerate(tools)]


def _normalise_tool(tool: Any, *, index: int) -> Message:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise MalformedRequestError("Field required", location=f"body.tools.{index}.function", kind="missing")
    definition: Message = {
        "name": function["name"],
        "description": function.get("description"),
        "parameters": function.get("parameters"),
    }
    deferred = tool.get("defer_loading")
    function = {"defer_loading": deferred, **function}
    definition |= {key: function[key] for key in ("strict", "defer_loading") if function.get(key) is not None}
    normalised: Message = {"type": "function", "function": definition}
    return normalised if deferred is None else {**normalised, "defer_loading": deferred}
