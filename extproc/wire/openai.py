"""Read OpenAI-style request bodies, in all prompt forms that vLLM 0.32 takes.

Called by the use case with the buffered body, which is only read: the bytes go to the pod unchanged. Only bodies
that no pod could answer are refused here. Everything else that is odd is left for vLLM to judge, on the pod that the
load suggests.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from extproc.core.request import ApiKind, ChatPrompt, InferenceRequest, Prompt, TextPrompt, TokenPrompt
from extproc.errors import MalformedRequestError

_T = TypeVar("_T")

# pydantic's words for booleans, which vLLM accepts wherever it wants one
TRUE_WORDS = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE_WORDS = frozenset(("0", "off", "f", "false", "n", "no"))
BODY_BYTES_WITHOUT_LIMIT = 256 << 10
MAX_CONTAINERS = 100_000  # objects and lists: about 0.1 s
MAX_ELEMENTS = 1_500_000  # a million token ids and their like: about 0.1 s
COMPLETION_MAX_TOKENS = 16  # vLLM's default in this API; chats may use up the context


class MalformedFieldError(MalformedRequestError):
    """The body is JSON, but a field that the picker must read has the wrong type."""

    reason = "malformed-request"


class _Body(msgspec.Struct, kw_only=True):
    """What both APIs share. Fields are typed where another type leaves nothing to route or to serve."""

    model: str | None = None
    stream: Any = None
    max_tokens: Any = None
    cache_salt: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None


class _ChatBody(_Body, kw_only=True):
    messages: list[Any]
    tools: Any = None
    documents: Any = None
    max_completion_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    reasoning_effort: Any = None


class _CompletionBody(_Body, kw_only=True):
    prompt: Any = None
    prompt_embeds: Any = None
    suffix: Any = None


class _OtherBody(msgspec.Struct, kw_only=True):
    model: Any = None
    stream: Any = None


_CHAT = msgspec.json.Decoder(_ChatBody)
_COMPLETION = msgspec.json.Decoder(_CompletionBody)
_OTHER = msgspec.json.Decoder(_OtherBody)


class _UnsupportedError(Exception):
    """The prompt's tokens cannot be told from the body; the text says why."""


def parse_request(*, path: str, body: bytes | None, method: str = "POST") -> InferenceRequest:
    """Return the facts of a request; `path` may carry a prefix and a query string, `body` is None if it is not known.

    Raise MalformedRequestError when the body of a known API is not a JSON object or a field has a type that nobody
    can serve. A prompt whose tokens cannot be known leaves `prompts` empty and sets `unsupported_reason`.
    """
    path = path.partition("?")[0]
    api = _api(method, path)
    if body is None or api is ApiKind.OTHER:
        return _other_request(path, body or b"", None if api is ApiKind.OTHER else "Envoy does not send the body")
    if _has_too_many_parts(body):
        return InferenceRequest(api=api, path=path, unsupported_reason="the body has too many parts to be read")
    if api is ApiKind.CHAT_COMPLETIONS:
        return _chat_request(path, _decode(_CHAT, body), body_bytes=len(body))
    return _completion_request(path, _decode(_COMPLETION, body), body_bytes=len(body))


def _api(method: str, path: str) -> ApiKind:
    if method == "POST" and path.endswith("/v1/chat/completions"):
        return ApiKind.CHAT_COMPLETIONS
    return ApiKind.COMPLETIONS if method == "POST" and path.endswith("/v1/completions") else ApiKind.OTHER


def _has_too_many_parts(body: bytes) -> bool:
    """Tell whether decoding could hold up other requests: the decoder makes an object a part and keeps the GIL.

    Counts what separates parts, also inside texts, so a very large text full of brackets is routed on load.
    """
    if len(body) <= BODY_BYTES_WITHOUT_LIMIT:
        return False
    return body.count(b"{") + body.count(b"[") > MAX_CONTAINERS or body.count(b",") > MAX_ELEMENTS


def _decode(decoder: msgspec.json.Decoder[_T], body: bytes) -> _T:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise MalformedFieldError(f"The request body has a field of the wrong type: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedRequestError(f"The request body is not a valid JSON object: {error}") from error
    except RecursionError:
        raise MalformedRequestError("The request body is nested too deeply.") from None


def _chat_request(path: str, body: _ChatBody, *, body_bytes: int) -> InferenceRequest:
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompts: tuple[Prompt, ...] = ()
    reason = None
    try:
        prompts = (_chat_prompt(body),)
    except _UnsupportedError as error:
        reason = str(error)
    return _request(
        ApiKind.CHAT_COMPLETIONS, path, body, prompts, reason, max_tokens=_count(limit), body_bytes=body_bytes
    )


def _chat_prompt(body: _ChatBody) -> ChatPrompt:
    kwargs = {} if body.chat_template_kwargs is None else body.chat_template_kwargs
    if not isinstance(kwargs, dict):
        raise _UnsupportedError("chat_template_kwargs must be an object")
    if body.chat_template is not None or kwargs.get("chat_template") is not None:
        raise _UnsupportedError("the request brings a chat template of its own")
    if body.truncate_prompt_tokens is not None:
        raise _UnsupportedError("truncate_prompt_tokens cuts the prompt to a length that only the pod knows")
    return ChatPrompt(
        messages=tuple(body.messages),
        tools=_objects(body.tools, "tools"),
        documents=_objects(body.documents, "documents"),
        add_generation_prompt=_flag(body.add_generation_prompt, default=True),
        continue_final_message=_flag(body.continue_final_message, default=False),
        add_special_tokens=_flag(body.add_special_tokens, default=False),
        chat_template_kwargs=_template_variables(kwargs, body.reasoning_effort),
    )


def _objects(value: Any, name: str) -> tuple[Any, ...] | None:
    if value is not None and not isinstance(value, list):
        raise _UnsupportedError(f"{name} must be a list of objects")
    return None if value is None else tuple(value)


def _template_variables(kwargs: Mapping[str, Any], reasoning_effort: Any) -> dict[str, Any]:
    """Merge as vLLM does: null and "auto" count as not given, an effort also switches thinking on or off."""
    variables = {name: value for name, value in kwargs.items() if value is not None and value != "auto"}
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        if "enable_thinking" not in kwargs:
            variables["enable_thinking"] = reasoning_effort != "none"
    return variables


def _completion_request(path: str, body: _CompletionBody, *, body_bytes: int) -> InferenceRequest:
    prompts: tuple[Prompt, ...] = ()
    reason = None
    try:
        prompts = _completion_prompts(body)
    except _UnsupportedError as error:
        reason = str(error)
    limit = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return _request(ApiKind.COMPLETIONS, path, body, prompts, reason, max_tokens=_count(limit), body_bytes=body_bytes)


def _completion_prompts(body: _CompletionBody) -> tuple[Prompt, ...]:
    for name in ("prompt_embeds", "suffix", "truncate_prompt_tokens"):
        if getattr(body, name) is not None:
            raise _UnsupportedError(f"{name} gives the prompt tokens that only the pod knows")
    special = _flag(body.add_special_tokens, default=True)
    prompt = body.prompt
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=special),)
    if not isinstance(prompt, list) or not prompt:
        raise _UnsupportedError("prompt must be a text, a list of texts, token ids or a list of token ids")
    if isinstance(prompt[0], int):
        return (_token_prompt(prompt),)
    if all(isinstance(item, str) for item in prompt):
        return tuple(TextPrompt(text=item, add_special_tokens=special) for item in prompt)
    return tuple(_token_prompt(item) for item in prompt)


def _token_prompt(ids: Any) -> TokenPrompt:
    """Pack token ids. true and false count as 1 and 0, as in vLLM; floats, texts and negative ids are refused."""
    try:
        if isinstance(ids, list):
            return TokenPrompt.of(ids)
    except (TypeError, OverflowError):
        pass
    raise _UnsupportedError("prompt token ids must be integers from 0 to 4294967295")


def _request(
    api: ApiKind,
    path: str,
    body: _Body,
    prompts: tuple[Prompt, ...],
    unsupported_reason: str | None,
    *,
    max_tokens: int | None,
    body_bytes: int,
) -> InferenceRequest:
    return InferenceRequest(
        api=api,
        path=path,
        model=body.model,
        prompts=prompts,
        stream=_flag(body.stream, default=False),
        max_tokens=max_tokens,
        cache_salt=body.cache_salt if isinstance(body.cache_salt, str) else None,
        unsupported_reason=unsupported_reason,
        body_bytes=body_bytes,
    )


def _other_request(path: str, body: bytes, unsupported_reason: str | None) -> InferenceRequest:
    """Return what is known without understanding the API: it is routed on load whatever the body is."""
    try:
        other = _OTHER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        other = _OtherBody()
    model = other.model if isinstance(other.model, str) else None
    return InferenceRequest(
        api=ApiKind.OTHER,
        path=path,
        model=model,
        stream=_flag(other.stream, default=False),
        unsupported_reason=unsupported_reason,
    )


def _flag(value: Any, *, default: bool) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str | int) else ""
    return word in TRUE_WORDS or (default and word not in FALSE_WORDS)


def _count(value: Any) -> int | None:
    """Return a whole number of tokens, also from its text form, as pydantic takes it; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
