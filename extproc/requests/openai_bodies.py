"""Read chats, completions, token ids and the APIs of pooling models, with vLLM 0.32's defaults.

Messages of any shape pass: the pod judges them.
"""

from typing import Any

from extproc.requests.request import TruncationSide
from extproc.requests.request_fields import (
    Body,
    PromptBody,
    ReadPrompts,
    UnsupportedPromptError,
    chat_prompt,
    completion_prompts,
    flag,
    forwarded_ids,
    have_media,
    require_few,
    token_prompt,
    truncation,
)

COMPLETION_MAX_TOKENS = 16  # vLLM's default in this API, also for null; chats may use up the context


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


class PoolingBody(PromptBody, kw_only=True):
    """The fields of pooling models that change the tokens."""

    input: Any = None
    messages: Any = None
    padding: Any = None


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
    for name in ("prompt_embeds", "suffix"):
        if getattr(body, name) is not None:
            raise UnsupportedPromptError(f"{name} gives the prompt tokens that only the pod knows")
    cut = truncation(body, default_side=TruncationSide.LEFT)
    return ReadPrompts(completion_prompts(body, body.prompt, name="prompt"), cut)


def read_generate(body: GenerateBody) -> ReadPrompts:
    """Read a request whose prompt was rendered elsewhere."""
    if body.features is not None or body.content_parts is not None:
        raise UnsupportedPromptError("the token ids come with media, which enter the block keys")
    return ReadPrompts((token_prompt(body.token_ids),))


def read_embeddings(body: PoolingBody) -> ReadPrompts:
    """Read /v1/embeddings, which also takes conversations, one or a list, in either field."""
    return _pooling(body, batches=True)


def read_pooling(body: PoolingBody) -> ReadPrompts:
    """Read /pooling or /classify."""
    return _pooling(body, batches=False)


def read_cohere_embed(_: PoolingBody) -> ReadPrompts:
    """Refuse the prompts of /v2/embed."""
    raise UnsupportedPromptError("the pod puts the model's own words before each text")


def read_scored(_: PoolingBody) -> ReadPrompts:
    """Refuse the prompts of /score and /rerank: the body does not say what becomes of pairs."""
    raise UnsupportedPromptError("only the pod knows whether its model scores pairs or single texts")


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
