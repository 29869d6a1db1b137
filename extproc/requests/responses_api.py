"""The Responses API: its bodies, read with vLLM 0.32's defaults, and the ids of responses that pods keep.

A Responses request becomes a chat as vLLM does for models without the harmony format. A conversation kept by the pod
(`previous_response_id`) is not in the body, so its tokens are unknown. A request with items that vLLM refuses is left
to the pod.

vLLM and SGLang keep a response with its conversation in the memory of the server that made it, so only this server can
continue, return or cancel it. Both take the response's id from the request (`request_id`). The picker writes an id
there that names the pod: any picker with the deployment's key then finds the pod by the id alone, and no response has
to be read. Clients can neither find a pod's address in an id nor make an id for a pod.
"""

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from extproc.errors import ChatTemplateError
from extproc.requests.chat_messages import call_arguments
from extproc.requests.request import ChatPrompt, Truncation
from extproc.requests.request_fields import (
    Body,
    KeptResponse,
    ReadPrompts,
    UnsupportedPromptError,
    flag,
    have_media,
    held_back,
    mapping,
    objects,
    template_variables,
    text,
    unicode_text,
)

PARTIAL = ("in_progress", "incomplete")
# the schema that the model sees for a tool with free-form input
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
PREFIX = "resp_k"  # no engine's id begins like this: after "resp_" theirs continue in hex
_TAG_BYTES = 6  # a pod's name in an id: among ten thousand pods, one id in 28 billion names another one, too
RANDOM_BYTES = 10
_TAG_END = len(PREFIX) + 2 * _TAG_BYTES
UNOWNED_ID = PREFIX + "0" * 2 * (_TAG_BYTES + RANDOM_BYTES)  # placeholder for the id until a pod is chosen
_UNOWNED = UNOWNED_ID.encode()
_OURS = re.compile(rf"{PREFIX}[0-9a-f]{{{2 * (_TAG_BYTES + RANDOM_BYTES)}}}")
_PATH = re.compile(r"/v1/responses/([^/?]+)(?:/[^/?]*)?$")
_NO_ID = frozenset(("render", "compact", "input_tokens"))  # paths of the API without a response's id
LONGEST_ID = 200  # characters; engines' own have about forty


def response_in_path(path: str) -> str | None:
    """Return the id in a path (without query) that returns, cancels or deletes a response, or None."""
    if "/v1/responses/" not in path:  # true for nearly all paths
        return None
    found = _PATH.search(path)
    return None if found is None or found[1] in _NO_ID else found[1]


def owned_id(endpoint: str, random: bytes, *, key: bytes) -> str:
    """Return an id that names the pod (host:port), of UNOWNED_ID's length. `random` has RANDOM_BYTES bytes."""
    tag = blake2b(random + endpoint.encode(), digest_size=_TAG_BYTES, key=key, person=b"kvmesh-response")
    return f"{PREFIX}{tag.hexdigest()}{random.hex()}"


def with_response_id(body: bytes, response_id: str) -> bytes:
    """Return the body with its last UNOWNED_ID replaced by the id."""
    at = body.rindex(_UNOWNED)
    return b"".join((body[:at], response_id.encode(), body[at + len(_UNOWNED) :]))


def is_owned(response_id: str) -> bool:
    """Tell whether an id has the form of a picker's."""
    return _OURS.fullmatch(response_id) is not None


def owner_in(response_id: str, endpoints: Iterable[str], *, key: bytes) -> str | None:
    """Return the endpoint (host:port) that an id names, or None if it names none of them."""
    if not is_owned(response_id):
        return None
    random = bytes.fromhex(response_id[_TAG_END:])
    return next((each for each in endpoints if owned_id(each, random, key=key) == response_id), None)


# --- responses ---------------------------------------------------------------------------------------------------


class ResponsesBody(Body, kw_only=True):
    """The fields that affect the tokens."""

    input: Any = None
    instructions: Any = None
    tools: Any = None
    reasoning: Any = None
    prompt: Any = None
    previous_response_id: Any = None
    chat_template_kwargs: Any = None
    max_output_tokens: Any = None
    truncation: Any = "disabled"  # vLLM cuts for anything else, null included
    store: Any = True
    request_id: Any = msgspec.UNSET  # the response's id, if the client chooses it
    conversation: Any = None  # an id, or an object with one; vLLM 0.32 stores no conversations

    @property
    def output_limit(self) -> Any:
        """This API's field."""
        return self.max_output_tokens

    @property
    def session(self) -> str | None:
        """A session's id, or else the conversation's, which is more specific than the cache key."""
        named = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        return unicode_text(self.session_id) or unicode_text(named) or unicode_text(self.prompt_cache_key)

    @property
    def kept(self) -> KeptResponse:
        """The kept responses involved; the new one is kept unless `store` is false or null."""
        needed = unicode_text(self.previous_response_id)
        if self.store is None or not flag(self.store, default=True):
            return KeptResponse(needed)
        if self.request_id is msgspec.UNSET:
            return KeptResponse(needed, wants_id=True)
        return KeptResponse(needed, chosen_id=unicode_text(self.request_id))


def read_responses(body: ResponsesBody) -> ReadPrompts:
    """Read the conversation that one response continues."""
    if body.previous_response_id is not None:
        raise UnsupportedPromptError("the conversation of previous_response_id is kept by the pod")
    if body.prompt is not None:
        raise UnsupportedPromptError("prompt names a template that is not in the body")
    cut = None if body.truncation == "disabled" else Truncation(tokens=-1, held_back=held_back(body.output_limit))
    messages = _item_messages(body)
    media = have_media(messages)
    effort = mapping(body.reasoning, "reasoning").get("effort") if body.reasoning is not None else None
    resume = _is_partial(body.input)
    tools = objects(body.tools, "tools")
    prompt = ChatPrompt(
        messages=tuple(messages),
        tools=tuple(_functions(tools)) if tools else None,
        add_generation_prompt=not resume,
        continue_final_message=resume,
        add_special_tokens=True,  # unlike chats: vLLM leaves the tokenizer's default here
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort),
    )
    return ReadPrompts((prompt,), cut, media)


def _is_partial(items: Any) -> bool:
    """Tell whether the last item is a partial message for the model to continue."""
    last = items[-1] if isinstance(items, list) and items else None
    return (
        isinstance(last, dict)
        and last.get("type", "message") in ("message", "reasoning")
        and last.get("status") in PARTIAL
    )


def _item_messages(body: ResponsesBody) -> list[dict[str, Any]]:
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
        message = _item_message(mapping(item, "input items"), last if last and last["role"] == "assistant" else None)
        if message is not None:
            messages.append(message)
    return messages


def _item_message(item: Mapping[str, Any], assistant: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a new message, or None if the item was merged into the preceding assistant message."""
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
    """Add a field to the assistant's last message if it lacks it (calls are always added), or return a new message."""
    if assistant is None or (assistant.get(field) is not None and field != "tool_calls"):
        return {"role": "assistant", field: value}
    if field == "tool_calls":
        assistant.setdefault(field, []).extend(value)  # in place: with many calls a new list for each takes minutes
    else:
        assistant[field] = value
    return None


def _tool_call(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return the call with its arguments as a mapping. Unlike in chats the name comes first: templates may dump it."""
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
    """Return an assistant message's text: only the first part counts."""
    return content if isinstance(content, str) else _first_text(content)


def _first_text(parts: Any) -> str:
    first = parts[0] if isinstance(parts, list) and parts else None
    return text(first.get("text") if isinstance(first, dict) else None, "the first part of an item")


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
