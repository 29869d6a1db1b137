"""What vLLM's POST /tokenize can be asked about a request, for pods without a render endpoint. Every vLLM has it.

It knows less than a chat or a completion (`TokenizeChatRequest` and `TokenizeCompletionRequest` of vLLM 0.32,
vllm/entrypoints/serve/tokenize/protocol.py). A request with a field that it does not take, and that changes the prompt,
is not asked about: the answer would be wrong. Pure.
"""

import re

import msgspec

from extproc.models.models import ServedModel
from extproc.requests.request import ApiKind, InferenceRequest, TextPrompt

PATH = "/tokenize"
# vLLM renders chats of these models in code of its own, and /tokenize does not. Nothing but their names is known here.
RENDERED_IN_CODE = re.compile(r"gpt-?oss|deepseek-v(3\.2|4)|kimi-(k3|audio)|inkling", re.IGNORECASE)


_ABSENT = msgspec.Raw()  # of a field that did not come


class _Named(msgspec.Struct, omit_defaults=True):
    model: msgspec.Raw = _ABSENT


class _Chat(_Named, omit_defaults=True, kw_only=True):
    """The fields that both have, as they came."""

    messages: msgspec.Raw
    add_generation_prompt: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT


class _Lost(msgspec.Struct):
    """The fields that only a chat has, and that change its prompt."""

    documents: msgspec.Raw = _ABSENT
    reasoning_effort: msgspec.Raw = _ABSENT
    chat_template: msgspec.Raw = _ABSENT
    tool_choice: msgspec.Raw = _ABSENT


class _Text(_Named, omit_defaults=True, kw_only=True):
    prompt: str
    add_special_tokens: bool


_CHAT = msgspec.json.Decoder(_Chat)
_LOST = msgspec.json.Decoder(_Lost)
_NAMED = msgspec.json.Decoder(_Named)
_NOTHING = (b"", b"null")


def renders_in_code(request: InferenceRequest, model: ServedModel) -> bool:
    """Tell whether a chat of this model would be tokenized in another form than it is served in."""
    is_chat = request.api is ApiKind.CHAT_COMPLETIONS
    return is_chat and any(RENDERED_IN_CODE.search(name) for name in (model.name, *model.aliases))


def tokenize_body(request: InferenceRequest, body: bytes) -> bytes | None:
    """Return the question about the prompt of this body; None where it cannot be asked."""
    if request.truncation is not None or request.has_media:
        return None
    try:
        if request.api is ApiKind.CHAT_COMPLETIONS and len(request.prompts) == 1:
            return _chat(body)
        prompt = request.prompts[0] if len(request.prompts) == 1 else None
        if isinstance(prompt, TextPrompt) and prompt.suffix is None:
            named = _NAMED.decode(body)
            text = _Text(model=named.model, prompt=prompt.text, add_special_tokens=prompt.add_special_tokens)
            return msgspec.json.encode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass  # half of a surrogate pair, or a form that the pod refuses
    return None


def _chat(body: bytes) -> bytes | None:
    lost = _LOST.decode(body)
    if any(bytes(each) not in _NOTHING for each in (lost.documents, lost.reasoning_effort, lost.chat_template)):
        return None
    if bytes(lost.tool_choice) == b'"none"':  # pods may leave the tools out then
        return None
    return msgspec.json.encode(_CHAT.decode(body))
