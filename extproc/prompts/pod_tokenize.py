"""Requests for vLLM's POST /tokenize, for pods without a render endpoint, and the pods' answers to both. Pure.

Every vLLM has /tokenize. It accepts fewer fields than a chat or a completion (`TokenizeChatRequest` and
`TokenizeCompletionRequest` of vLLM 0.32, vllm/entrypoints/serve/tokenize/protocol.py). A request is not converted if a
missing field changes its prompt: the answer would be wrong.

/render answers vLLM 0.32's `GenerateRequest` (vllm/entrypoints/scale_out/token_in_token_out/protocol.py); for
completions it is a list with one per prompt. /tokenize answers `TokenizeResponse`. Unknown fields are skipped unread.
"""

import re

import msgspec

from extproc.models.models import ServedModel
from extproc.prompts.tokenized_prompt import TOKEN_BYTES, Feature, TokenizedPrompt
from extproc.requests.request import ApiKind, InferenceRequest, TextPrompt, TokenPrompt
from kvmesh.pods.page_steps import Steps

PATH = "/tokenize"
# SGLang 0.5.23 (entrypoints/openai/protocol.py, TokenizeRequest): its /tokenize reads the field, its chats do not
UNREAD_BY_SGLANG = {"add_generation_prompt": b"null"}
# vLLM renders chats of these models in code, but /tokenize does not. Only their names are known here.
RENDERED_IN_CODE = re.compile(r"gpt-?oss|deepseek-v(3\.2|4)|kimi-(k3|audio)|inkling", re.IGNORECASE)
_ABSENT = msgspec.Raw()  # the value of an absent field


MAX_PARTS = 1 << 14  # objects in an answer: prompts, and places of media
STEP_BYTES = 1 << 16  # of JSON token ids, parsed between two turns of the event loop
MAX_IDENTIFIER_CHARACTERS = 256  # of a media item: vLLM's are 64 hex digits, clients may set their own
MAX_COVER = 4  # total media length, in prompt lengths: audio and video of one item share their positions


class _Named(msgspec.Struct, omit_defaults=True):
    model: msgspec.Raw = _ABSENT


class _Chat(_Named, omit_defaults=True, kw_only=True):
    """The fields that a chat shares with /tokenize, unparsed."""

    messages: msgspec.Raw
    add_generation_prompt: msgspec.Raw = _ABSENT
    continue_final_message: msgspec.Raw = _ABSENT
    add_special_tokens: msgspec.Raw = _ABSENT
    chat_template_kwargs: msgspec.Raw = _ABSENT
    tools: msgspec.Raw = _ABSENT


class _Lost(msgspec.Struct):
    """The fields that change a chat's prompt and that /tokenize lacks."""

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
    """Tell whether /tokenize would render a chat of this model differently from the chat endpoint."""
    is_chat = request.api is ApiKind.CHAT_COMPLETIONS
    return is_chat and any(RENDERED_IN_CODE.search(name) for name in (model.name, *model.aliases))


def tokenize_body(request: InferenceRequest, body: bytes) -> bytes | None:
    """Return the body for /tokenize, or None if /tokenize cannot express the request."""
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
        pass  # a lone surrogate, or a form that the pod refuses
    return None


def _chat(body: bytes) -> bytes | None:
    lost = _LOST.decode(body)
    if any(bytes(each) not in _NOTHING for each in (lost.documents, lost.reasoning_effort, lost.chat_template)):
        return None
    if bytes(lost.tool_choice) == b'"none"':  # pods may then omit the tools
        return None
    return msgspec.json.encode(_CHAT.decode(body))


class RenderAnswerError(ValueError):
    """The answer does not have the format of vLLM's render endpoint."""


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


class _Features(msgspec.Struct):
    mm_hashes: dict[str, list[str]] = {}
    mm_placeholders: dict[str, list[_Placeholder]] = {}


class _Rendered(msgspec.Struct):
    token_ids: msgspec.Raw  # a list of numbers
    features: _Features | None = None


class _Tokenized(msgspec.Struct):
    tokens: msgspec.Raw  # a list of numbers


class _Error(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Error | None = None
    message: str = ""  # older versions do not wrap it in `error`


_ANSWER = msgspec.json.Decoder(_Rendered | list[_Rendered])
_TOKENIZED = msgspec.json.Decoder(_Tokenized)
_REFUSAL = msgspec.json.Decoder(_Refusal)
_IDS = msgspec.json.Decoder(list[int])


def read_render_answer(body: bytes) -> Steps[tuple[TokenizedPrompt, ...]]:
    """Return the prompts of a 200 answer. Raise RenderAnswerError."""
    if body.count(b"{") > MAX_PARTS:
        raise RenderAnswerError(f"its answer has more than {MAX_PARTS} parts")
    try:
        answer = _ANSWER.decode(body)
        yield
        prompts: list[TokenizedPrompt] = []
        for rendered in answer if isinstance(answer, list) else [answer]:
            tokens = yield from _packed(bytes(rendered.token_ids))
            features = () if rendered.features is None else _features(rendered.features, len(tokens) // TOKEN_BYTES)
            prompts.append(TokenizedPrompt(tokens=tokens, features=features))
        return tuple(prompts)
    except RenderAnswerError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's render endpoint: {error}") from error


def read_tokenize_answer(body: bytes) -> Steps[tuple[TokenizedPrompt, ...]]:
    """Return the one prompt of a 200 answer of /tokenize. Raise RenderAnswerError."""
    try:
        answer = _TOKENIZED.decode(body)
        yield
        tokens = yield from _packed(bytes(answer.tokens))
        return (TokenizedPrompt(tokens=tokens),)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError, ValueError) as error:
        raise RenderAnswerError(f"not an answer of vLLM's tokenize endpoint: {error}") from error


def read_refusal(body: bytes) -> str:
    """Return the message of a 4xx or 5xx answer, shortened; "" if it has none."""
    try:
        refusal = _REFUSAL.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return (refusal.error.message if refusal.error is not None else refusal.message)[:200]


def _packed(ids: bytes) -> Steps[bytes]:
    """Return a JSON list of token ids as little-endian uint32, parsed in steps of STEP_BYTES."""
    if not ids.startswith(b"[") or len(ids) <= STEP_BYTES:
        return TokenPrompt.of(_IDS.decode(ids)).token_bytes
    packed: list[bytes] = []
    begin, size = 1, len(ids) - 1  # between the brackets
    while begin < size:
        end = ids.find(b",", begin + STEP_BYTES, size)
        end = size if end < 0 else end
        packed.append(TokenPrompt.of(_IDS.decode(b"[%b]" % ids[begin:end])).token_bytes)
        begin = end + 1
        yield
    return b"".join(packed)


def _features(features: _Features, tokens: int) -> tuple[Feature, ...]:
    """Return a prompt's media by position, as the engine hashes them; `tokens` is its length."""
    found: list[Feature] = []
    covered = 0
    for kind, identifiers in features.mm_hashes.items():
        places = features.mm_placeholders.get(kind, [])
        if len(places) != len(identifiers):
            raise RenderAnswerError(f"{len(identifiers)} hashes but {len(places)} places of kind {kind[:40]!r}")
        for identifier, place in zip(identifiers, places, strict=True):
            if place.offset < 0 or place.length < 0 or place.offset + place.length > tokens:
                raise RenderAnswerError(f"an item of kind {kind[:40]!r} stands beyond the prompt's {tokens} tokens")
            if len(identifier) > MAX_IDENTIFIER_CHARACTERS:
                raise RenderAnswerError(f"an item has a name of more than {MAX_IDENTIFIER_CHARACTERS} characters")
            covered += place.length
            found.append(Feature(identifier=identifier, first_token=place.offset, length=place.length))
    if covered > MAX_COVER * tokens:
        raise RenderAnswerError("its media cover the prompt again and again")
    return tuple(sorted(found, key=lambda feature: feature.first_token))
