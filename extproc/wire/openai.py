"""Read the request bodies of all APIs that vLLM 0.32 serves, OpenAI's and others: the entry for every one of them.

Called by the use case with the buffered body, which is only read: the bytes go to the pod unchanged. Only bodies
that no pod could answer are refused here. Everything else that is odd is left for vLLM to judge, on the pod that the
load suggests.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from extproc.core.request import ApiKind, InferenceRequest
from extproc.errors import MalformedRequestError, PickError
from extproc.wire.anthropic_messages import MessagesBody, messages_request
from extproc.wire.content_encoding import UnknownContentEncodingError, decoded_body
from extproc.wire.json_body import BodyNotReadError, MalformedFieldError, decode_body
from extproc.wire.openai_chat import ChatBody, chat_batch_request, chat_request
from extproc.wire.openai_completions import CompletionBody, GenerateBody, completion_request, generate_request
from extproc.wire.pooling_apis import (
    PoolingBody,
    cohere_embed_request,
    embeddings_request,
    pooling_request,
    rerank_request,
    score_request,
)
from extproc.wire.request_fields import Body, flag, is_unicode
from extproc.wire.responses_api import ResponsesBody, responses_request

_B = TypeVar("_B", bound=Body)

MAX_DECODED_BYTES = 16 << 20
JSON_TYPE = "application/json"  # all that vLLM takes; a charset or the like may follow


class _Api(Generic[_B]):
    """How one API's bodies are read. A `strict` one is refused here when no pod could answer it."""

    __slots__ = ("decoder", "kind", "read", "strict")

    def __init__(
        self, kind: ApiKind, body: type[_B], read: Callable[[str, _B], InferenceRequest], *, strict: bool = True
    ) -> None:
        self.kind = kind
        self.decoder = msgspec.json.Decoder(body)
        self.read = read
        self.strict = strict


# Paths by their end (a gateway may serve them under a prefix), grouped by the last segment, more specific ones first.
# The short ones of pooling models are not strict: another application may have them, too.
_APIS: dict[str, tuple[tuple[str, _Api[Any]], ...]] = {
    "completions": (
        ("/v1/chat/completions", _Api(ApiKind.CHAT_COMPLETIONS, ChatBody, chat_request)),
        ("/v1/completions", _Api(ApiKind.COMPLETIONS, CompletionBody, completion_request)),
    ),
    "batch": (("/v1/chat/completions/batch", _Api(ApiKind.CHAT_COMPLETIONS, ChatBody, chat_batch_request)),),
    "responses": (("/v1/responses", _Api(ApiKind.RESPONSES, ResponsesBody, responses_request)),),
    "messages": (("/v1/messages", _Api(ApiKind.MESSAGES, MessagesBody, messages_request)),),
    "generate": (("/inference/v1/generate", _Api(ApiKind.GENERATE, GenerateBody, generate_request)),),
    "embeddings": (("/v1/embeddings", _Api(ApiKind.EMBEDDINGS, PoolingBody, embeddings_request)),),
    "embed": (("/v2/embed", _Api(ApiKind.EMBEDDINGS, PoolingBody, cohere_embed_request, strict=False)),),
    "pooling": (("/pooling", _Api(ApiKind.POOLING, PoolingBody, pooling_request, strict=False)),),
    "classify": (("/classify", _Api(ApiKind.POOLING, PoolingBody, pooling_request, strict=False)),),
    "score": (("/score", _Api(ApiKind.SCORE, PoolingBody, score_request, strict=False)),),
    "rerank": (("/rerank", _Api(ApiKind.RERANK, PoolingBody, rerank_request, strict=False)),),
}
# the last segments of paths that only turn texts into tokens or back
_NO_GPU = frozenset(("tokenize", "detokenize", "count_tokens", "render", "derender"))


class _OtherBody(msgspec.Struct, kw_only=True):
    model: Any = None
    stream: Any = None


_OTHER = msgspec.json.Decoder(_OtherBody)


def parse_request(
    *,
    path: str,
    body: bytes | None,
    method: str = "POST",
    content_type: str | None = None,
    content_encoding: str | None = None,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
) -> InferenceRequest:
    """Return the facts of a request; `path` may carry a prefix and a query string, `body` is None if it is not known.

    `content_type` and `content_encoding` are the headers' values, None where there is none. Raise
    MalformedRequestError when the body of a known API is not a JSON object or a field has a type that nobody can
    serve, BodyTooLargeError when it unpacks to more than `max_decoded_bytes`. A prompt whose tokens cannot be known
    leaves `prompts` empty and sets `unsupported_reason`.
    """
    path = path.partition("?")[0]
    if body is not None and type(body) is not bytes:
        body = bytes(body)
    api, kind = _api(path) if method == "POST" else (None, ApiKind.OTHER)
    if api is None:
        return _other_request(kind, path, _plain_or_nothing(body, content_encoding, max_decoded_bytes))
    if body is None:
        return _other_request(kind, path, b"", "Envoy does not send the body")
    if not _is_json(content_type):
        why = "the content-type is not application/json, all that vLLM takes"
        return _other_request(kind, path, _plain_or_nothing(body, content_encoding, max_decoded_bytes), why)
    try:
        if content_encoding:
            body = decoded_body(body, content_encoding=content_encoding, max_bytes=max_decoded_bytes)
        return _read(api, path, body)
    except (UnknownContentEncodingError, BodyNotReadError) as error:
        return InferenceRequest(api=kind, path=path, unsupported_reason=str(error))
    except MalformedRequestError:
        if api.strict:
            raise
        return _other_request(kind, path, body, "the body is not what this API takes")


def _api(path: str) -> tuple[_Api[Any] | None, ApiKind]:
    last = path.rpartition("/")[2]
    for end, api in _APIS.get(last, ()):
        if path.endswith(end):
            return api, api.kind
    return None, ApiKind.TOKENIZE if last in _NO_GPU else ApiKind.OTHER


def _is_json(content_type: str | None) -> bool:
    return content_type is None or content_type == JSON_TYPE or content_type.partition(";")[0].lower() == JSON_TYPE


def _read(api: _Api[Any], path: str, body: bytes) -> InferenceRequest:
    fields = decode_body(api.decoder, body)
    if fields.model is not None and not is_unicode(fields.model):
        raise MalformedFieldError("The request body has a model whose name is not valid Unicode.")
    fields.body_bytes = len(body)
    return api.read(path, fields)


def _plain_or_nothing(body: bytes | None, content_encoding: str | None, max_bytes: int) -> bytes:
    """Return the body without its codings, or nothing where that fails: an unknown API is routed all the same."""
    try:
        return decoded_body(body or b"", content_encoding=content_encoding, max_bytes=max_bytes)
    except (UnknownContentEncodingError, PickError):
        return b""


def _other_request(kind: ApiKind, path: str, body: bytes, unsupported_reason: str | None = None) -> InferenceRequest:
    """Return what is known without understanding the body: it is routed on load whatever it is."""
    try:
        other = decode_body(_OTHER, body) if _may_be_object(body) else _OtherBody()
    except (MalformedRequestError, BodyNotReadError):
        other = _OtherBody()
    model = other.model if isinstance(other.model, str) and is_unicode(other.model) else None
    return InferenceRequest(
        api=kind,
        path=path,
        model=model,
        stream=flag(other.stream, default=False),
        max_tokens=0 if kind is ApiKind.TOKENIZE else None,
        unsupported_reason=unsupported_reason,
    )


def _may_be_object(body: bytes) -> bool:
    """Tell uploads and the like from JSON objects without reading them."""
    return body[:64].lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
