"""Readers of the fields that several APIs share, as lenient as vLLM's own models."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from extproc.requests.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Truncation, TruncationSide

# pydantic's spellings of booleans, which vLLM accepts for every boolean
TRUE_TEXTS = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE_TEXTS = frozenset(("0", "off", "f", "false", "n", "no"))
LARGEST_COUNT = (1 << 53) - 1  # exact in any JSON reader, and below the 64-bit limit of records and spans
MOST_DIGITS = 4_300  # of a number in a string; pydantic reads no more
MAX_PROMPTS = 4_096  # of one request: about 10 ms; OpenAI accepts 2,048
# content parts that only the model's own processor turns into tokens
MEDIA_PARTS = frozenset(
    (
        *("image_url", "image_embeds", "image_pil", "input_image", "image"),
        *("audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds", "file", "input_file"),
    )
)


class UnsupportedPromptError(Exception):
    """The prompt's tokens cannot be computed from the body; the text says why."""


class ReadPrompts(NamedTuple):
    """The prompts in a body."""

    prompts: tuple[Prompt, ...]
    truncation: Truncation | None = None
    has_media: bool = False


class KeptResponse(NamedTuple):
    """The responses kept by pods that a request refers to or creates."""

    needed: str | None = None  # the response that it continues
    chosen_id: str | None = None  # the client's id for the new response
    wants_id: bool = False  # the new response may be kept and has no id yet


NOTHING_KEPT = KeptResponse()


class Body(msgspec.Struct, kw_only=True):
    """The fields common to all APIs. A field has a type only if no other type could be routed or served."""

    model: str | None = None
    stream: Any = None
    cache_salt: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    session_id: Any = None  # vLLM's and SGLang's own
    prompt_cache_key: Any = None  # OpenAI's: requests with one key should go to the same endpoint

    @property
    def output_limit(self) -> Any:
        """The field that limits the output tokens, of any type; 0 for pooling models, which generate none."""
        return 0

    @property
    def sequences(self) -> int:
        """The answers that the engine generates, each up to the output limit: choices times prompts."""
        return 1

    @property
    def skips_cache(self) -> bool:
        """Whether the engine computes the whole prompt, even the cached part."""
        return False

    @property
    def sender(self) -> str | None:
        """The sender: `user`, `safety_identifier`, or Anthropic's `metadata.user_id`."""
        of_metadata = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return unicode_text(self.user or self.safety_identifier or of_metadata)

    @property
    def session(self) -> str | None:
        """The session's name, which later requests repeat."""
        return unicode_text(self.session_id) or unicode_text(self.prompt_cache_key)

    @property
    def kept(self) -> "KeptResponse":
        """The kept responses involved; none in most APIs."""
        return NOTHING_KEPT


class PromptBody(Body, kw_only=True):
    """A body with the fields for truncation, tokenizer and chat template."""

    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


def unicode_text(value: Any) -> str | None:
    """Return a non-empty string that can be encoded, or None for anything else.

    JSON may contain half of a surrogate pair, which UTF-8 cannot encode.
    """
    if not value or not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def flag(value: Any, *, default: bool) -> bool:
    """Return a boolean from its JSON form or one of pydantic's spellings, or `default` for anything else."""
    if value is None or isinstance(value, bool):
        return default if value is None else value
    written = str(value).lower() if isinstance(value, str | int) else ""
    return written in TRUE_TEXTS or (default and written not in FALSE_TEXTS)


def count(value: Any) -> int | None:
    """Return a number in any form that pydantic reads as an integer: 7, 7.0, "7", " 7.0 ", "1_000", true.

    None for anything else, and below 0. Capped at LARGEST_COUNT: to a pod larger numbers make no difference.
    """
    if value is None:  # nearly always, and an exception costs a microsecond
        return None
    if isinstance(value, str):
        whole, _, fraction = value.strip().partition(".")
        if fraction.strip("0") or len(whole) > MOST_DIGITS:
            return None
        value = whole
    elif isinstance(value, float) and not value.is_integer():
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return min(number, LARGEST_COUNT) if number >= 0 else None


def choices(*values: Any) -> int:
    """Return the largest of the fields that ask for several answers to one prompt, at least 1."""
    return max([count(value) or 1 for value in values if value is not None], default=1)


def objects(value: Any, name: str) -> tuple[Any, ...] | None:
    """Return a list as a tuple, or None for null; raise UnsupportedPromptError for anything else."""
    if value is not None and not isinstance(value, list):
        raise UnsupportedPromptError(f"{name} must be a list of objects")
    return None if value is None else tuple(value)


def truncation(body: PromptBody, *, default_side: TruncationSide) -> Truncation | None:
    """Return the cut by `truncate_prompt_tokens`, as vLLM's TokenizeParams; `default_side` is the tokenizer's."""
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
        held_back=held_back(body.output_limit),
        keeps_special_tokens=side is None,
    )


def held_back(output_tokens: Any) -> int:
    """Return the tokens that vLLM keeps free when it cuts to the context: 1 with an output limit above 0, else 0."""
    return 1 if count(output_tokens) else 0


def completion_prompts(body: PromptBody, prompt: Any, *, name: str) -> tuple[Prompt, ...]:
    """Return the prompts from any of vLLM's four forms: a text, texts, token ids, lists of token ids."""
    special = flag(body.add_special_tokens, default=True)
    if isinstance(prompt, str):
        return (TextPrompt(text=prompt, add_special_tokens=special),)
    if not isinstance(prompt, list) or not prompt:
        raise UnsupportedPromptError(f"{name} must be a text, a list of texts, token ids or a list of token ids")
    if isinstance(prompt[0], int):
        return (token_prompt(prompt),)
    require_few(prompt)
    if all(isinstance(item, str) for item in prompt):
        return tuple(TextPrompt(text=item, add_special_tokens=special) for item in prompt)
    return tuple(token_prompt(item) for item in prompt)


def require_few(prompts: Sequence[Any]) -> None:
    """Raise UnsupportedPromptError for a batch that would take too long to read."""
    if len(prompts) > MAX_PROMPTS:
        raise UnsupportedPromptError(f"there are more than {MAX_PROMPTS:,} prompts")


def token_prompt(ids: Any) -> TokenPrompt:
    """Pack token ids. true and false count as 1 and 0, as in vLLM; floats, strings and negative ids are refused."""
    try:
        if isinstance(ids, list):
            return TokenPrompt.of(ids)
    except (TypeError, OverflowError):
        pass
    raise UnsupportedPromptError("prompt token ids must be integers from 0 to 4294967295")


def chat_prompt(
    body: PromptBody,
    messages: list[Any],
    *,
    generate: bool,
    effort: Any = None,
    tools: Any = None,
    documents: Any = None,
) -> ChatPrompt:
    """Return one conversation; `generate` is the default of `add_generation_prompt`."""
    if body.chat_template is not None:
        raise UnsupportedPromptError("the request brings a chat template of its own")
    return ChatPrompt(
        messages=tuple(messages),
        tools=objects(tools, "tools"),
        documents=objects(documents, "documents"),
        add_generation_prompt=flag(body.add_generation_prompt, default=generate),
        continue_final_message=flag(body.continue_final_message, default=False),
        add_special_tokens=flag(body.add_special_tokens, default=False),
        chat_template_kwargs=template_variables(body.chat_template_kwargs, effort),
        reasoning_effort=effort,
    )


def have_media(messages: Sequence[Any]) -> bool:
    """Tell whether any content part is an image, audio, a video or a file."""
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
    """Merge like vLLM: null and "auto" count as absent, an effort also switches thinking on or off."""
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
    """Return a string; raise UnsupportedPromptError for anything else, which the pod refuses."""
    if not isinstance(value, str):
        raise UnsupportedPromptError(f"{name} must be a text")
    return value


def mapping(value: Any, name: str) -> Mapping[str, Any]:
    """Return an object; raise UnsupportedPromptError for anything else, which the pod refuses."""
    if not isinstance(value, dict):
        raise UnsupportedPromptError(f"{name} must be an object")
    return value
