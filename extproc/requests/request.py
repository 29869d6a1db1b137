"""The picker's facts about one request: the model, its prompts and its limits.

Nothing here validates the request: vLLM does. The picker only needs to know where the prompt is cached.
"""

import sys
from array import array
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, TypeAlias

import msgspec


class ApiKind(Enum):
    """The API of a path; OTHER has no prompt that the picker can read."""

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


# APIs that answer with tokens, so that latency targets apply
TEXT_APIS = frozenset(
    (ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.RESPONSES, ApiKind.MESSAGES, ApiKind.GENERATE)
)

# APIs in which both vLLM and SGLang read the header with the rank
RANKED_APIS = frozenset((ApiKind.CHAT_COMPLETIONS, ApiKind.COMPLETIONS, ApiKind.MESSAGES))


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation for the model's chat template.

    Messages, tools, documents and variables are JSON values as the client sent them, with their key order. The
    defaults are vLLM's: the template writes BOS itself, hence no added special tokens.
    """

    messages: tuple[Any, ...]
    tools: tuple[Any, ...] | None = None
    documents: tuple[Any, ...] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)  # extra variables for the template
    reasoning_effort: Any = None  # the request's own field, also among the variables
    messages_system_first: tuple[Any, ...] | None = None  # replaces messages if the template refuses later system ones
    kwargs_low_effort: Mapping[str, Any] | None = None  # replaces the kwargs if thinking cannot be switched off


class TextPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A text to tokenize as it is; the tokenizer adds BOS and the like by default."""

    text: str
    add_special_tokens: bool = True
    suffix: str | None = None  # text after the answer: fill-in-the-middle


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids from the client; no special tokens are added."""

    token_bytes: bytes  # little-endian uint32

    @classmethod
    def of(cls, ids: Iterable[int]) -> "TokenPrompt":
        """Pack ids; raise OverflowError or TypeError if one is not an unsigned 32-bit integer."""
        packed = array("I", ids)
        if sys.byteorder == "big":
            packed.byteswap()
        return cls(token_bytes=packed.tobytes())


class PairPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A query and a document to score; the model decides how to combine them (`prompts.tokenizer`)."""

    query: str
    document: str
    chat_template_kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokenPrompt | PairPrompt


class TruncationSide(Enum):
    """The side of a prompt that vLLM cuts."""

    LEFT = "left"  # cut from the left: the last tokens are kept (vLLM's default)
    RIGHT = "right"  # cut from the right: the first tokens are kept


class Truncation(msgspec.Struct, frozen=True, kw_only=True):
    """`truncate_prompt_tokens`: how vLLM cuts the prompt."""

    tokens: int  # to keep; -1 is the model's context length minus `held_back`
    side: TruncationSide = TruncationSide.LEFT
    held_back: int = 0  # tokens of the context kept for output; counts only with tokens = -1
    keeps_special_tokens: bool = True  # the tokenizer cuts, but not the special tokens it adds; if False, those too


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one request. Without prompts it is routed by load, and `unsupported_reason` says why."""

    api: ApiKind
    path: str  # without the query string
    model: str | None = None  # or None for the pod's default model
    prompts: tuple[Prompt, ...] = ()
    stream: bool = False
    max_tokens: int | None = None  # output tokens of each sequence, or None for the model's limit
    costs_gpu: bool = True  # False: any pod answers at once, whatever its load
    skips_cache: bool = False  # the engine computes the whole prompt: nothing cached helps
    sequences: int = 1  # answers that the engine generates: choices times prompts
    cache_salt: str | None = None  # part of the first block's key, and so of the whole chain
    truncation: Truncation | None = None
    user: str | None = None  # `user`, `safety_identifier` or `metadata.user_id`: keeps a user on one variant of a split
    session: str | None = None  # the conversation's name in the body
    kept_response: str | None = None  # id of a response kept by a pod: only that pod can answer
    response_id: str | None = None  # the client's own id for a response that the pod may keep
    wants_response_id: bool = False  # the pod may keep the response, and the client chose no id
    has_media: bool = False  # images, audio, video among the messages: only a pod's render endpoint knows their tokens
    unsupported_reason: str | None = None
    body_bytes: int = 0  # size of the decoded body; a large one is worth a thread
