"""Turns requests into token ids and length limits, as vLLM's renderer does before the engine runs.

The API calls these. They are all pure functions and raise only RequestRefusedError.
"""

from collections.abc import Callable
from typing import Any

from podsim.core.generate import Limits
from podsim.errors import MalformedRequestError, RequestRefusedError
from podsim.model_folder import ModelFolder
from podsim.wire.chat_messages import normalise_messages, normalise_tools
from podsim.wire.openai_requests import ChatRequest, CompletionRequest, Prompt, TokenizeRequest

Encode = Callable[..., list[int]]  # ModelFolder.encode or ModelFolder.encode_by_reference

_COMPLETION_MAX_TOKENS = 16


def chat_token_ids(
    request: ChatRequest | TokenizeRequest, *, folder: ModelFolder, model: str, encode: Encode
) -> list[int]:
    """Return the ids of a rendered chat. The template adds BOS itself, so special tokens are off by default.

    Token ids that a prefill request left in `kv_transfer_params` replace the messages.
    """
    if isinstance(request, ChatRequest) and (ids := _forwarded_ids(request, folder=folder)) is not None:
        return ids
    template = folder.require_chat_template()
    kwargs: dict[str, Any] = dict(request.chat_template_kwargs or {})
    if isinstance(request, ChatRequest):
        kwargs |= _template_kwargs(request)
    text = template.render(
        normalise_messages(request.messages or [], parts=template.wants_parts, model=model),
        tools=normalise_tools(request.tools),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        kwargs=kwargs,
    )
    return encode(text, add_special_tokens=bool(request.add_special_tokens))


def completion_token_ids(
    prompt: Prompt, *, add_special_tokens: bool, folder: ModelFolder, encode: Encode
) -> list[list[int]]:
    """Return each prompt's ids: one prompt for a text or a list of ids, else one per element. Ids get no BOS."""
    if isinstance(prompt, str):
        return [encode(prompt, add_special_tokens=add_special_tokens)]
    if all(type(element) is int for element in prompt):
        return [_checked_ids(prompt, folder=folder, location="body.prompt")]
    if all(isinstance(element, str) for element in prompt):
        return [encode(text, add_special_tokens=add_special_tokens) for text in prompt]
    return [
        _checked_ids(element, folder=folder, location=f"body.prompt.{index}") for index, element in enumerate(prompt)
    ]


def bounded_prompt(token_ids: list[int], *, request: ChatRequest | CompletionRequest, max_model_len: int) -> list[int]:
    """Return the prompt, truncated if the request asks for it; refuse it if it is empty or too long."""
    limit = request.truncate_prompt_tokens
    if limit is not None:
        if limit > max_model_len:
            raise RequestRefusedError(
                f"truncate_prompt_tokens={limit} cannot be greater than max_model_len = {max_model_len}. "
                f"Please request a smaller truncation size. (parameter=truncate_prompt_tokens, value={limit})",
                param="truncate_prompt_tokens",
            )
        keep = max_model_len - 1 if limit < 0 else limit
        if len(token_ids) > keep:
            token_ids = token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]
    if not token_ids:
        raise RequestRefusedError("The decoder prompt cannot be empty")
    if len(token_ids) > max_model_len:
        count = max_model_len + 1  # vLLM stops tokenizing at this length
        raise RequestRefusedError(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"at least {count} input tokens, which exceeds this limit even without any output tokens. "
            f"Please reduce the length of the input prompt. (parameter=input_tokens, value={count})",
            param="input_tokens",
        )
    return token_ids


def limits_for(request: ChatRequest | CompletionRequest, *, prompt_tokens: int, max_model_len: int) -> Limits:
    """Return the length limits of an answer, which must fit after the prompt."""
    name, wanted = _wanted_tokens(request)
    if wanted is not None and wanted > max_model_len:
        raise RequestRefusedError(
            f"{name}={wanted} cannot be greater than max_model_len={max_model_len}. "
            f"Please request fewer output tokens. (parameter={name}, value={wanted})",
            param=name,
        )
    room = max_model_len - prompt_tokens
    max_tokens = room if wanted is None else min(room, wanted)
    if max_tokens < 1:
        raise RequestRefusedError(
            f"max_tokens must be at least 1, got {max_tokens}. (parameter=max_tokens, value={max_tokens})",
            param="max_tokens",
        )
    return Limits(
        max_tokens=max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop=request.stop_strings,
    )


def _forwarded_ids(request: ChatRequest, *, folder: ModelFolder) -> list[int] | None:
    ids = request.kv_transfer_params and request.kv_transfer_params.get("prompt_token_ids")
    if ids is None:
        return None
    parameter = "kv_transfer_params.prompt_token_ids"
    if not isinstance(ids, list) or not ids or any(type(token_id) is not int or token_id < 0 for token_id in ids):
        raise RequestRefusedError(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers. "
            f"(parameter={parameter})",
            param=parameter,
        )
    if (largest := max(ids)) >= folder.vocabulary_size:
        raise RequestRefusedError(f"Token id {largest} is out of vocabulary (parameter={parameter})", param=parameter)
    return ids


def _wanted_tokens(request: ChatRequest | CompletionRequest) -> tuple[str, int | None]:
    if isinstance(request, CompletionRequest):
        return "max_tokens", _COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    if request.max_completion_tokens is not None:
        return "max_completion_tokens", request.max_completion_tokens
    return "max_tokens", request.max_tokens


def _template_kwargs(request: ChatRequest) -> dict[str, Any]:
    kwargs: dict[str, Any] = {}
    if request.documents is not None:
        kwargs["documents"] = request.documents
    if request.reasoning_effort is not None:
        kwargs["reasoning_effort"] = request.reasoning_effort
        if "enable_thinking" not in (request.chat_template_kwargs or {}):
            kwargs["enable_thinking"] = request.reasoning_effort != "none"
    return kwargs


def _checked_ids(token_ids: Any, *, folder: ModelFolder, location: str) -> list[int]:
    if not isinstance(token_ids, list) or any(type(token_id) is not int for token_id in token_ids):
        raise MalformedRequestError("Input should be a valid integer", location=location, kind="int_type")
    if not token_ids:
        return token_ids
    if min(token_ids) < 0:
        raise MalformedRequestError(
            "Input should be greater than or equal to 0", location=location, kind="greater_than_equal"
        )
    if (largest := max(token_ids)) >= folder.vocabulary_size:
        raise RequestRefusedError(f"Token id {largest} is out of vocabulary")
    return token_ids
