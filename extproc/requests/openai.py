"""Read the request bodies of all APIs that vLLM 0.32 serves, OpenAI's and others: the entry for every one of them.

The buffered body is only read: its bytes go to the pod unchanged. Only bodies that no pod could answer are refused
here. Everything else that is odd is left for vLLM to judge, on the pod that the load suggests.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from extproc.errors import BodyTooLargeError, MalformedRequestError, PickError, UnsupportedEncodingError
from extproc.requests import openai_bodies as openai
from extproc.requests.anthropic_messages import MessagesBody, read_messages
from extproc.requests.json_body import (
    BodyNotReadError,
    ClientBody,
    MalformedFieldError,
    UnknownContentEncodingError,
    decode_body,
    may_be_object,
)
from extproc.requests.kept_responses import response_in_path
from extproc.requests.request import ApiKind, InferenceRequest
from extproc.requests.request_fields import Body, ReadPrompts, UnsupportedPromptError, count, flag, unicode_text
from kvmesh.blocks.block_keys import held_name

MAX_DECODED_BYTES = 16 << 20
NOT_OF_THE_API = "the body is not what this API takes"
JSON_TYPE = "application/json"  # all that vLLM takes; a charset or the like may follow


class AmbiguousBodyError(MalformedFieldError):
    """The body fits two APIs, and which of them serves it is up to the pod."""


class _Api(NamedTuple):
    """How one API's bodies are read. A strict one is refused here when no pod could answer it."""

    kind: ApiKind
    decoder: msgspec.json.Decoder[Any]
    read: Callable[[Any], ReadPrompts]
    strict: bool


def _served(kind: ApiKind, body: type[Body], read: Callable[[Any], ReadPrompts], *, strict: bool = True) -> _Api:
    return _Api(kind, msgspec.json.Decoder(body), read, strict)


_CHAT = _served(ApiKind.CHAT_COMPLETIONS, openai.ChatBody, openai.read_chat)
_COMPLETION = _served(ApiKind.COMPLETIONS, openai.CompletionBody, openai.read_completion)
# the short paths of pooling models are not strict: another application may have them, too
_POOLING = _served(ApiKind.POOLING, openai.PoolingBody, openai.read_pooling, strict=False)
_SCORE = _served(ApiKind.SCORE, openai.ScoredBody, openai.read_score, strict=False)
_RERANK = _served(ApiKind.RERANK, openai.ScoredBody, openai.read_rerank, strict=False)
# any of those above, by what is in the body
_INVOCATIONS = _served(ApiKind.OTHER, openai.PoolingBody, openai.read_pooling, strict=False)

# The APIs by the ends of their paths: a gateway may serve them under a prefix.
_APIS = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", _COMPLETION),
    ("/v1/chat/completions/batch", _served(ApiKind.CHAT_COMPLETIONS, openai.ChatBody, openai.read_chat_batch)),
    ("/v1/responses", _served(ApiKind.RESPONSES, openai.ResponsesBody, openai.read_responses)),
    ("/v1/messages", _served(ApiKind.MESSAGES, MessagesBody, read_messages)),
    ("/inference/v1/generate", _served(ApiKind.GENERATE, openai.GenerateBody, openai.read_generate)),
    ("/v1/embeddings", _served(ApiKind.EMBEDDINGS, openai.PoolingBody, openai.read_embeddings)),
    ("/v2/embed", _served(ApiKind.EMBEDDINGS, openai.PoolingBody, openai.read_cohere_embed, strict=False)),
    ("/pooling", _POOLING),
    ("/classify", _POOLING),
    ("/score", _SCORE),
    ("/rerank", _RERANK),
    ("/invocations", _INVOCATIONS),
)
# the last segments of paths that only turn texts into tokens or back
_NO_GPU = frozenset(("tokenize", "detokenize", "count_tokens", "render", "derender"))


class _OtherBody(msgspec.Struct, kw_only=True):
    model: Any = None
    stream: Any = None


class _InvokedBody(msgspec.Struct, kw_only=True):
    """The fields by which the APIs differ."""

    messages: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    input: Any = None
    query: Any = None
    queries: Any = None


_OTHER = msgspec.json.Decoder(_OtherBody)
_INVOKED = msgspec.json.Decoder(_InvokedBody)


def parse_request(
    *,
    path: str,
    body: bytes | None,
    method: str = "POST",
    content_type: str | None = None,
    content_encoding: str | None = None,
    max_decoded_bytes: int = MAX_DECODED_BYTES,
    require_readable: bool = False,
    coded: ClientBody | None = None,
) -> InferenceRequest:
    """Return the facts of a request; `path` may carry a prefix and a query string, `body` is None if it is not known.

    `content_type` and `content_encoding` are the headers' values, None where there is none. Raise
    MalformedRequestError when the body of a known API is not a JSON object or a field has a type that no pod can
    serve, BodyTooLargeError when it unpacks to more than `max_decoded_bytes`. A prompt whose tokens cannot be known
    leaves `prompts` empty and sets `unsupported_reason`. With `require_readable` no body passes unread that vLLM may
    be able to read: raise UnsupportedEncodingError, or BodyTooLargeError for one with too many parts. `coded` is the
    same body, whose encoding may have been undone already.
    """
    path = path.partition("?")[0]
    if body is not None and type(body) is not bytes:
        body = bytes(body)
    api, kind = _api(path) if method == "POST" else (None, ApiKind.OTHER)
    if body is None:
        return _other_request(kind, path, b"", None if api is None else "Envoy does not send the body")
    is_json = _is_json(content_type)
    known = api if is_json else None
    # pods read nothing but JSON, and no GET's body; uploads to other applications are not judged
    is_needed = require_readable and is_json and method == "POST" and (api is not None or content_type is not None)
    why = None if api is None or is_json else "the content-type is not application/json, all that vLLM takes"
    try:
        plain = body
        if content_encoding:
            coded = coded or ClientBody(body, content_encoding=content_encoding, max_bytes=max_decoded_bytes)
            plain = coded.plain()
        if known is None:
            return _other_request(kind, path, plain, why)
        if known.strict:
            return _read(known, path, plain)
        return _lenient_request(known, path, plain, is_needed=is_needed)
    except (UnknownContentEncodingError, BodyNotReadError) as error:
        if is_needed:
            kind_of_error = BodyTooLargeError if isinstance(error, BodyNotReadError) else UnsupportedEncodingError
            raise kind_of_error(f"{error}, and what the request may have depends on it") from None
        why = why if known is None else str(error)
    except PickError as error:
        if _is_final(error, known, is_needed=is_needed):
            raise
        why = why if known is None else NOT_OF_THE_API
    return _other_request(kind, path, b"", why)


def _is_final(error: PickError, known: _Api | None, *, is_needed: bool) -> bool:
    """Tell whether no pod gets the body; one of an unknown API is routed all the same."""
    if isinstance(error, BodyTooLargeError | AmbiguousBodyError):
        return known is not None or is_needed
    return known is not None and known.strict


def _lenient_request(api: _Api, path: str, body: bytes, *, is_needed: bool) -> InferenceRequest:
    """Return the facts of a body that is routed whatever it is."""
    chosen = _invoked(body, is_needed=is_needed) if api is _INVOCATIONS else api
    if chosen is None:
        return _other_request(api.kind, path, body)
    try:
        return _read(chosen, path, body)
    except MalformedRequestError:
        return _other_request(api.kind, path, body, NOT_OF_THE_API)


def _api(path: str) -> tuple[_Api | None, ApiKind]:
    for end, api in _APIS:
        if path.endswith(end):
            return api, api.kind
    return None, ApiKind.TOKENIZE if path.rpartition("/")[2] in _NO_GPU else ApiKind.OTHER


def _invoked(body: bytes, *, is_needed: bool) -> _Api | None:
    """Return the API as which vLLM's /invocations serves a body: it tries one after another until the body fits.

    Only the names of the fields are compared. vLLM looks at their types, too, so a body that fits two APIs is refused
    where the difference matters (`is_needed`).
    """
    try:
        found = decode_body(_INVOKED, body)
    except MalformedRequestError:
        return None
    if is_needed and found.messages is not None and (found.prompt is not None or found.prompt_embeds is not None):
        raise AmbiguousBodyError("The request body has both messages and a prompt.")
    if isinstance(found.messages, list):
        return _CHAT
    if found.prompt is not None or found.prompt_embeds is not None:
        return _COMPLETION
    if found.input is not None:
        return _POOLING
    return _RERANK if found.query is not None else _SCORE if found.queries is not None else None


def _is_json(content_type: str | None) -> bool:
    return content_type is None or content_type.partition(";")[0].lower() == JSON_TYPE


def _read(api: _Api, path: str, body: bytes) -> InferenceRequest:
    fields: Body = decode_body(api.decoder, body)
    model = unicode_text(fields.model)
    if fields.model and model is None:
        raise MalformedFieldError("The request body has a model whose name is not valid Unicode.")
    found, reason = ReadPrompts(()), None
    try:
        found = api.read(fields)
    except UnsupportedPromptError as error:
        reason = str(error)
    kept = fields.kept
    return InferenceRequest(
        api=api.kind,
        path=path,
        model=model,  # None for "", too: the pod takes its default
        prompts=found.prompts,
        stream=flag(fields.stream, default=False),
        max_tokens=count(fields.output_limit),
        cache_salt=_held_salt(unicode_text(fields.cache_salt)),
        truncation=found.truncation,
        user=fields.sender,
        session=fields.session,
        kept_response=kept.needed,
        response_id=kept.chosen_id,
        wants_response_id=kept.wants_id,
        has_media=found.has_media,
        unsupported_reason=reason,
        body_bytes=len(body),
    )


def _held_salt(salt: str | None) -> str | None:
    """Return what stands for a salt in block keys; the pod still gets the client's own, in the body."""
    return held_name(salt) if salt else salt


def _other_request(kind: ApiKind, path: str, body: bytes, unsupported_reason: str | None = None) -> InferenceRequest:
    """Return what is known without understanding the body: it is routed on load whatever it is.

    Raise BodyNotReadError for what may be an object and would take too long.
    """
    try:
        other = decode_body(_OTHER, body) if may_be_object(body) else _OtherBody()
    except MalformedRequestError:
        other = _OtherBody()
    return InferenceRequest(
        api=kind,
        path=path,
        model=unicode_text(other.model),
        stream=flag(other.stream, default=False),
        max_tokens=0 if kind is ApiKind.TOKENIZE else None,
        kept_response=response_in_path(path),
        unsupported_reason=unsupported_reason,
    )
