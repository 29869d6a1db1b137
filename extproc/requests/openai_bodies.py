"""Read OpenAI's APIs and those of pooling models, with vLLM 0.32's defaults.

Messages of any shape pass: the pod judges them. A response is turned into a chat as vLLM does for models without the
harmony format; a conversation that the pod keeps (`previous_response_id`) is not in the body, so its tokens are
unknown. Items that vLLM refuses leave the request to the pod.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.errors import ChatTemplateError
from extproc.requests.chat_messages import call_arguments
from extproc.requests.request import ChatPrompt, PairPrompt, Prompt, TextPrompt, Truncation, TruncationSide
from extproc.requests.request_fields import (
    Body,
    KeptResponse,
    PromptBody,
    ReadPrompts,
    UnsupportedPromptError,
    chat_prompt,
    completion_prompts,
    flag,
    forwarded_ids,
    have_media,
    held_back,
    mapping,
    objects,
    require_few,
    template_variables,
    text,
    token_prompt,
    truncation,
    unicode_text,
)

COMPLETION_MAX_TOKENS = 16  # vLLM's default in this API, also for null; chats may use up the context
PARTIAL = ("in_progress", "incomplete")
# what a tool that takes free text looks like to the model
CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


# --- chats, completions, token ids --------------------------------------------------------------------------------


class ChatBody(PromptBody, kw_only=True):
    """The fields that change a chat's tokens; `messages` of another type leave nothing to serve."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    reasoning_effort: Any = None
    echo: Any = None

    @property
    def output_limit(self) -> Any:
        """The newer of the two fields wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(PromptBody, kw_only=True):
    """The fields that change a completion's tokens."""

    prompt: Any = None
    prompt_embeds: Any = None
    suffix: Any = None
    max_tokens: Any = None

    @property
    def output_limit(self) -> Any:
        """vLLM's default where there is none."""
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class GenerateBody(Body, kw_only=True):
    """Token ids and what goes with them."""

    token_ids: Any = None
    features: Any = None
    content_parts: Any = None
    sampling_params: Any = None

    @property
    def output_limit(self) -> Any:
        """As in completions, but for sampling parameters that are no object."""
        sampling = self.sampling_params
        return sampling.get("max_tokens", COMPLETION_MAX_TOKENS) if isinstance(sampling, dict) else None


def read_chat(body: ChatBody) -> ReadPrompts:
    """Read one conversation."""
    return _chats(body, [body.messages])


def read_chat_batch(body: ChatBody) -> ReadPrompts:
    """Read /v1/chat/completions/batch, where `messages` is a list of conversations."""
    return _chats(body, body.messages)


def _chats(body: ChatBody, conversations: list[Any]) -> ReadPrompts:
    cut = truncation(body, default_side=TruncationSide.LEFT)
    if body.chat_template is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    require_few(conversations)
    if not all(isinstance(messages, list) for messages in conversations):
        raise UnsupportedPromptError("messages must be a list of conversations")
    media = any(map(have_media, conversations))
    if body.kv_transfer_params is not None and not media:
        ids = forwarded_ids(body, echo=flag(body.echo, default=False))
        if ids is not None:
            return ReadPrompts((ids,), cut)
    prompts = [
        chat_prompt(
            body, messages, generate=True, effort=body.reasoning_effort, tools=body.tools, documents=body.documents
        )
        for messages in conversations
    ]
    return ReadPrompts(tuple(prompts), cut, media)


def read_completion(body: CompletionBody) -> ReadPrompts:
    """Read a completion; several prompts are several prefills."""
    if body.prompt_embeds is not None:
        raise UnsupportedPromptError("prompt_embeds are vectors in place of tokens")
    cut = truncation(body, default_side=TruncationSide.LEFT)
    prompts = completion_prompts(body, body.prompt, name="prompt")
    if body.suffix is not None:
        prompts = tuple([_with_suffix(prompt, text(body.suffix, "suffix"), cut) for prompt in prompts])
    return ReadPrompts(prompts, cut)


def _with_suffix(prompt: Prompt, suffix: str, cut: Truncation | None) -> TextPrompt:
    if not isinstance(prompt, TextPrompt) or cut is not None:
        raise UnsupportedPromptError("suffix goes with texts that are not cut")
    return msgspec.structs.replace(prompt, suffix=suffix)


def read_generate(body: GenerateBody) -> ReadPrompts:
    """Read a request whose prompt was rendered elsewhere."""
    if body.features is not None or body.content_parts is not None:
        raise UnsupportedPromptError("the token ids come with media, which enter the block keys")
    return ReadPrompts((token_prompt(body.token_ids),))


# --- pooling models ----------------------------------------------------------------------------------------------


class PoolingBody(PromptBody, kw_only=True):
    """The fields of pooling models that change the tokens."""

    input: Any = None
    messages: Any = None
    padding: Any = None


def read_embeddings(body: PoolingBody) -> ReadPrompts:
    """Read /v1/embeddings, which also takes conversations, one or a list, in either field."""
    return _pooling(body, batches=True)


def read_pooling(body: PoolingBody) -> ReadPrompts:
    """Read /pooling or /classify."""
    return _pooling(body, batches=False)


def read_cohere_embed(_: PoolingBody) -> ReadPrompts:
    """Refuse the prompts of /v2/embed."""
    raise UnsupportedPromptError("the pod puts the model's own words before each text")


class ScoredBody(PromptBody, kw_only=True):
    """A query or several, and documents, under all the names that vLLM takes."""

    query: Any = None
    queries: Any = None
    documents: Any = None
    items: Any = None
    data_1: Any = None
    data_2: Any = None
    text_1: Any = None
    text_2: Any = None
    instruction: Any = None
    max_tokens_per_query: Any = 0
    max_tokens_per_doc: Any = 0


def read_rerank(body: ScoredBody) -> ReadPrompts:
    """Read /rerank: one query, and documents."""
    return _scored(body, [body.query], body.documents)


def read_score(body: ScoredBody) -> ReadPrompts:
    """Read /score: a query for each document, or one for all."""
    for first, second in (
        (body.queries, body.documents),
        (body.queries, body.items),
        (body.data_1, body.data_2),
        (body.text_1, body.text_2),
    ):
        if first is not None and second is not None:
            return _scored(body, first, second)
    raise UnsupportedPromptError("there are no two kinds of texts to be scored")


def _scored(body: ScoredBody, queries: Any, documents: Any) -> ReadPrompts:
    if body.max_tokens_per_query or body.max_tokens_per_doc:
        raise UnsupportedPromptError("the query and the documents are cut on their own before they are put together")
    queries = queries if isinstance(queries, list) else [queries]
    documents = documents if isinstance(documents, list) else [documents]
    require_few(documents)
    if len(queries) == 1:
        queries = queries * len(documents)
    if not documents or len(queries) != len(documents):
        raise UnsupportedPromptError("there must be one query for each document, or one for all")
    kwargs = {} if body.chat_template_kwargs is None else mapping(body.chat_template_kwargs, "chat_template_kwargs")
    if body.instruction is not None:
        kwargs = {"instruction": text(body.instruction, "instruction"), **kwargs}
    pairs = [
        PairPrompt(query=text(query, "a query"), document=text(document, "a document"), chat_template_kwargs=kwargs)
        for query, document in zip(queries, documents, strict=True)
    ]
    return ReadPrompts(tuple(pairs), truncation(body, default_side=TruncationSide.RIGHT))


def _pooling(body: PoolingBody, *, batches: bool) -> ReadPrompts:
    if body.padding not in (None, "do_not_pad"):
        raise UnsupportedPromptError("padding fills the prompt to a length that only the pod knows")
    cut = truncation(body, default_side=TruncationSide.RIGHT)
    conversations = _conversations(body, batches=batches)
    if conversations is None:
        return ReadPrompts(completion_prompts(body, body.input, name="input"), cut)
    require_few(conversations)
    media = any(map(have_media, conversations))
    # unlike chats that are answered, these end with the last message
    return ReadPrompts(tuple([chat_prompt(body, each, generate=False) for each in conversations]), cut, media)


def _conversations(body: PoolingBody, *, batches: bool) -> list[list[Any]] | None:
    """Return the conversations, None where there are texts or tokens."""
    if body.messages is not None and body.input is not None:
        raise UnsupportedPromptError("input and messages exclude each other")
    given = body.input if body.messages is None else body.messages
    if _are_messages(given) and (batches or body.messages is not None):
        return [given]
    if batches and isinstance(given, list) and given and all(_are_messages(item) for item in given):
        return given
    if body.messages is not None:
        raise UnsupportedPromptError("messages must be a list of messages")
    return None


def _are_messages(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
    )


# --- responses ---------------------------------------------------------------------------------------------------


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
    store: Any = True
    request_id: Any = msgspec.UNSET  # of the response, by the client
    conversation: Any = None  # an id, or an object with one; vLLM 0.32 keeps none

    @property
    def output_limit(self) -> Any:
        """The field of this API."""
        return self.max_output_tokens

    @property
    def session(self) -> str | None:
        """A conversation's id says more than a key of the cache."""
        named = self.conversation.get("id") if isinstance(self.conversation, dict) else self.conversation
        return unicode_text(self.session_id) or unicode_text(named) or unicode_text(self.prompt_cache_key)

    @property
    def kept(self) -> KeptResponse:
        """A response is kept unless `store` is false or null."""
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
