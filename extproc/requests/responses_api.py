"""Read OpenAI's /v1/responses as vLLM 0.32 turns it into a chat for models without the harmony format.

A conversation that the pod keeps (`previous_response_id`) is not in the body, so its
tokens are unknown. Items that vLLM refuses leave the request to the pod.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from extproc.errors import ChatTemplateError
from extproc.requests.chat_messages import call_arguments
from extproc.requests.request import ChatPrompt, Truncation
from extproc.requests.request_fields import (
    Body,
    ReadPrompts,
    UnsupportedPromptError,
    forwarded_ids,
    have_media,
    held_back,
    mapping,
    objects,
    template_variables,
    text,
)

PARTIAL = ("in_progress", "incomplete")
# what a tool that takes free text looks like to the model
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


class ResponsesBody(Body, kw_only=True):
    """The fields that change the tokens."""

    input: Any = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None
    prompt: Any = None
    previous_response_id: Any = None
    chat_template_kwargs: Any = None
    max_output_tokens: Any = None
    truncation: Any = "disabled"  # vLLM cuts for anything else, null included

    @property
    def output_limit(self) -> Any:
        """The field of this API."""
        return self.max_output_tokens


def read_responses(body: ResponsesBody) -> ReadPrompts:
    """Read the conversation that one response continues."""
    if body.previous_response_id is not None:
        raise UnsupportedPromptError("the conversation of previous_response_id is kept by the pod")
    if body.prompt is not None:
        raise UnsupportedPromptError("prompt names a template that is not in the body")
    cut = None if body.truncation == "disabled" else Truncation(tokens=-1, held_back=held_back(body.output_limit))
    messages = _messages(body)
    media = have_media(messages)
    if body.kv_transfer_params is not None and not media and (ids := forwarded_ids(body, echo=False)) is not None:
        return ReadPrompts((ids,), cut)
    effort = mapping(body.reasoning, "reasoning").get("effort") if body.reasoning is not None else None
    resume = _is_partial(body.input)
    prompt = ChatPrompt(
        messages=tuple(messages),
        tools=_tools(objects(body.tools, "tools")),
        add_generation_prompt=not resume,
        continue_final_message=resume,
        add_special_tokens=True,  # unlike chats: vLLM leaves the tokenizer's default here
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort),
    )
    return ReadPrompts((prompt,), cut, media)


def _is_partial(items: Any) -> bool:
    """Tell whether the last item is a message that the model is to go on with."""
    last = items[-1] if isinstance(items, list) and items else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in PARTIAL
    )


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": text(body.instructions, "instructions")})
    if isinstance(body.input, str):
        messages.append({"role": "user", "content": body.input})
        return messages
    if not isinstance(body.input, list):
        raise UnsupportedPromptError("input must be a text or a list of items")
    first = len(messages)  # instructions never merge with what follows
    for item in body.input:
        last = messages[-1] if len(messages) > first else None
        message = _message(mapping(item, "input items"), last if last and last["role"] == "assistant" else None)
        if message is not None:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any], assistant: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a message of its own, or None for an item that went into the assistant's message before it."""
    kind = item.get("type")
    if kind in ("function_call", "custom_tool_call"):
        return _into(assistant, "tool_calls", [_tool_call(item)])
    if kind == "reasoning":
        return _into(assistant, "reasoning", _reasoning(item))
    if kind in ("function_call_output", "custom_tool_call_output"):
        return {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
    if kind not in (None, "message") or not isinstance(item.get("role"), str):
        raise UnsupportedPromptError(f"input items of type {str(kind)[:40]!r} do not become messages")
    if item["role"] == "assistant":
        return _into(assistant, "content", _assistant_text(item.get("content")))
    return dict(item)


def _into(assistant: dict[str, Any] | None, field: str, value: Any) -> dict[str, Any] | None:
    """Give the assistant's last message a field that it lacks (calls are always added), else make a new message."""
    if assistant is None or (assistant.get(field) is not None and field != "tool_calls"):
        return {"role": "assistant", field: value}
    if field == "tool_calls":
        assistant.setdefault(field, []).extend(value)  # in place: a new list for each of many calls costs minutes
    else:
        assistant[field] = value
    return None


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as a mapping; templates that dump it see the name first, unlike in chats."""
    name = text(item.get("name"), "the name of a call")
    arguments: Mapping[str, Any]
    if item["type"] == "custom_tool_call":
        arguments = {"input": item.get("input") or ""}
    else:
        name = f"{item['namespace']}__{name}" if item.get("namespace") else name
        try:
            arguments = call_arguments(text(item.get("arguments"), "the arguments of a call"))
        except ChatTemplateError as error:
            raise UnsupportedPromptError(str(error)) from error
    call_id = text(item.get("call_id"), "call_id")
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, "type": "function"}


def _reasoning(item: Mapping[str, Any]) -> str:
    if item.get("encrypted_content"):
        raise UnsupportedPromptError("reasoning is encrypted")
    parts = item.get("content") or item.get("summary")
    return _first_text(parts) if parts else ""


def _assistant_text(content: Any) -> str:
    """Return the text of what the model said: only the first part counts."""
    return content if isinstance(content, str) else _first_text(content)


def _first_text(parts: Any) -> str:
    first = parts[0] if isinstance(parts, list) and parts else None
    return text(first.get("text") if isinstance(first, dict) else None, "the first part of an item")


def _tools(tools: Sequence[Any] | None) -> tuple[dict[str, Any], ...] | None:
    """Return the functions that the model is shown, in the shape of chat completions; no tools are no list at all."""
    return tuple(_functions(tools)) if tools else None


def _functions(tools: Iterable[Any]) -> Iterable[dict[str, Any]]:
    for item in tools:
        tool = mapping(item, "tools")
        kind = tool.get("type")
        if kind == "function":
            yield _function(tool, text(tool.get("name"), "a tool's name"))
        elif kind == "custom":
            yield _function({**tool, "parameters": CUSTOM_PARAMETERS}, text(tool.get("name"), "a tool's name"))
        elif kind == "namespace":
            for inner in objects(tool.get("tools"), "the tools of a namespace") or ():
                function = mapping(inner, "tools")
                if function.get("type") == "function":
                    yield _function(function, f"{tool.get('name')}__{function.get('name')}")


def _function(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    fields = ("description", "parameters", "strict", "defer_loading")
    return {"type": "function", "function": {"name": name, **{field: tool.get(field) for field in fields}}}
