"""What the picker knows of one request: the model, its prompts and its limits, as plain facts.

Nothing here judges the request: vLLM does. The picker needs only what decides where the prompt is cached.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec


class ApiKind(Enum):
    """Which API a path belongs to; OTHER has no prompt that the picker can read."""

    CHAT_COMPLETIONS = "chat-completions"
    COMPLETIONS = "completions"
    RESPONSES = "responses"  # /v1/responses
    MESSAGES = "messages"  # Anthropic's /v1/messages
    EMBEDDINGS = "embeddings"
    POOLING = "pooling"  # /pooling, /classify
    SCORE = "score"  # /score, /v1/score: pairs of texts
    RERANK = "rerank"
    GENERATE = "generate"  # /inference/v1/generate: token ids in, token ids out
    TOKENIZE = "tokenize"  # /tokenize, /detokenize, count_tokens, …/render: costs no GPU
    OTHER = "other"


# whose answers are tokens, to which times can be promised
TEXT_APIS = frozenset(
    (ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES, ApiKind.GENERATE)
)


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation that the model's chat template turns into text.

    Messages, tools, documents and variables are JSON values as the client sent them (key order kept). The
    defaults are vLLM's: the template writes BOS itself, hence no added special tokens.
    """

    messages: tuple[Any, ...]
    tools: tuple[Any, ...] | None = None
    documents: tuple[Any, ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)  # extra variables for the template
    reasoning_effort: Any = None  # the request's own field, which is among the variables, too
    messages_system_first: tuple[Any, ...] | None = None  # in place of messages, if a later system message is refused
    kwargs_low_effort: Mapping[str, Any] | None = None  # in place of the kwargs, if thinking cannot be switched off


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A text that is tokenized as it is; the tokenizer adds BOS and the like by default."""

    text: str
    add_special_tokens: bool = True
    suffix: str | None = None  # what is to come behind the answer: the model fills in the middle


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids that the client made itself; nothing is added to them."""

    token_bytes: bytes  # little-endian uint32

    @classmethod
    def of(cls, ids: Iterable[int]) -> "TokenPrompt":
        """Pack ids; raise OverflowError or TypeError when one is not an unsigned 32-bit integer."""
        packed = array("I", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(token_bytes=packed.tobytes())


class PairPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A query and a document to be scored; what becomes of them is up to the model (`prompts.prompt_forms`)."""

    query: str
    document: str
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt | PairPrompt


class TruncationSide(Enum):
    """Which end of a prompt vLLM keeps."""

    LEFT = "left"  # cut from the left: the last tokens are kept (vLLM's default)
    RIGHT = "right"  # cut from the right: the first tokens are kept


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """`truncate_prompt_tokens`: the prompt is cut to so many tokens before it is served."""

    tokens: int  # -1: the model's context length less `held_back`
    side: TruncationSide = TruncationSide.LEFT
    held_back: int = 0  # tokens of the context kept for output; counts only with tokens = -1
    keeps_special_tokens: bool = True  # the tokenizer cuts, around the special tokens that it adds; else any token goes


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one request. Without prompts it is routed on load, and `unsupported_reason` says why."""

    api: ApiKind
    path: str  # without the query string
    model: str | None = None  # None: the pod's default model
    prompts: tuple[Prompt, ...] = ()
    stream: bool = False
    max_tokens: int | None = None  # output tokens; None: up to the model's limit
    cache_salt: str | None = None  # enters the first block's key and so the whole chain
    truncation: Truncation | None = None
    user: str | None = None  # `user`, `safety_identifier` or `metadata.user_id`: keeps a user on one arm of a split
    session: str | None = None  # what the body says of the conversation that it belongs to
    kept_response: str | None = None  # a response that some pod keeps: only that pod can answer
    response_id: str | None = None  # that the client chose for a response which the pod may keep
    wants_response_id: bool = False  # the pod may keep the response, and the client chose no id for it
    has_media: bool = False  # images, audio, video among the messages: only a pod's render endpoint knows their tokens
    unsupported_reason: str | None = None
    body_bytes: int = 0  # what was read for it; a large body is worth a thread
