"""Entry point for reading request bodies of all APIs that vLLM 0.32 serves, OpenAI's and others.

Reading changes no bytes of the body. Only bodies that no pod could serve are refused here. All other oddities are left
to vLLM: the request is routed by load, and the pod judges it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import msgspec

from extproc.errors import BodyTooLargeError, MalformedRequestError, PickError, UnsupportedEncodingError
from extproc.requests import openai_bodies as openai
from extproc.requests.anthropic_messages import MessagesBody, read_messages
from extproc.requests.client_body import ClientBody, FieldsNotRemovedError
from extproc.requests.form_body import MODEL, FormNotReadError, form_fields, is_form
from extproc.requests.json_body import (
    BodyNotReadError,
    MalformedFieldError,
    UnknownContentEncodingError,
    decode_body,
    may_be_object,
)
from extproc.requests.request import ApiKind, InferenceRequest
from extproc.requests.request_fields import (
    LARGEST_COUNT,
    Body,
    ReadPrompts,
    UnsupportedPromptError,
    count,
    flag,
    unicode_text,
)
from extproc.requests.responses_api import ResponsesBody, read_responses, response_in_path
from kvmesh.blocks.block_keys import held_name

MAX_DECODED_BYTES = 16 << 20
NOT_OF_THE_API = "the body is not what this API takes"
JSON_TYPE = "application/json"  # the only type that vLLM accepts; a charset or the like may follow


class AmbiguousBodyError(MalformedFieldError):
    """The body fits two APIs, and only the pod decides between them."""


class _Api(NamedTuple):
    """How to read one API's bodies. If strict, a body that no pod could serve is refused here."""

    kind: ApiKind
    decoder: msgspec.json.Decoder[Any]
    read: Callable[[Any], ReadPrompts]
    strict: bool


def _served(kind: ApiKind, body: type[Body], read: Callable[[Any], ReadPrompts], *, strict: bool = True) -> _Api:
    return _Api(kind, msgspec.json.Decoder(body), read, strict)


_CHAT = _served(ApiKind.CHAT_COMPLETIONS, openai.ChatBody, openai.read_chat)
_CHATS = _served(ApiKind.CHAT_COMPLETIONS, openai.ChatBody, partial(openai.read_chat, is_batch=True))
_COMPLETION = _served(ApiKind.COMPLETIONS, openai.CompletionBody, openai.read_completion)
_EMBEDDINGS = _served(ApiKind.EMBEDDINGS, openai.PoolingBody, partial(openai.read_pooling, batches=True))
# the short paths of pooling models are not strict: other applications may use them too
_POOLING = _served(ApiKind.POOLING, openai.PoolingBody, openai.read_pooling, strict=False)
_SCORE = _served(ApiKind.SCORE, openai.ScoredBody, openai.read_score, strict=False)
_RERANK = _served(ApiKind.RERANK, openai.ScoredBody, openai.read_rerank, strict=False)
# any of the APIs above, by the body's fields
_INVOCATIONS = _served(ApiKind.OTHER, openai.PoolingBody, openai.read_pooling, strict=False)

# The APIs by the ends of their paths: a gateway may serve them under a prefix.
_APIS = (
    ("/v1/chat/completions", _CHAT),
    ("/v1/completions", _COMPLETION),
    ("/v1/chat/completions/batch", _CHATS),
    ("/v1/responses", _served(ApiKind.RESPONSES, ResponsesBody, read_responses)),
    ("/v1/messages", _served(ApiKind.MESSAGES, MessagesBody, read_messages)),
    ("/inference/v1/generate", _served(ApiKind.GENERATE, openai.GenerateBody, openai.read_generate)),
    ("/v1/embeddings", _EMBEDDINGS),
    ("/v2/embed", _served(ApiKind.EMBEDDINGS, openai.PoolingBody, openai.read_cohere_embed, strict=False)),
    ("/pooling", _POOLING),
    ("/classify", _POOLING),
    ("/score", _SCORE),
    ("/rerank", _RERANK),
    ("/invocations", _INVOCATIONS),
)
# last path segments of APIs that only convert between text and tokens
_NO_GPU = frozenset(("tokenize", "detokenize", "count_tokens", "render", "derender"))


class _OtherBody(msgspec.Struct, kw_only=True):
    model: Any = None
    stream: Any = None


class _InvokedBody(msgspec.Struct, kw_only=True):
    """The fields that tell the APIs apart."""

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
    is_two_way: bool = False,
    coded: ClientBody | None = None,
) -> InferenceRequest:
    """Return the facts of a request. `path` may have a prefix and a query string; `body` is None if unknown.

    `content_type` and `content_encoding` are the headers' values, or None without the header. Raise
    MalformedRequestError if the body of a known API is not a JSON object or has a field of a type that no pod can
    serve, BodyTooLargeError if it unpacks to more than `max_decoded_bytes`. For a prompt with unknown tokens `prompts`
    is empty and `unsupported_reason` is set. With `require_readable` an unread body that vLLM may be able to read is
    refused: raise UnsupportedEncodingError, or BodyTooLargeError for too many parts. `coded` is the same body, perhaps
    decoded already. Transfer fields are removed before reading, as from the pod's body.
    """
    path = path.partition("?")[0]
    if body is not None and type(body) is not bytes:
        body = bytes(body)
    api, kind = _api(path) if method == "POST" else (None, ApiKind.OTHER)
    if body is None:
        why = None if api is None else "Envoy does not send the body"
        return _other_request(kind, path, b"", why, method="POST" if is_two_way else method)
    is_json = content_type is None or content_type.partition(";")[0].lower() == JSON_TYPE
    known = api if is_json else None
    # pods read only JSON, and only of a POST; other applications' uploads need not be readable
    is_needed = require_readable and is_json and method == "POST" and (api is not None or content_type is not None)
    why = None if api is None or is_json else "the content-type is not application/json, all that vLLM takes"
    if content_type and not is_json and method == "POST" and is_form(content_type) and not may_be_object(body):
        return _form_request(kind, path, body, content_type, why, is_needed=require_readable)
    try:
        coded = coded or ClientBody(body, content_encoding=content_encoding, max_bytes=max_decoded_bytes)
        plain = coded.plain()
        if known is None:
            return _other_request(kind, path, plain, why, method=method)
        return _read(known, path, plain) if known.strict else _lenient_request(known, path, plain, is_needed=is_needed)
    except (UnknownContentEncodingError, BodyNotReadError) as error:
        if is_needed:
            kind_of_error = BodyTooLargeError if isinstance(error, BodyNotReadError) else UnsupportedEncodingError
            raise kind_of_error(f"{error}, and what the request may have depends on it") from None
        why = why if known is None else str(error)
    except PickError as error:
        if _is_final(error, known, is_needed=is_needed):
            raise
        why = why if known is None else NOT_OF_THE_API
    return _other_request(kind, path, b"", why, method=method)


def _is_final(error: PickError, known: _Api | None, *, is_needed: bool) -> bool:
    """Tell whether the error refuses the request; otherwise it is routed with its body unread."""
    if isinstance(error, FieldsNotRemovedError):
        return True
    if isinstance(error, BodyTooLargeError | AmbiguousBodyError):
        return known is not None or is_needed
    return known is not None and known.strict


def _lenient_request(api: _Api, path: str, body: bytes, *, is_needed: bool) -> InferenceRequest:
    """Return the facts of a request, which is routed even if its body does not fit the API."""
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


def api_of(path: str) -> ApiKind:
    """Return the API of a path without its query string."""
    return _api(path)[1]


def _invoked(body: bytes, *, is_needed: bool) -> _Api | None:
    """Return the API that vLLM's /invocations chooses for a body: it tries one after another until the body fits.

    Only the fields' names are compared here, but vLLM checks their types too. So a body with both messages and a prompt
    is refused if the difference matters (`is_needed`).
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


def _form_request(
    kind: ApiKind, path: str, body: bytes, content_type: str, unsupported_reason: str | None, *, is_needed: bool
) -> InferenceRequest:
    """Return the facts of an upload. Raise FormNotReadError if it cannot be read and `is_needed`."""
    fields: Mapping[str, str] = {}
    try:
        fields = form_fields(body, content_type, frozenset((MODEL, "stream")))
    except FormNotReadError as error:
        if is_needed:
            raise
        unsupported_reason = unsupported_reason or str(error)
    return msgspec.structs.replace(
        _other_request(kind, path, b"", unsupported_reason),
        model=unicode_text(fields.get(MODEL)),
        stream=flag(fields.get("stream"), default=False),
    )


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
        model=model,  # None for "" too: the pod uses its default
        prompts=found.prompts,
        stream=flag(fields.stream, default=False),
        max_tokens=count(fields.output_limit),
        sequences=min(fields.sequences, LARGEST_COUNT),
        skips_cache=fields.skips_cache,
        # in the form that block keys contain; the pod still gets the client's own, in the body
        cache_salt=held_name(salt) if (salt := unicode_text(fields.cache_salt)) else salt,
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


def _other_request(
    kind: ApiKind, path: str, body: bytes, unsupported_reason: str | None = None, *, method: str = "POST"
) -> InferenceRequest:
    """It is routed by load. Raise BodyNotReadError if the body may be an object and would take too long."""
    try:
        other = decode_body(_OTHER, body) if may_be_object(body) else _OtherBody()
    except MalformedRequestError:
        other = _OtherBody()
    kept = response_in_path(path)
    is_inference = method == "POST" and kind is not ApiKind.TOKENIZE and kept is None
    return InferenceRequest(
        api=kind,
        path=path,
        model=unicode_text(other.model),
        stream=flag(other.stream, default=False),
        costs_gpu=is_inference,
        max_tokens=None if is_inference else 0,
        kept_response=kept,
        unsupported_reason=unsupported_reason,
    )
