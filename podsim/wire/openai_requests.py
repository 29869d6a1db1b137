"""Decodes request bodies of vLLM's OpenAI-compatible API and makes the checks vLLM makes before rendering.

The server calls the decode functions; they raise RequestRefusedError in vLLM 0.32's wording. Unknown fields, and those
that change nothing in a simulation (sampling, log probabilities), are ignored.
"""

import json
import re
from typing import Any, Protocol, TypeVar

import msgspec

from podsim.errors import MalformedRequestError, RequestRefusedError, UnknownModelError

Prompt = str | list[Any]  # a text, token ids, or a list of either: checked when it is tokenized


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream reports besides its text."""

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class _Generating(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both generating endpoints."""

    model: str | None = None
    max_tokens: int | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    temperature: float | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None  # chats: False, completions: True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    return_token_ids: bool | None = None
    priority: int = 0
    request_id: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def reports_cache_hits(self) -> bool:
        """Whether the KV events must report cached blocks again."""
        return (self.vllm_xargs or {}).get("kv_cache_report_mode") == "full"

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ChatRequest(_Generating, frozen=True, kw_only=True):
    """POST /v1/chat/completions; `messages` and `tools` are checked when they are rendered."""

    messages: list[Any]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(_Generating, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Prompt | None = None
    echo: bool | None = False


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize, in its chat form (`messages`) or its prompt form (`prompt`)."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None  # chats: False, prompts: True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


class _NamesModel(Protocol):
    @property
    def model(self) -> str | None: ...


_Body = TypeVar("_Body")
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    body: msgspec.json.Decoder(body, strict=False)
    for body in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)
}
_PATH = re.compile(r"^(.*) - at `\$([^`]*)`$")
_MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")


def decode_body(body: bytes, kind: type[_Body]) -> _Body:
    """Decode a JSON body; raise MalformedRequestError, which names the field, if it is wrong."""
    if not body:
        raise MalformedRequestError("Field required", kind="missing")
    try:
        decoded: _Body = _DECODERS[kind].decode(body)
    except msgspec.ValidationError as error:
        raise _as_malformed(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _as_invalid_json(body) from error
    return decoded


def check_chat(request: ChatRequest) -> None:
    """Make the checks of vLLM's chat request model."""
    _check_generating(request)
    check_template_use(request)


def check_template_use(request: ChatRequest | TokenizeRequest) -> None:
    """Refuse a chat that asks both to continue a message and to start a new one, or that brings its own template."""
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestRefusedError("Cannot set both `continue_final_message` and `add_generation_prompt` to True.")
    if request.chat_template is not None:
        raise RequestRefusedError(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )


def check_completion(request: CompletionRequest) -> Prompt:
    """Make the checks of vLLM's completion request model; return the prompt."""
    _check_generating(request)
    if request.prompt is None or request.prompt == "":
        raise RequestRefusedError(
            "Either prompt or prompt_embeds must be provided and non-empty. (parameter=prompt)", param="prompt"
        )
    if request.prompt == []:
        raise RequestRefusedError("You must pass at least one prompt")
    return request.prompt


def check_model(request: _NamesModel, *, served: str) -> None:
    """Refuse a model that is not served; if none is named, the served one is used."""
    if request.model and request.model != served:
        raise UnknownModelError(request.model, served=served)


def _check_generating(request: _Generating) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestRefusedError(
            "Stream options can only be defined when `stream=True`. (parameter=stream_options)",
            param="stream_options",
        )
    if request.cache_salt == "":
        raise RequestRefusedError(
            "Parameter 'cache_salt' must be a non-empty string if provided. (parameter=cache_salt)",
            param="cache_salt",
        )
    if request.temperature is not None and request.temperature < 0:
        raise RequestRefusedError(
            f"temperature must be non-negative, got {request.temperature}. "
            f"(parameter=temperature, value={request.temperature})",
            param="temperature",
        )
    if request.n is not None and request.n < 1:
        raise RequestRefusedError(f"n must be at least 1, got {request.n}. (parameter=n, value={request.n})", param="n")


def _as_malformed(text: str) -> MalformedRequestError:
    match = _PATH.match(text)
    detail, path = (match.group(1), match.group(2)) if match else (text, "")
    location = "body" + re.sub(r"\[(\d+)\]", r".\1", path).replace("[...]", "")
    if missing := _MISSING_FIELD.match(detail):
        return MalformedRequestError("Field required", location=f"{location}.{missing[1]}", kind="missing")
    return MalformedRequestError(detail.replace("`", ""), location=location)


def _as_invalid_json(body: bytes) -> RequestRefusedError:
    try:
        json.loads(body)
    except json.JSONDecodeError as error:
        return MalformedRequestError(
            f"JSON decode error: {error.msg}", location=f"body.{error.pos}", kind="json_invalid"
        )
    except UnicodeDecodeError:
        return MalformedRequestError("There was an error parsing the body", kind="json_invalid")
    return MalformedRequestError("JSON decode error", kind="json_invalid")
