"""How the fields that several APIs share are read, leniently as vLLM's own models read them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from extproc.requests.request import ChatPrompt, Prompt, TextPrompt, TokenPrompt, Truncation, TruncationSide

# pydantic's spellings of booleans, which vLLM accepts for every boolean
TRUE_TEXTS = frozenset(("1", "on", "t", "true", "y", "yes"))
FALSE_TEXTS = frozenset(("0", "off", "f", "false", "n", "no"))
LARGEST_COUNT = (1 << 53) - 1  # exact in any JSON reader; records and spans take no more than 64 bits
MAX_PROMPTS = 4_096  # of one request: about 10 ms; OpenAI takes 2,048
# content parts that become tokens only in the model's own processor
MEDIA_PARTS = frozenset(
    (
        *("image_url", "image_embeds", "image_pil", "input_image", "image"),
        *("audio_url", "audio_embeds", "input_audio", "video_url", "video_embeds", "file", "input_file"),
    )
)


class UnsupportedPromptError(Exception):
    """The prompt's tokens cannot be derived from the body; the text says why."""


class ReadPrompts(NamedTuple):
    """What a reader of one API finds in a body."""

    prompts: tuple[Prompt, ...]
    truncation: Truncation | None = None
    has_media: bool = False


class KeptResponse(NamedTuple):
    """What a request has to do with responses that pods keep."""

    needed: str | None = None  # the response that it goes on with
    chosen_id: str | None = None  # of its own response, by the client
    wants_id: bool = False  # its own may be kept, and has no id yet


NOTHING_KEPT = KeptResponse()


class Body(msgspec.Struct, kw_only=True):
    """What all APIs share. Fields are typed where another type leaves nothing to route or to serve."""

    model: str | None = None
    stream: Any = None
    cache_salt: Any = None
    user: Any = None
    safety_identifier: Any = None
    metadata: Any = None
    kv_transfer_params: Any = None
    session_id: Any = None  # vLLM's and SGLang's own
    prompt_cache_key: Any = None  # OpenAI's: requests with one key belong to where that key's last one went

    @property
    def output_limit(self) -> Any:
        """The field that limits the output tokens, whatever its type; pooling models write none."""
        return 0

    @property
    def sender(self) -> str | None:
        """Who sent it: `user`, `safety_identifier`, or Anthropic's `metadata.user_id`."""
        of_metadata = self.metadata.get("user_id") if isinstance(self.metadata, dict) else None
        return unicode_text(self.user or self.safety_identifier or of_metadata)

    @property
    def session(self) -> str | None:
        """What it belongs to: a name that later requests repeat."""
        return unicode_text(self.session_id) or unicode_text(self.prompt_cache_key)

    @property
    def kept(self) -> "KeptResponse":
        """What it has to do with responses that pods keep; nothing in most APIs."""
        return NOTHING_KEPT


class PromptBody(Body, kw_only=True):
    """With the fields that cut a prompt and those of the tokenizer and the chat template."""

    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    add_special_tokens: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None


def unicode_text(value: Any) -> str | None:
    """Return a text that is not empty and can be encoded, None for anything else.

    JSON may hold half of a surrogate pair, which nothing else can.
    """
    if not value or not isinstance(value, str):
        return None
    try:
        value.encode()
    except UnicodeEncodeError:
        return None
    return value


def flag(value: Any, *, default: bool) -> bool:
    """Return a boolean from its JSON form or one of pydantic's spellings; anything else counts as not given."""
    if value is None or isinstance(value, bool):
        return default if value is None else value
    written = str(value).lower() if isinstance(value, str | int) else ""
    return written in TRUE_TEXTS or (default and written not in FALSE_TEXTS)


def count(value: Any) -> int | None:
    """Return a whole number of tokens, also from its text form, as pydantic takes it; None for anything else.

    More than LARGEST_COUNT is as much as that: no pod can tell the difference.
    """
    if isinstance(value, str) and value.isdecimal() and len(value) < 20:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        return None
    return min(value, LARGEST_COUNT)


def objects(value: Any, name: str) -> tuple[Any, ...] | None:
    """Return a list as a tuple; raise UnsupportedPromptError for what is neither a list nor null."""
    if value is not None and not isinstance(value, list):
        raise UnsupportedPromptError(f"{name} must be a list of objects")
    return None if value is None else tuple(value)


def truncation(body: PromptBody, *, default_side: TruncationSide) -> Truncation | None:
    """Return how `truncate_prompt_tokens` cuts, as vLLM's TokenizeParams; `default_side` is the tokenizer's."""
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
    """Return how many tokens vLLM keeps free when it cuts to the context: one, unless no output is asked for."""
    return 1 if count(output_tokens) else 0


def completion_prompts(body: PromptBody, prompt: Any, *, name: str) -> tuple[Prompt, ...]:
    """Return the prompts of vLLM's four forms: a text, texts, token ids, lists of token ids."""
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
    """Pack token ids. true and false count as 1 and 0, as in vLLM; floats, texts and negative ids are refused."""
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
    )


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
