"""Read the APIs of pooling models: embeddings, pooling, classify, score and rerank, as vLLM 0.32 does.

Called by `openai.parse_request`. Whether a model scores pairs or single texts is not in the body, so the prompts of
score and rerank are unknown.
"""

from typing import Any

from extproc.requests.request import ApiKind, ChatPrompt, InferenceRequest, Prompt, Truncation, TruncationSide
from extproc.requests.request_fields import (
    TruncatedBody,
    UnsupportedPromptError,
    completion_prompts,
    facts,
    flag,
    have_media,
    require_few,
    template_variables,
    truncation,
)


class PoolingBody(TruncatedBody, kw_only=True):
    """The fields that change the tokens."""

    input: Any = None
    messages: Any = None
    padding: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


def embeddings_request(path: str, body: PoolingBody) -> InferenceRequest:
    """Return the facts of /v1/embeddings, which also takes conversations, one or a list, in either field."""
    return _request(ApiKind.EMBEDDINGS, path, body, batches=True)


def pooling_request(path: str, body: PoolingBody) -> InferenceRequest:
    """Return the facts of /pooling or /classify."""
    return _request(ApiKind.POOLING, path, body, batches=False)


def cohere_embed_request(path: str, body: PoolingBody) -> InferenceRequest:
    """Return the facts of /v2/embed."""
    return _unknown(ApiKind.EMBEDDINGS, path, body, "the pod puts the model's own words before each text")


def score_request(path: str, body: PoolingBody) -> InferenceRequest:
    """Return the facts of /score."""
    return _unknown(ApiKind.SCORE, path, body, "only the pod knows whether its model scores pairs or single texts")


def rerank_request(path: str, body: PoolingBody) -> InferenceRequest:
    """Return the facts of /rerank."""
    return _unknown(ApiKind.RERANK, path, body, "only the pod knows whether its model scores pairs or single texts")


def _unknown(api: ApiKind, path: str, body: PoolingBody, why: str) -> InferenceRequest:
    return facts(api, path, body, UnsupportedPromptError(why), max_tokens=0)


def _request(api: ApiKind, path: str, body: PoolingBody, *, batches: bool) -> InferenceRequest:
    prompts: tuple[Prompt, ...] | UnsupportedPromptError
    cut: Truncation | None = None
    media = False
    try:
        if body.padding not in (None, "do_not_pad"):
            raise UnsupportedPromptError("padding fills the prompt to a length that only the pod knows")
        cut = truncation(body, output_tokens=0, default_side=TruncationSide.RIGHT)
        conversations = _conversations(body, batches=batches)
        if conversations is None:
            special = body.add_special_tokens is None or flag(body.add_special_tokens, default=True)
            prompts = completion_prompts(body.input, name="input", add_special_tokens=special)
        else:
            require_few(conversations)
            media = any(have_media(messages) for messages in conversations)
            prompts = tuple(_chat_prompt(body, messages) for messages in conversations)
    except UnsupportedPromptError as error:
        prompts = error
    return facts(api, path, body, prompts, max_tokens=0, truncation=cut, has_media=media)


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


def _chat_prompt(body: PoolingBody, messages: list[Any]) -> ChatPrompt:
    if body.chat_template is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    return ChatPrompt(
        messages=tuple(messages),
        add_generation_prompt=flag(body.add_generation_prompt, default=False),  # unlike chats that are answered
        continue_final_message=flag(body.continue_final_message, default=False),
        add_special_tokens=flag(body.add_special_tokens, default=False),
        chat_template_kwargs=template_variables(body.chat_template_kwargs, None),
    )
