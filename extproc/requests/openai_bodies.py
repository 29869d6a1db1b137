"""Reads the bodies of OpenAI's APIs but Responses, and of pooling models, with vLLM 0.32's defaults.

Messages of any shape pass: the pod judges them.
"""

from typing import Any

import msgspec

from extproc.requests.request import PairPrompt, Prompt, TextPrompt, Truncation, TruncationSide
from extproc.requests.request_fields import (
    Body,
    PromptBody,
    ReadPrompts,
    UnsupportedPromptError,
    chat_prompt,
    choices,
    completion_prompts,
    count,
    flag,
    have_media,
    mapping,
    require_few,
    text,
    token_prompt,
    truncation,
)

COMPLETION_MAX_TOKENS = 16  # vLLM's default in this API, also for null; chats may fill the context


# --- chats, completions, token ids --------------------------------------------------------------------------------


class ChatBody(PromptBody, kw_only=True):
    """The fields that affect a chat's tokens; without a list in `messages` no pod could serve the request."""

    messages: list[Any]
    tools: Any = None
    documents: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    reasoning_effort: Any = None
    echo: Any = None
    n: Any = None
    prompt_logprobs: Any = None

    @property
    def skips_cache(self) -> bool:
        """Scores of the prompt's tokens need its whole computation."""
        return self.prompt_logprobs is not None or flag(self.echo, default=False)

    @property
    def sequences(self) -> int:
        """The choices, of each conversation of a batch."""
        messages = self.messages
        return (count(self.n) or 1) * (len(messages) if messages and isinstance(messages[0], list) else 1)

    @property
    def output_limit(self) -> Any:
        """The newer of the two fields wins."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(PromptBody, kw_only=True):
    """The fields that affect a completion's tokens."""

    prompt: Any = None
    prompt_embeds: Any = None
    suffix: Any = None
    max_tokens: Any = None
    n: Any = None
    best_of: Any = None
    echo: Any = None
    logprobs: Any = None
    prompt_logprobs: Any = None

    @property
    def skips_cache(self) -> bool:
        """Scores of the prompt's tokens need its whole computation."""
        scored = self.logprobs is not None and flag(self.echo, default=False)
        return scored or self.prompt_logprobs is not None

    @property
    def sequences(self) -> int:
        """The choices (as beams, too) of each prompt."""
        given = [each for each in (self.prompt, self.prompt_embeds) if isinstance(each, list)]
        prompts = sum(len(each) for each in given if each and not isinstance(each[0], int))
        return choices(self.n, self.best_of) * max(prompts, 1)

    @property
    def output_limit(self) -> Any:
        """`max_tokens`, or vLLM's default."""
        return COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens


class GenerateBody(Body, kw_only=True):
    """The fields of /inference/v1/generate."""

    token_ids: Any = None
    features: Any = None
    content_parts: Any = None
    sampling_params: Any = None

    @property
    def skips_cache(self) -> bool:
        """As asked for, or for scores of the prompt's tokens."""
        sampling = self.sampling_params if isinstance(self.sampling_params, dict) else {}
        skips = flag(sampling.get("skip_reading_prefix_cache"), default=False)
        return skips or sampling.get("prompt_logprobs") is not None

    @property
    def sequences(self) -> int:
        """The choices."""
        sampling = self.sampling_params
        return choices(sampling.get("n"), sampling.get("best_of")) if isinstance(sampling, dict) else 1

    @property
    def output_limit(self) -> Any:
        """As in completions; None if the sampling parameters are not an object."""
        sampling = self.sampling_params
        return sampling.get("max_tokens", COMPLETION_MAX_TOKENS) if isinstance(sampling, dict) else None


def read_chat(body: ChatBody, *, is_batch: bool = False) -> ReadPrompts:
    """Read one conversation; with `is_batch` a list of conversations, as in /v1/chat/completions/batch."""
    conversations = body.messages if is_batch else [body.messages]
    cut = truncation(body, default_side=TruncationSide.LEFT)
    if body.chat_template is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    require_few(conversations)
    if not all(isinstance(messages, list) for messages in conversations):
        raise UnsupportedPromptError("messages must be a list of conversations")
    media = any(map(have_media, conversations))
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
    """The fields of pooling models that affect the tokens."""

    input: Any = None
    messages: Any = None
    padding: Any = None


def read_pooling(body: PoolingBody, *, batches: bool = False) -> ReadPrompts:
    """Read /pooling or /classify; with `batches`, conversations are accepted as in /v1/embeddings.

    There one conversation or a list of them may be in either field.
    """
    if body.padding not in (None, "do_not_pad"):
        raise UnsupportedPromptError("padding fills the prompt to a length that only the pod knows")
    cut = truncation(body, default_side=TruncationSide.RIGHT)
    conversations = _conversations(body, batches=batches)
    if conversations is None:
        return ReadPrompts(completion_prompts(body, body.input, name="input"), cut)
    require_few(conversations)
    media = any(map(have_media, conversations))
    # unlike chats to be answered, these end with the last message
    return ReadPrompts(tuple([chat_prompt(body, each, generate=False) for each in conversations]), cut, media)


def read_cohere_embed(_: PoolingBody) -> ReadPrompts:
    """Refuse the prompts of /v2/embed."""
    raise UnsupportedPromptError("the pod puts the model's own words before each text")


class ScoredBody(PromptBody, kw_only=True):
    """Queries and documents, under all names that vLLM accepts."""

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


def _conversations(body: PoolingBody, *, batches: bool) -> list[list[Any]] | None:
    """Return the conversations, or None if the input is text or tokens."""
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
