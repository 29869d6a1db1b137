"""Reads Anthropic's /v1/messages as vLLM 0.32 converts it into a chat.

Two decisions depend on the model's template and stay open in the ChatPrompt: the position of system messages after the
first one, and whether thinking can be switched off.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from extproc.requests.chat_messages import BILLING_HEADER
from extproc.requests.request import ChatPrompt
from extproc.requests.request_fields import (
    Body,
    ReadPrompts,
    UnsupportedPromptError,
    have_media,
    mapping,
    objects,
    template_variables,
    text,
)

TOOL_CHANGES = ("tool_addition", "tool_removal")
IGNORED_BLOCKS = ("redacted_thinking", "tool_reference")


class MessagesBody(Body, kw_only=True):
    """The fields that affect the tokens; without a list in `messages` no pod could serve the request."""

    messages: list[Any]
    system: Any = None
    tools: Any = None
    thinking: Any = None
    output_config: Any = None
    max_tokens: Any = None
    chat_template_kwargs: Any = None

    @property
    def output_limit(self) -> Any:
        """This API's field."""
        return self.max_tokens


def read_messages(body: MessagesBody) -> ReadPrompts:
    """Read one conversation."""
    converted: list[dict[str, Any]] = []
    for message in body.messages:
        _convert(mapping(message, "messages"), converted)
    system = _system_texts(body.system)
    effort, can_be_off = _effort(body)
    prompt = ChatPrompt(
        messages=(*_system_message(system), *converted),
        messages_system_first=_system_first(system, converted),
        tools=_tools(body.tools, body.messages),
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort),
        reasoning_effort=effort,
        kwargs_low_effort=template_variables(body.chat_template_kwargs, "low") if can_be_off else None,
    )
    return ReadPrompts((prompt,), has_media=have_media(prompt.messages))


def _system_first(system: list[str], converted: list[dict[str, Any]]) -> tuple[dict[str, Any], ...] | None:
    later = [message["content"] for message in converted if message["role"] == "system"]
    if not later:
        return None
    return (*_system_message([*system, *later]), *(message for message in converted if message["role"] != "system"))


def _system_message(texts: list[str]) -> tuple[dict[str, Any], ...]:
    return ({"role": "system", "content": "".join(texts)},) if texts else ()


def _system_texts(content: Any) -> list[str]:
    """Return the texts of a system prompt, without the billing line that one client changes in every request."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content] if content else []
    return [
        block["text"]
        for block in _blocks(content)
        if block.get("type") == "text" and block.get("text") and not _is_billing(block["text"])
    ]


def _is_billing(value: Any) -> bool:
    return text(value, "the text of a block").startswith(BILLING_HEADER)


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    return [mapping(block, "content blocks") for block in objects(content, "content") or ()]


def _convert(message: Mapping[str, Any], into: list[dict[str, Any]]) -> None:
    """Append the chat messages for one message; its tool results go before the message itself."""
    role, content = message.get("role"), message.get("content")
    if role == "system":
        # unlike in the system field, a plain string here may be a billing line as a whole
        said = "".join(_system_texts(content))
        if said and not (isinstance(content, str) and _is_billing(content)):
            into.append({"role": "system", "content": said})
    elif role not in ("user", "assistant"):
        raise UnsupportedPromptError("the role of a message must be user, assistant or system")
    elif isinstance(content, str):
        into.append({"role": role, "content": content})
    else:
        _convert_blocks(role, _blocks(content), into)


def _convert_blocks(role: str, blocks: Iterable[Mapping[str, Any]], into: list[dict[str, Any]]) -> None:
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block in blocks:
        kind = block.get("type")
        if kind in ("text", "image"):
            parts.extend(_part(block))
        elif kind == "thinking":
            if block.get("thinking") is not None:
                thoughts.append(text(block["thinking"], "thinking"))
        elif kind == "tool_use":
            calls.append(_tool_call(block))
        elif kind == "tool_result" and role == "user":
            into.extend(_tool_result(block))
        elif kind == "tool_result":
            parts.append({"type": "text", "text": f"Tool result: {block.get('content') or ''}"})
        elif kind not in IGNORED_BLOCKS:
            raise UnsupportedPromptError(f"content blocks of type {str(kind)[:40]!r} do not become messages")
    message = _message(role, parts, calls, thoughts)
    if role != "user" or "content" in message:
        into.append(message)


def _part(block: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    if block["type"] == "image":
        return (_image(block["source"]),) if block.get("source") else ()
    said = block.get("text")
    return ({"type": "text", "text": text(said, "the text of a block")},) if said else ()


def _message(
    role: str, parts: list[dict[str, Any]], calls: list[dict[str, Any]], thoughts: list[str]
) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        single = len(parts) == 1 and parts[0]["type"] == "text"
        message["content"] = parts[0]["text"] if single else parts
    return message


def _tool_call(block: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call. Its arguments stay a mapping: vLLM's conversion to a string and back yields the same."""
    if not block.get("id"):
        raise UnsupportedPromptError("a tool_use without an id gets the time as its id")
    arguments = mapping(block["input"], "input") if block.get("input") is not None else {}
    # in the key order of vLLM's chat models, which these messages pass through: some templates dump whole calls
    function = {"arguments": arguments, "name": text(block.get("name") or "", "name")}
    return {"id": text(block["id"], "id"), "function": function, "type": "function"}


def _tool_result(block: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    call_id, content = block.get("tool_use_id") or "", block.get("content")
    items = [] if content is None or isinstance(content, str) else _blocks(content)
    texts = [text(item.get("text", ""), "the text of a block") for item in items if item.get("type") == "text"]
    said = content if isinstance(content, str) else "\n".join(texts)
    yield {"role": "tool", "tool_call_id": call_id, "content": said}
    images = [_image(item.get("source", {})) for item in items if item.get("type") == "image"]
    if images:
        yield {"role": "user", "content": images}
    named = [
        item.get("tool_name") or item.get("name")
        for item in items
        if item.get("type") == "tool_reference" and (item.get("tool_name") or item.get("name"))
    ]
    if named:
        references = [{"type": "tool_reference", "name": name} for name in named]
        yield {"role": "tool", "tool_call_id": call_id, "content": references}


def _image(source: Any) -> dict[str, Any]:
    image = mapping(source, "source")
    url = image.get("url", "")
    if image.get("type") != "url":
        url = f"data:{image.get('media_type', 'image/jpeg')};base64,{image.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _effort(body: MessagesBody) -> tuple[Any, bool]:
    """Return the reasoning effort, and whether it means thinking switched off."""
    if body.thinking is not None and mapping(body.thinking, "thinking").get("type") == "disabled":
        return "none", True
    config = {} if body.output_config is None else mapping(body.output_config, "output_config")
    return config.get("effort"), False


def _tools(value: Any, messages: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...] | None:
    """Return the tools in effect at the conversation's end, in the shape of chat completions."""
    declared = objects(value, "tools")
    system = [message for message in messages if message.get("role") == "system"]
    changes = [
        block
        for message in system
        if not isinstance(message.get("content"), str)
        for block in _blocks(message.get("content"))
        if block.get("type") in TOOL_CHANGES
    ]
    if changes:
        declared = tuple(_changed(declared or (), changes))
    return None if declared is None else tuple(_function(mapping(tool, "tools")) for tool in declared)


def _changed(declared: Iterable[Any], changes: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    tools = {text(tool.get("name"), "a tool's name"): tool for tool in (mapping(one, "tools") for one in declared)}
    removed: set[str] = set()
    for block in changes:
        change = mapping(block.get("tool"), "tool")
        if change.get("type") == "tool_definition":
            definition = mapping(change.get("definition"), "definition")
            name = text(definition.get("name"), "a tool's name")
            tools[name] = definition
        else:
            name = text(change.get("name"), "a tool's name")
            if name not in tools:
                raise UnsupportedPromptError("a change names a tool that is not declared")
            if block["type"] == "tool_addition":
                tools[name] = {**tools[name], "defer_loading": None}
        if block["type"] == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in tools.items() if name not in removed]


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    schema = mapping(tool.get("input_schema"), "input_schema")
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": schema if "type" in schema else {**schema, "type": "object"},
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}
