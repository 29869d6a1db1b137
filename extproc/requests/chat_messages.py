"""Chat messages and tools in the form that vLLM 0.32 passes to a chat template.

Does not validate: a request that vLLM answers with a 400 either passes through or raises ChatTemplateError, and the pod
answers it. The caller's objects are never changed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from extproc.errors import ChatTemplateError

ContentFormat: TypeAlias = Literal["string", "openai"]
Message: TypeAlias = dict[str, Any]

# text part type -> the field with the text
TEXT_FIELD = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# The fields of content parts that vLLM knows; all other fields of a text part reach the template.
KNOWN_PART_FIELDS = frozenset(
    (
        *("type", "text", "refusal", "thinking", "closed", "name", "uuid", "data", "file"),
        *("image_url", "image_embeds", "image_pil", "audio_url", "audio_embeds", "input_audio"),
        *("video_url", "video_embeds", "prompt_cache_breakpoint"),
    )
)
# A line that one client adds to the system prompt, different in each request; vLLM drops it to keep the cache warm.
BILLING_HEADER = "x-anthropic-billing-header"


def conversation(messages: Sequence[Any], *, content_format: ContentFormat) -> list[Message]:
    """Return new messages with the fields that vLLM keeps, in its order, as templates may dump a whole message.

    The `content_format` "string" joins text parts with a newline, "openai" makes every content a list of parts.
    """
    return [_message(message, content_format) for message in messages]


def _message(message: Any, content_format: ContentFormat) -> Message:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise ChatTemplateError("every message must be an object with a role")
    result: Message = {"role": role, "content": _content(message.get("content"), role, content_format)}
    if len(message) > 2 or "content" not in message or role == "developer":  # most have only role and content
        _add_fields(result, message, role)
    return result


def _add_fields(result: Message, message: Mapping[str, Any], role: str) -> None:
    if role == "assistant":
        _add_assistant_fields(result, message)
    elif role == "tool" and "tool_call_id" in message:
        result["tool_call_id"] = message["tool_call_id"]
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            result[name] = message[name]
    if role == "developer":
        tools = message.get("tools")
        result["tools"] = [_developer_tool(tool) for tool in tools] if isinstance(tools, list) else tools


def _content(content: Any, role: str, content_format: ContentFormat) -> str | list[Any]:
    if isinstance(content, str):
        if content_format == "string" and not (role == "system" and content.startswith(BILLING_HEADER)):
            return content  # the common case, kept free of lists
        content = [{"type": "text", "text": content}]
    elif content is None:
        content = []
    elif not isinstance(content, list):
        raise ChatTemplateError("message content must be a string or a list of parts")
    if role == "system":
        content = list(_without_billing_header(content))
    parts = [part for item in content if (part := _part(item)) is not None]
    if content_format == "string":
        texts = (part["text"] if part["type"] == "text" else part["name"] for part in parts)
        return "\n".join(text for text in texts if text)
    if role == "tool" and all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)  # most templates take only a string here
    return parts


def _part(part: Any) -> dict[str, Any] | None:
    """Return a text part or a tool reference, or None for an empty one. Raise for media: their tokens are unknown."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or part.get("uuid") is not None:
        raise ChatTemplateError("content parts must be text")
    kind = part.get("type")
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": _text(part.get("name"))}
    if not isinstance(kind, str) or kind not in TEXT_FIELD:
        # this is logged: repeat only types that vLLM knows, not the client's own words
        shown = f"of type {kind}" if isinstance(kind, str) and kind in KNOWN_PART_FIELDS else "of an unknown type"
        raise ChatTemplateError(f"content parts {shown} are not text")
    text = part.get(TEXT_FIELD[kind])
    if text is None and kind in ("text", "refusal"):
        return None
    extra = {key: value for key, value in part.items() if key not in KNOWN_PART_FIELDS}
    return {"type": "text", "text": _text(text), **extra}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ChatTemplateError("the text of a content part must be a string")
    return value


def _without_billing_header(parts: Iterable[Any]) -> Iterable[Any]:
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not (isinstance(text, str) and text.startswith(BILLING_HEADER)):
            yield part
        elif rest := text.partition("\n")[2]:
            yield rest if isinstance(part, str) else {**part, "text": rest}


def _add_assistant_fields(result: Message, message: Mapping[str, Any]) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise ChatTemplateError("tool_calls must be a list")
    if calls:
        result["tool_calls"] = [_tool_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is None:
        reasoning = message.get("reasoning_content")  # the old name of the same field
    if reasoning is not None:
        result["reasoning"] = result["reasoning_content"] = reasoning


def _tool_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise ChatTemplateError("tool_calls must be of type function")
    if isinstance(function.get("arguments"), dict):
        return call  # made by the reader of another API, in vLLM's order; a client's arguments are a string
    arguments = {"arguments": call_arguments(function.get("arguments"))}
    return _ordered(call, first=("id", "function", "type")) | {
        "function": _ordered(function | arguments, first=("arguments", "name"))
    }


def call_arguments(arguments: Any) -> dict[str, Any]:
    """Return the call's arguments as a mapping, as templates expect; unreadable arguments become an empty one."""
    if isinstance(arguments, str) and arguments:
        try:  # the standard parser on purpose: like vLLM, it accepts NaN and lone surrogates
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return {}
        except ValueError as error:  # a number with more digits than Python's limit
            raise ChatTemplateError(f"tool call arguments cannot be read: {error}") from None
        except RecursionError:
            raise ChatTemplateError("tool call arguments are nested too deeply") from None
    return arguments if isinstance(arguments, dict) else {}


def function_tools(tools: Iterable[Any] | None) -> list[dict[str, Any]] | None:
    """Return tool definitions with exactly the fields, and their order, of vLLM's own models.

    A missing description or missing parameters become null, unknown fields disappear.
    """
    return None if tools is None else [_function_tool(tool) for tool in tools]


def _function_tool(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatTemplateError("every tool must be an object with a function that has a name")
    deferred = tool.get("defer_loading")
    dumped = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        dumped["strict"] = function["strict"]
    own = function.get("defer_loading")
    if (own if own is not None else deferred) is not None:
        dumped["defer_loading"] = own if own is not None else deferred
    result = {"type": "function", "function": dumped}
    return result if deferred is None else result | {"defer_loading": deferred}


def _developer_tool(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool
    fields = ("name", "description", "parameters", "strict")
    return _ordered(tool, first=("function", "type")) | {"function": _ordered(function, first=fields)}


def _ordered(value: Mapping[str, Any], *, first: Sequence[str]) -> dict[str, Any]:
    return {key: value[key] for key in first if key in value} | dict(value)


def developer_as_system(messages: Sequence[Message]) -> list[Message]:
    """Turn developer messages into system messages and merge all system messages into one at the front.

    vLLM does this for templates that do not know the developer role.
    """
    renamed = [
        {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if not system or (len(system) == 1 and renamed[0] is system[0]):
        return renamed
    texts = [_flat(message["content"]) for message in system]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(text for text in texts if text)}, *others]


def _flat(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if "text" in part)
