"""How the fields that several APIs share are read, leniently as vLLM's own models read them.

Used by the readers of single APIs (`openai_chat`, `responses_api`, …); `openai.parse_request` is the entry.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.requests.request import (
    ApiKind,
    InferenceRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    Truncation,
    TruncationSide,
)

# pydantic's words for booleans, which vLLM accepts wherever it wants one
TRUE_WORDS = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE_WORDS = frozenset(("0", "off", "f", "false", "n", "no"))
MAX_PROMPTS = 4_096  # of one request: about 10 ms; OpenAI takes 2,048
# content parts that become tokens only in the model's own processor
MEDIA_PARTS = frozenset(
    (
        *("image_url", "image_embeds", "image_pil", "input_image", "image"),
        *("audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds", "file", "input_file"),
    )
)


class UnsupportedPromptError(Exception):
    """The prompt's tokens cannot be told from the body; the text says why."""


class Body(msgspec.Struct, kw_only=True):
    """What all APIs share. Fields are typed where another type leaves nothing to route or to serve."""

    model: str | None = None
    stream: Any = None
    cache_salt: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    kv_transfer_params: Any = None
    body_bytes: Any = 0  # written by the entry after decoding, over whatever the client may have sent


class TruncatedBody(Body, kw_only=True):
    """With the fields that cut a prompt."""

    truncate_prompt_tokens: Any = None
    truncation_side: Any = None


def facts(
    api: ApiKind,
    path: str,
    body: Body,
    prompts: tuple[Prompt, ...] | UnsupportedPromptError,
    *,
    max_tokens: Any,
    truncation: Truncation | None = None,
    has_media: bool = False,
) -> InferenceRequest:
    """Put together what was read; an UnsupportedPromptError in place of prompts becomes their reason."""
    reason = None
    if isinstance(prompts, UnsupportedPromptError):
        prompts, reason = (), str(prompts)
    salt = body.cache_salt
    names_user = body.user is not None or body.safety_identifier is not None or body.metadata is not None
    return InferenceRequest(
        api=api,
        path=path,
        model=body.model,
        prompts=prompts,
        stream=False if body.stream is None else flag(body.stream, default=False),
        max_tokens=count(max_tokens),
        cache_salt=salt if salt and isinstance(salt, str) and is_unicode(salt) else None,
        truncation=truncation if reason is None else None,
        user=user_of(body) if names_user else None,
        has_media=has_media and reason is None,
        unsupported_reason=reason,
        body_bytes=body.body_bytes,
    )


def user_of(body: Body) -> str | None:
    """Return who sent it: `user`, `safety_identifier`, or Anthropic's `metadata.user_id`."""
    metadata = body.metadata
    named = body.user or body.safety_identifier or (metadata.get("user_id") if isinstance(metadata, dict) else None)
    return named if named and isinstance(named, str) and is_unicode(named) else None


def is_unicode(value: str) -> bool:
    """Tell whether a text can be encoded: JSON may hold half of a surrogate pair, which nothing else can."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def flag(value: Any, *, default: bool) -> bool:
    """Return a boolean from its JSON form or one of pydantic's words; anything else counts as not given."""
    if isinstance(value, bool):
        return value
    word = str(value).lower() if isinstance(value, str | int) else ""
    return word in TRUE_WORDS or (default and word not in FALSE_WORDS)


def count(value: Any) -> int | None:
    """Return a whole number of tokens, also from its text form, as pydantic takes it; None for anything else."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def objects(value: Any, name: str) -> tuple[Any, ...] | None:
    """Return a list as a tuple; raise UnsupportedPromptError for what is neither a list nor null."""
    if value is not None and not isinstance(value, list):
        raise UnsupportedPromptError(f"{name} must be a list of objects")
    return None if value is None else tuple(value)


def truncation(body: TruncatedBody, *, output_tokens: Any, default_side: TruncationSide) -> Truncation | None:
    """Return how `truncate_prompt_tokens` cuts, as vLLM's TokenizeParams.

    `output_tokens` is the limit that the body sets, `default_side` that of the tokenizer.
    """
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return None
    tokens = -1 if wanted in (-1, "-1") else count(wanted)
    try:
        side = None if body.truncation_side is None else TruncationSide(body.truncation_side)
    except ValueError:
        side, tokens = None, None
    if tokens is None:
        raise UnsupportedPromptError("truncate_prompt_tokens must be -1 or more, truncation_side left or right")
    return Truncation(
        tokens=tokens,
        side=side or default_side,
        held_back=held_back(output_tokens),
        keeps_special_tokens=side is None,
    )


def held_back(output_tokens: Any) -> int:
    """Return how many tokens vLLM keeps free when it cuts to the context: one, unless no output is asked for."""
    return 1 if count(output_tokens) else 0


def completion_prompts(prompt: Any, *, name: str, add_special_tokens: bool) -> tuple[Prompt, ...]:
    """Return the prompts of vLLM's four forms: a text, texts, token ids, lists of token ids."""
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=add_special_tokens),)
    if not isinstance(prompt, list) or not prompt:
        raise UnsupportedPromptError(f"{name} must be a text, a list of texts, token ids or a list of token ids")
    if isinstance(prompt[0], int):
        return (token_prompt(prompt),)
    require_few(prompt)
    if all(isinstance(item, str) for item in prompt):
        return tuple(TextPrompt(text=item, add_special_tokens=add_special_tokens) for item in prompt)
    return tuple(token_prompt(item) for item in prompt)


def require_few(prompts: Sequence[Any]) -> None:
    """Raise UnsupportedPromptError for a batch that would take too long to read."""
    if len(prompts) > MAX_PROMPTS:
        raise UnsupportedPromptError(f"there are more than {MAX_PROMPTS:,} prompts")


def token_prompt(ids: Any) -> TokenPrompt:
    """Pack token ids. true and false count as 1 and 0, as in vLLM; floats, texts and negative ids are refused."""
    try:
        if isinstance(ids, list):
            return TokenPrompt.of(ids)
    except (TypeError, OverflowError):
        pass
    raise UnsupportedPromptError("prompt token ids must be integers from 0 to 4294967295")


def forwarded_ids(body: Body, *, echo: bool) -> TokenPrompt | None:
    """Return the ids that a prefill stage made of the same messages: vLLM then renders nothing itself.

    Only for messages without media, and not with `echo`, which needs the text.
    """
    params = body.kv_transfer_params
    ids = params.get("prompt_token_ids") if isinstance(params, dict) else None
    if ids is None or echo:
        return None
    if not ids or not isinstance(ids, list) or any(type(item) is not int for item in ids):
        raise UnsupportedPromptError("kv_transfer_params.prompt_token_ids must be a list of token ids")
    return token_prompt(ids)


def have_media(messages: Sequence[Any]) -> bool:
    """Tell whether a content part of a message is an image, a sound, a video or a file."""
    for message in messages:
        if type(message) is dict:
            content = message.get("content")
            if type(content) is list:
                for part in content:
                    if _is_media(part):
                        return True
    return False


def _is_media(part: Any) -> bool:
    if type(part) is not dict:
        return False
    kind = part.get("type")
    return kind in MEDIA_PARTS if type(kind) is str else not MEDIA_PARTS.isdisjoint(part)


def template_variables(kwargs: Any, reasoning_effort: Any) -> dict[str, Any]:
    """Merge as vLLM does: null and "auto" count as not given, an effort also switches thinking on or off."""
    given = {} if kwargs is None else kwargs
    if not isinstance(given, dict):
        raise UnsupportedPromptError("chat_template_kwargs must be an object")
    if given.get("chat_template") is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    variables = {name: value for name, value in given.items() if value is not None and value != "auto"}
    if reasoning_effort is not None:
        variables["reasoning_effort"] = reasoning_effort
        if "enable_thinking" not in given:
            variables["enable_thinking"] = reasoning_effort != "none"
    return variables


def text(value: Any, name: str) -> str:
    """Return a text; raise UnsupportedPromptError for anything else, which the pod refuses."""
    if not isinstance(value, str):
        raise UnsupportedPromptError(f"{name} must be a text")
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return an object; raise UnsupportedPromptError for anything else, which the pod refuses."""
    if not isinstance(value, dict):
        raise UnsupportedPromptError(f"{name} must be an object")
    return value


def joined(texts: Iterable[str]) -> str:
    """Join without a separator, as Anthropic's blocks are."""
    return "".join(texts)
