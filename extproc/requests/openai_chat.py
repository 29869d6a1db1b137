"""Read /v1/chat/completions and its batch form, with vLLM 0.32's defaults.

Called by `openai.parse_request`. Messages of any shape pass: the pod judges them.
"""

from typing import Any

from extproc.requests.request import ApiKind, ChatPrompt, InferenceRequest, Prompt, Truncation, TruncationSide
from extproc.requests.request_fields import (
    TruncatedBody,
    UnsupportedPromptError,
    facts,
    flag,
    forwarded_ids,
    have_media,
    objects,
    require_few,
    template_variables,
    truncation,
)


class ChatBody(TruncatedBody, kw_only=True):
    """The fields that change a chat's tokens; `messages` of another type leave nothing to serve."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None
    echo: Any = None


def chat_request(path: str, body: ChatBody) -> InferenceRequest:
    """Return the facts of one conversation."""
    return _request(path, body, [body.messages])


def chat_batch_request(path: str, body: ChatBody) -> InferenceRequest:
    """Return the facts of /v1/chat/completions/batch, where `messages` is a list of conversations."""
    return _request(path, body, body.messages)


def _request(path: str, body: ChatBody, conversations: list[Any]) -> InferenceRequest:
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompts: tuple[Prompt, ...] | UnsupportedPromptError
    cut: Truncation | None = None
    media = False
    try:
        if body.truncate_prompt_tokens is not None:
            cut = truncation(body, output_tokens=limit, default_side=TruncationSide.LEFT)
        prompts, media = _prompts(body, conversations)
    except UnsupportedPromptError as error:
        prompts = error
    return facts(ApiKind.CHAT_COMPLETIONS, path, body, prompts, max_tokens=limit, truncation=cut, has_media=media)


def _prompts(body: ChatBody, conversations: list[Any]) -> tuple[tuple[Prompt, ...], bool]:
    if body.chat_template is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    require_few(conversations)
    media = False
    for messages in conversations:
        if not isinstance(messages, list):
            raise UnsupportedPromptError("messages must be a list of conversations")
        media = media or have_media(messages)
    if body.kv_transfer_params is not None and not media:
        ids = forwarded_ids(body, echo=flag(body.echo, default=False))
        if ids is not None:
            return (ids,), False
    if len(conversations) == 1:
        return (_chat_prompt(body, conversations[0]),), media
    return tuple([_chat_prompt(body, messages) for messages in conversations]), media


def _chat_prompt(body: ChatBody, messages: list[Any]) -> ChatPrompt:
    generate, resume, special = body.add_generation_prompt, body.continue_final_message, body.add_special_tokens
    kwargs, effort = body.chat_template_kwargs, body.reasoning_effort
    # most fields are not given: no function is called for those (parsing costs 20 us less with cold caches)
    return ChatPrompt(
        messages=tuple(messages),
        tools=None if body.tools is None else objects(body.tools, "tools"),
        documents=None if body.documents is None else objects(body.documents, "documents"),
        add_generation_prompt=generate is None or flag(generate, default=True),
        continue_final_message=resume is not None and flag(resume, default=False),
        add_special_tokens=special is not None and flag(special, default=False),
        chat_template_kwargs={} if kwargs is None and effort is None else template_variables(kwargs, effort),
    )
